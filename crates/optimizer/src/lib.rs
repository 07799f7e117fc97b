//! Optimizers, which change weights in place by gradients, and learning-rate schedules.
//!
//! Each optimizer works element by element on flat slices. The caller stores the optimizer's state in slots: a server
//! beside the weights of a block, a worker beside its own weights. Arithmetic is in f32, in the order of PyTorch's
//! single-tensor implementations (FTRL: of TensorFlow's). The results agree with these implementations within 1e-5 on
//! the vectors in `tests/vectors`.

mod adagrad;
mod adam;
mod elements;
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

/// The form of a block's state for an optimizer: `count` arrays as long as the weights, back to back.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Slots {
    /// The number of slots of each weight, [`MOST_SLOTS`] at most.
    pub count: usize,
    /// The value of an optimizer's slot before the first update.
    pub initial: f32,
}

impl Slots {
    /// Splits a block's state into its arrays. Arrays that are not in use are empty.
    pub fn split(self, state: &mut [f32]) -> [&mut [f32]; MOST_SLOTS] {
        let length = state.len() / self.count.max(1);
        let mut arrays = state.chunks_mut(length.max(1));
        std::array::from_fn(|_| arrays.next().unwrap_or_default())
    }
}

/// The parameters of an update.
#[derive(Clone, Copy, Debug)]
pub struct Update {
    /// The learning rate, with the factor of its schedule.
    pub learning_rate: f32,
    /// The fraction of the step that is made: 1, or less for a gradient that was computed with old weights.
    pub factor: f32,
    /// The number of this update of the block, from 1.
    pub number: u64,
    /// The instructions to use; the result is the same with all of them.
    pub kernel: Kernel,
}

impl Update {
    /// Returns the learning rate, multiplied by the fraction of the step that is made.
    fn rate(&self) -> f32 {
        self.factor * self.learning_rate
    }
}

/// A part of a block, or the whole block.
#[derive(Debug)]
pub struct Part<'a> {
    /// The weights, which the update overwrites.
    pub weights: &'a mut [f32],
    /// The gradient, as long as the weights.
    pub gradient: &'a [LeF32],
    /// The slots. The first [`Slots::count`] arrays are as long as the weights, the others are not in use.
    pub slots: [&'a mut [f32]; MOST_SLOTS],
    /// The look-ahead weights, which the update computes; `None` if they are not needed.
    pub ahead: Option<LookAhead<'a>>,
}

/// The look-ahead weights of a part: the weights to which the momentum leads in the next updates, if these have no
/// gradient. Without momentum, they equal the weights.
#[derive(Debug)]
pub struct LookAhead<'a> {
    /// The look-ahead weights, which the update overwrites. There are as many as weights.
    pub made: &'a mut [f32],
    /// The distance of the look-ahead weights from the weights, as a multiple of the momentum's step in this update:
    /// the result of [`Rule::steps_ahead`].
    pub steps: f32,
}

/// The update rule of an optimizer.
pub trait Rule: Send + Sync {
    /// Returns the slots that the rule needs for each weight.
    fn slots(&self) -> Slots;

    /// Applies the part's gradient to its weights, and computes its look-ahead weights, if there are any.
    fn apply(&self, update: Update, part: Part);

    /// Returns the exponent `e` by which steps are shortened: with `n` updates in flight, the factor of a step is at
    /// least `n^-e`. The exponent is 1 if the step is proportional to the gradient, and less if the step is divided by
    /// the gradient's size.
    fn stale_exponent(&self) -> f64;

    /// Returns how far the momentum carries the weights in the `updates` updates after `update`, if these have no
    /// gradient, as a multiple of the momentum's step in `update`.
    fn steps_ahead(&self, _update: Update, _updates: f64) -> f32 {
        0.0
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
