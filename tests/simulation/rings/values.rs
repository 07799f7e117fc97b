//! Values that show what they are made of: each sample of each epoch has a counter in "samples", each step one in "steps",
//! and each element of "filler" counts the updates. Beside each value is a slot with the number of the newest update that
//! has changed it, in place of an optimizer's state.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;

use replica::{MirrorState, Positions};
use shared_proto::blocks::VariableSpec;

/// The number of training samples.
pub(crate) const SAMPLES: usize = 120;

/// The number of passes over the samples.
pub(crate) const EPOCHS: u32 = 6;

/// The number of samples of all passes. There are no more steps than that.
pub(crate) const VISITS: usize = SAMPLES * EPOCHS as usize;

/// The largest difference between a number and the one that it stands for.
pub(crate) const CLOSE: f32 = 1e-3;

/// The size of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    filler: usize,
}

impl Shape {
    /// A model of which gradients are added up by recursive doubling.
    pub(crate) const SMALL: Self = Self { filler: 8 };

    /// A model of which gradients are added up in segments: they are reduced and scattered, and then gathered.
    pub(crate) const LARGE: Self = Self { filler: 40_000 };

    /// Returns the variables, sorted by name.
    pub(crate) fn variables(self) -> Vec<VariableSpec> {
        let spec = |(name, size): (&str, usize)| VariableSpec {
            name: name.to_owned(),
            shape: vec![size],
            ..VariableSpec::default()
        };
        let sizes = [
            ("filler", self.filler),
            ("samples", VISITS),
            ("steps", VISITS),
        ];
        sizes.into_iter().map(spec).collect()
    }

    /// Returns the number of elements of all variables.
    pub(crate) fn elements(self) -> usize {
        self.filler + 2 * VISITS
    }

    fn samples(self) -> Range<usize> {
        self.filler..self.filler + VISITS
    }

    fn steps(self) -> Range<usize> {
        self.filler + VISITS..self.elements()
    }

    /// Returns the place of a variable's element among all elements.
    pub(crate) fn place(self, variable: usize, element: usize) -> usize {
        [0, self.samples().start, self.steps().start][variable] + element
    }

    /// Returns the gradient of these samples in the step after `clock`, by variable. Its mean over all samples of a step has
    /// the same number for each sample, and ones for the step and in the filler.
    pub(crate) fn gradient(self, clock: u64, positions: Positions) -> Vec<Vec<f32>> {
        let mut samples = vec![0.0; VISITS];
        let visits = visits(positions);
        let each = 1.0 / visits.len() as f32;
        samples[visits].fill(each);
        let mut steps = vec![0.0; VISITS];
        steps[clock as usize % VISITS] = 1.0;
        vec![vec![1.0; self.filler], samples, steps]
    }

    /// Returns the mean gradient of a step that has changed counters from `before` to `after`.
    pub(crate) fn gradient_of(self, before: &[f32], after: &[f32]) -> Vec<f32> {
        let pairs = before.iter().zip(after);
        let mut gradient: Vec<f32> = pairs.map(|(before, after)| after - before).collect();
        let samples = &mut gradient[self.samples()];
        let size = samples.iter().filter(|change| **change != 0.0).count();
        samples
            .iter_mut()
            .for_each(|change| *change /= size.max(1) as f32);
        gradient
    }

    /// Returns what the mean gradient of the step after `clock` counts: the step, and each of its samples once.
    ///
    /// # Errors
    /// If it counts anything else.
    fn counted(self, clock: u64, mut gradient: Vec<f32>) -> Result<Vec<f32>, String> {
        let samples = &mut gradient[self.samples()];
        let size = samples.iter().filter(|share| **share != 0.0).count() as f32;
        if size == 0.0 {
            return Err(format!("the step after clock {clock} has no sample"));
        }
        for (sample, share) in samples.iter_mut().enumerate() {
            *share *= size;
            round(share, |times| match times {
                1.0 => Ok(()),
                times => Err(format!("sample {sample} counts {times} times in one step")),
            })?;
        }
        for (step, share) in gradient[self.steps()].iter_mut().enumerate() {
            round(share, |times| match (step as u64, times) {
                (step, 1.0) if step == clock => Ok(()),
                (step, times) => Err(format!(
                    "step {step} counts {times} times in the step after clock {clock}"
                )),
            })?;
        }
        for (element, share) in gradient[..self.filler].iter_mut().enumerate() {
            let right = |times| match times {
                1.0 => Ok(()),
                _ => Err(format!(
                    "element {element} of the filler counts {times} times"
                )),
            };
            round(share, right)?;
        }
        Ok(gradient)
    }
}

/// Rounds a number to the count that it stands for, which must be 0 or `right`.
fn round(share: &mut f32, right: impl Fn(f32) -> Result<(), String>) -> Result<(), String> {
    let times = share.round();
    if (*share - times).abs() > CLOSE {
        return right(*share);
    }
    *share = times;
    if times == 0.0 { Ok(()) } else { right(times) }
}

