//! Optimizers, which change weights in place by gradients, and learning-rate schedules.
//!
//! Each works element by element on flat slices, and keeps its state in slots that its caller stores: a server beside
//! a block's weights, a worker beside its own. Arithmetic is in f32, in the order of PyTorch's single-tensor implementations
//! (FTRL: of TensorFlow's), with which they agree within 1e-5 over the vectors in `tests/vectors`.

mod adagrad;
mod adam;
mod ftrl;
mod momentum;
mod rmsprop;
pub mod row;
pub mod schedule;
mod sgd;
mod stale;
mod variable;

use shared_proto::job::Optimizer;
use shared_proto::kernel::Kernel;
use shared_proto::payload::LeF32;

pub use stale::{CorrectedStep, Norms, StaleStep, StaleSteps};
pub use variable::VariableRule;

/// The most slots of a weight: two of an optimizer, and the weight's moving average.
pub const MOST_SLOTS: usize = 3;

/// A block's state for an optimizer: `count` arrays as long as the weights, back to back.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Slots {
    /// The number of slots of each weight, [`MOST_SLOTS`] at most.
    pub count: usize,
    /// The value of an optimizer's slot before the first update.
    pub initial: f32,
}

impl Slots {
    /// Returns the arrays of a block's state. Arrays that are not in use are empty.
    pub fn split(self, state: &mut [f32]) -> [&mut [f32]; MOST_SLOTS] {
        let length = state.len() / self.count.max(1);
        let mut arrays = state.chunks_mut(length.max(1));
        std::array::from_fn(|_| arrays.next().unwrap_or_default())
    }
}

/// The parameters of an update.
#[derive(Clone, Copy, Debug)]
pub struct Update {
    /// The learning rate, its schedule's factor included.
    pub learning_rate: f32,
    /// The part of the step that is made: 1, or less for a gradient of old weights.
    pub factor: f32,
    /// The number of this update of the block, from 1.
    pub number: u64,
    /// The instructions to use; the result is the same with all of them.
    pub kernel: Kernel,
}

impl Update {
    /// Returns the learning rate of the part of the step that is made.
    fn rate(&self) -> f32 {
        self.factor * self.learning_rate
    }
}

/// A part of a block, all of it or less.
#[derive(Debug)]
pub struct Part<'a> {
    /// The weights to be changed.
    pub weights: &'a mut [f32],
    /// The gradient, as long as the weights.
    pub gradient: &'a [LeF32],
    /// The slots. The first [`Slots::count`] arrays are as long as the weights, the others are not in use.
    pub slots: [&'a mut [f32]; MOST_SLOTS],
}

/// The update rule of an optimizer.
pub trait Rule: Send + Sync {
    /// Returns the slots that it needs for each weight.
    fn slots(&self) -> Slots;

    /// Applies the part's gradient to its weights.
    fn apply(&self, update: Update, part: Part);

    /// Makes the weights to which the momentum leads in the next `updates`, if these have no gradient: the steps of these updates, each times
    /// the factor of the last one, `update`, whose momentum is in the slots. Without momentum, they equal the weights.
    fn look_ahead(&self, _update: Update, _updates: f64, ahead: LookAhead) {
        ahead.made.copy_from_slice(ahead.weights);
    }
}

/// Weights to which momentum leads, and what says where to.
#[derive(Debug)]
pub struct LookAhead<'a> {
    /// The look-ahead weights, which are overwritten.
    pub made: &'a mut [f32],
    /// The weights after the last update.
    pub weights: &'a [f32],
    /// The weights before the last update.
    pub before: &'a [f32],
    /// The slots, as in [`Part::slots`].
    pub slots: [&'a [f32]; MOST_SLOTS],
}

impl LookAhead<'_> {
    /// Makes the last step so many times again. Unlike the slots of weights that have no gradients any more, it has no denormal numbers,
    /// which processors are slow with.
    fn step_again(self, kernel: Kernel, times: f32) {
        kernel.run(|| {
            let weights = self.weights.iter().zip(self.before);
            for (made, (w, before)) in self.made.iter_mut().zip(weights) {
                *made = w + times * (w - before);
            }
        });
    }
}

/// Returns the rule of a job's settings.
pub fn rule(optimizer: &Optimizer) -> Box<dyn Rule> {
    match optimizer.clone() {
        Optimizer::Sgd(settings) => Box::new(settings),
        Optimizer::Momentum(settings) => Box::new(settings),
        Optimizer::Adagrad(settings) => Box::new(settings),
        Optimizer::RmsProp(settings) => Box::new(settings),
        Optimizer::Adam(settings) => Box::new(settings),
        Optimizer::AdamW(settings) => Box::new(settings),
        Optimizer::Ftrl(settings) => Box::new(settings),
    }
}

impl<'a> Part<'a> {
    /// Iterates over the weight, the gradient and one slot of each element.
    #[inline(always)]
    fn with_slot(self) -> impl Iterator<Item = (&'a mut f32, f32, &'a mut f32)> {
        let [slot, ..] = self.slots;
        let gradient = self.gradient.iter().map(|g| g.get());
        let pairs = self.weights.iter_mut().zip(gradient);
        pairs.zip(slot).map(|((w, g), s)| (w, g, s))
    }

    /// Iterates over the weight, the gradient and two slots of each element.
    #[inline(always)]
    fn with_two_slots(self) -> impl Iterator<Item = (&'a mut f32, f32, &'a mut f32, &'a mut f32)> {
        let [first, second, ..] = self.slots;
        let gradient = self.gradient.iter().map(|g| g.get());
        let pairs = self.weights.iter_mut().zip(gradient);
        let slots = first.iter_mut().zip(second);
        pairs.zip(slots).map(|((w, g), (a, b))| (w, g, a, b))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shared_proto::job::RmsProp;

    /// The coordinator checks by the job's slot count whether a model fits, so that count must match the rule's.
    #[test]
    fn rules_keep_as_many_numbers_as_the_job_says() {
        let named = Optimizer::NAMES.map(|name| Optimizer::named(name).unwrap());
        let heavy = Optimizer::RmsProp(RmsProp {
            momentum: 0.9,
            ..RmsProp::default()
        });
        for optimizer in named.into_iter().chain([heavy]) {
            assert_eq!(
                rule(&optimizer).slots().count,
                optimizer.slots(),
                "{optimizer:?}"
            );
        }
    }
}