/// Returns the samples at these positions, numbered over all epochs.
pub(super) fn visits(positions: Positions) -> Range<usize> {
    let epoch = positions.data_epoch as usize * SAMPLES;
    epoch + positions.start as usize..epoch + positions.end as usize
}

/// The values of a replica.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Values {
    shape: Shape,
    counters: Vec<f32>,
    changed: Vec<f32>,
    pub(crate) updates: u64,
}

impl Values {
    pub(crate) fn initial(shape: Shape) -> Self {
        let zeros = vec![0.0; shape.elements()];
        Self {
            shape,
            counters: zeros.clone(),
            changed: zeros,
            updates: 0,
        }
    }

    /// Returns the values of a state.
    ///
    /// # Errors
    /// If it has another number of values.
    pub(crate) fn of_state(shape: Shape, state: MirrorState) -> Result<Self, String> {
        let MirrorState {
            values: mut counters,
            updates,
            ..
        } = state;
        if counters.len() != 2 * shape.elements() {
            return Err(format!("there are {} values and slots", counters.len()));
        }
        Ok(Self {
            shape,
            changed: counters.split_off(shape.elements()),
            counters,
            updates,
        })
    }

    pub(crate) fn to_state(&self) -> MirrorState {
        MirrorState {
            values: [&self.counters[..], &self.changed[..]].concat(),
            updates: self.updates,
            ..MirrorState::default()
        }
    }

    /// Makes the update of the step before `clock` by its mean gradient.
    ///
    /// # Errors
    /// If the gradient is not that of a whole step with each of its samples once.
    pub(crate) fn update(&mut self, gradient: Vec<f32>, clock: u64) -> Result<(), String> {
        if gradient.len() != self.shape.elements() {
            return Err(format!("the gradient has {} elements", gradient.len()));
        }
        let counted = self.shape.counted(clock.saturating_sub(1), gradient)?;
        self.updates += 1;
        for (element, times) in counted
            .iter()
            .enumerate()
            .filter(|(_, times)| **times != 0.0)
        {
            self.counters[element] += times;
            self.changed[element] = self.updates as f32;
        }
        Ok(())
    }

    /// Writes a block's values and slots, as a checkpoint has them, from this element of a variable on.
    pub(crate) fn write(&mut self, variable: usize, start: usize, values: &[f32], slots: &[f32]) {
        let start = self.shape.place(variable, start);
        self.counters[start..start + values.len()].copy_from_slice(values);
        self.changed[start..start + slots.len()].copy_from_slice(slots);
    }

    /// Checks that the values have the steps before `clock` once, no others, and no sample twice.
    ///
    /// # Errors
    /// Describes the first count that is wrong.
    pub(crate) fn check(&self, clock: u64) -> Result<(), String> {
        if self.updates != clock {
            let updates = self.updates;
            return Err(format!(
                "{updates} updates have made the values of clock {clock}"
            ));
        }
        let steps = self.counters[self.shape.steps()].iter().enumerate();
        let expected = |step: usize| f32::from(u8::from((step as u64) < clock));
        if let Some((step, times)) = steps
            .clone()
            .find(|(step, times)| **times != expected(*step))
        {
            return Err(format!("at clock {clock} step {step} counts {times} times"));
        }
        let mut samples = self.samples().enumerate();
        if let Some((sample, times)) = samples.find(|(_, times)| *times > 1.0) {
            return Err(format!(
                "at clock {clock} sample {sample} counts {times} times"
            ));
        }
        let mut filler = self.counters[..self.shape.filler].iter();
        match filler.find(|times| **times != clock as f32) {
            Some(times) => Err(format!(
                "at clock {clock} the filler counts {times} updates"
            )),
            None => Ok(()),
        }
    }

    /// Returns how often each sample counts, epoch by epoch.
    pub(crate) fn samples(&self) -> impl Iterator<Item = f32> + '_ {
        self.counters[self.shape.samples()].iter().copied()
    }

    /// Returns the part of one that each sample has in its step: the samples of a step have one slot. It is 0 for samples that do not count.
    pub(crate) fn parts(&self) -> Vec<f32> {
        let slots = &self.changed[self.shape.samples()];
        let mut samples: BTreeMap<u32, f32> = BTreeMap::new();
        for slot in slots {
            *samples.entry(slot.to_bits()).or_default() += 1.0;
        }
        let pairs = self.samples().zip(slots);
        pairs
            .map(|(times, slot)| times / samples[&slot.to_bits()])
            .collect()
    }

    /// Returns how often each step counts.
    pub(crate) fn steps(&self) -> impl Iterator<Item = f32> + '_ {
        self.counters[self.shape.steps()].iter().copied()
    }

    /// Returns the number of samples that do not count.
    pub(crate) fn missing(&self) -> usize {
        self.samples().filter(|times| *times == 0.0).count()
    }

    /// Returns a number that differs if any bit of the values, the slots or the number of updates does.
    pub(crate) fn digest(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        let numbers = self.counters.iter().chain(&self.changed);
        let bits: Vec<u32> = numbers.map(|number| number.to_bits()).collect();
        (bits, self.updates).hash(&mut hasher);
        hasher.finish()
    }
}
