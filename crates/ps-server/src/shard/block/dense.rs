//! The contents of a block of a dense variable: consecutive elements.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use optimizer::{LookAhead, MOST_SLOTS, Norms, Part, StaleStep, Update, VariableRule};
use shared_proto::kernel::{Kernel, Simd, WithSimd};
use shared_proto::payload::{self, Dtype, Elements, LeF32};
use shared_proto::values::Values;

use super::contents::{Contents, Limit, RowsLost, SharedValues, Wanted, squares};

/// The number of elements that are updated at a time: few enough to be in the first-level cache still when the result
/// is checked.
pub(super) const PART: usize = 2048;

/// A block with at least `LARGE` parts is large. An update of a large block measures one part in `MEASURED_ONE_IN`,
/// because measuring all parts would cost a pass over the block.
const LARGE: usize = 16;
const MEASURED_ONE_IN: u64 = 4;

/// Consecutive elements of a variable.
#[derive(Debug, Default)]
pub(super) struct Dense {
    /// Empty until initial values come. Shared with the answers that are being sent and with the
    /// checkpoint that is being written: while one of these uses the values, an update leaves them as they
    /// are and continues with a copy.
    weights: Arc<Vec<f32>>,
    /// The arrays of slots, each as long as the weights, back to back.
    slots: Arc<Vec<f32>>,
    /// The look-ahead weights of the last update; empty if it made none. While an answer shares them, the next update
    /// uses other memory.
    ahead: Arc<Vec<f32>>,
    /// The average of the weights after the recent corrected updates; empty if there is none. Shared with the answers
    /// that are being sent.
    average: Arc<Vec<f32>>,
}

impl Dense {
    pub(super) fn restored(weights: &Bytes, slots: &Bytes) -> Self {
        let numbers = |bytes: &Bytes| -> Arc<Vec<f32>> {
            Arc::new(payload::elements(bytes).iter().map(|v| v.get()).collect())
        };
        Self {
            weights: numbers(weights),
            slots: numbers(slots),
            ..Self::default()
        }
    }

    /// Drops the look-ahead weights and the average, which only corrected updates make.
    fn forget_stale(&mut self) {
        (self.ahead, self.average) = (Arc::default(), Arc::default());
    }

    /// Returns memory for the look-ahead weights of a step, which is empty if the step makes none. No answer that is
    /// being sent shares this memory.
    fn memory_for_ahead(&mut self, step: StaleStep) -> Arc<Vec<f32>> {
        let length = step.ahead.map_or(0, |_| self.weights.len());
        let mut memory = std::mem::take(&mut self.ahead);
        match Arc::get_mut(&mut memory) {
            Some(values) if values.len() == length => memory,
            _ => Arc::new(vec![0.0; length]),
        }
    }

    fn begin<'a>(&'a mut self, rule: &'a VariableRule, update: Update) -> Begun<'a> {
        Begun {
            rule,
            update,
            weights: Arc::make_mut(&mut self.weights).as_mut_slice(),
            slots: rule
                .slots()
                .split(Arc::make_mut(&mut self.slots).as_mut_slice()),
            stale: None,
            finite: true,
        }
    }
}

impl Contents for Dense {
    fn initialize(&mut self, values: &Elements, rule: &VariableRule) {
        let weights = values.to_vec();
        self.slots = Arc::new(rule.initial_slots(&weights));
        self.forget_stale();
        self.weights = Arc::new(weights);
    }

    fn initialized(&self) -> bool {
        !self.weights.is_empty()
    }

    fn values(&mut self, wanted: &Wanted, rule: &VariableRule) -> Result<Elements, RowsLost> {
        let averages = rule.averages(self.weights.len());
        Ok(match averages.filter(|_| wanted.average) {
            // A copy: an answer that shared the slots would keep all of them while it is sent.
            Some(place) => self.slots[place].to_vec().into(),
            None => {
                let average = wanted.average && self.has_average();
                let values = if average {
                    &self.average
                } else {
                    &self.weights
                };
                Elements::new(payload::share(values), Dtype::F32)
            }
        })
    }

    fn update(
        &mut self,
        gradients: &[(f32, &Values)],
        rule: &VariableRule,
        update: Update,
        limit: Limit,
        _: &mut Vec<f32>,
    ) -> Result<bool, RowsLost> {
        self.forget_stale();
        let mut begun = self.begin(rule, update);
        if let [(1.0, gradient)] = gradients
            && limit.is_off()
        {
            gradient
                .elements()
                .for_parts(|range, part| begun.apply(range, part));
            return Ok(begun.finite);
        }
        let elements = begun.weights.len();
        // Summed and applied part by part, so that the sum does not leave the first-level cache.
        for_each_limited_sum(gradients, elements, limit, |range, sum| {
            begun.apply_part(range, payload::in_place(sum));
        });
        Ok(begun.finite)
    }

    fn update_stale(
        &mut self,
        gradient: &Values,
        rule: &VariableRule,
        update: Update,
        step: StaleStep,
    ) -> Result<(bool, Norms), RowsLost> {
        let mut ahead = self.memory_for_ahead(step);
        let mut average = std::mem::take(&mut self.average);
        if step.average.is_some() && average.is_empty() {
            average = Arc::clone(&self.weights);
        }
        let factor = step.factor;
        let update = Update { factor, ..update };
        let mut begun = self.begin(rule, update);
        begun.stale = Some(Stale {
            step,
            before: Vec::with_capacity(PART),
            squares: [0.0; 2],
            ahead: Arc::make_mut(&mut ahead).as_mut_slice(),
            steps_ahead: step.ahead.map(|updates| rule.steps_ahead(update, updates)),
            average: match step.average {
                Some(_) => Arc::make_mut(&mut average).as_mut_slice(),
                None => &mut [],
            },
        });
        gradient
            .elements()
            .for_parts(|range, part| begun.apply(range, part));
        let squares = begun.stale.map_or([0.0; 2], |stale| stale.squares);
        // A weight that FTRL's l1 has set to 0 moved by all of its step: its part of the norm is too large, and the next step shorter.
        let norms = Norms {
            weights: squares[0].sqrt(),
            step: squares[1].sqrt() / f64::from(factor),
        };
        let finite = begun.finite;
        self.ahead = ahead;
        self.average = average;
        Ok((finite, norms))
    }

    fn look_ahead(&self) -> Option<Elements> {
        let ahead = Some(&self.ahead).filter(|ahead| !ahead.is_empty())?;
        Some(Elements::new(payload::share(ahead), Dtype::F32))
    }

    fn has_average(&self) -> bool {
        !self.average.is_empty()
    }

    fn squares(&self, gradients: &[(f32, &Values)], limit: Limit, _: &mut Vec<f32>) -> f64 {
        let mut all = 0.0;
        for_each_limited_sum(gradients, self.weights.len(), limit, |_, sum| {
            all += squares(sum);
        });
        all
    }

    fn all_finite(&self) -> bool {
        let finite = |values: &[f32]| all_finite(Kernel::best(), values);
        finite(&self.weights) && finite(&self.slots)
    }

    fn bytes(&self) -> usize {
        let arrays = [&self.weights, &self.slots, &self.ahead, &self.average];
        arrays
            .into_iter()
            .map(|values| size_of_val(&***values))
            .sum()
    }

    fn share(&mut self, _: u64) -> SharedValues {
        SharedValues::Dense {
            weights: payload::share(&self.weights),
            slots: payload::share(&self.slots),
        }
    }
}

/// Multiplies each gradient by its factor, and adds the products up part by part. Calls `take` with the range and the
/// limited sum of each part. A gradient has `elements` elements.
fn for_each_limited_sum(
    gradients: &[(f32, &Values)],
    elements: usize,
    limit: Limit,
    mut take: impl FnMut(Range<usize>, &mut [f32]),
) {
    let mut sum = [0.0; PART];
    for start in (0..elements).step_by(PART) {
        let range = start..elements.min(start + PART);
        let sum = &mut sum[..range.len()];
        sum.fill(0.0);
        for (factor, gradient) in gradients {
            let gradient = gradient.elements().slice(range.clone());
            gradient.for_parts(|of, part| add(*factor, part, &mut sum[of]));
        }
        limit.apply(sum);
        take(range, sum);
    }
}

/// An update in progress, which goes over the elements part by part.
struct Begun<'a> {
    rule: &'a VariableRule,
    update: Update,
    weights: &'a mut [f32],
    slots: [&'a mut [f32]; MOST_SLOTS],
    /// The corrections of an update by a stale gradient; `None` for other updates.
    stale: Option<Stale<'a>>,
    /// True while all changed values are finite.
    finite: bool,
}

impl Begun<'_> {
    fn apply(&mut self, range: Range<usize>, gradient: &[LeF32]) {
        for (start, gradient) in range.step_by(PART).zip(gradient.chunks(PART)) {
            self.apply_part(start..start + gradient.len(), gradient);
        }
    }

    /// Returns whether this update measures the step of a part. An update of a large block measures only some parts,
    /// and the next update measures other parts.
    fn measures(&self, part: usize) -> bool {
        let parts = self.weights.len().div_ceil(PART);
        parts < LARGE || (part as u64 + self.update.number).is_multiple_of(MEASURED_ONE_IN)
    }

    fn apply_part(&mut self, range: Range<usize>, gradient: &[LeF32]) {
        let is_measured = self.measures(range.start / PART);
        let slots = self
            .slots
            .each_mut()
            .map(|slot| slot.get_mut(range.clone()).unwrap_or_default());
        let mut part = Part {
            weights: &mut self.weights[range.clone()],
            gradient,
            slots,
            ahead: None,
        };
        match &mut self.stale {
            None => self.rule.apply(self.update, part),
            Some(stale) => {
                stale.before.clear();
                if is_measured {
                    stale.before.extend_from_slice(part.weights);
                }
                part.ahead = stale.steps_ahead.map(|steps| LookAhead {
                    made: &mut stale.ahead[range.clone()],
                    steps,
                });
                self.rule.apply_rule(self.update, part);
                self.measure_and_average(range.clone(), is_measured);
            }
        }
        let slots = self.slots.each_ref();
        let slots = slots.map(|slot| slot.get(range.clone()).unwrap_or_default());
        let finite = |values: &[f32]| all_finite(self.update.kernel, values);
        self.finite &= finite(&self.weights[range.clone()]) && slots.into_iter().all(finite);
    }

    /// Measures the step of a part if `is_measured`, and moves the averages.
    fn measure_and_average(&mut self, range: Range<usize>, is_measured: bool) {
        let Self {
            rule,
            update,
            stale: Some(stale),
            ..
        } = self
        else {
            return;
        };
        let weights = &self.weights[range.clone()];
        if is_measured {
            let more = squares_of_step(update.kernel, &stale.before, weights);
            for (sum, more) in stale.squares.iter_mut().zip(more) {
                *sum += more;
            }
        }
        if rule.has_averages() {
            let averages = &mut self.slots[rule.rule_slots().count][range.clone()];
            rule.move_averages(*update, weights, averages);
        }
        if let Some(share) = stale.step.average {
            move_average(
                update.kernel,
                share,
                weights,
                &mut stale.average[range.clone()],
            );
        }
    }
}

/// The corrections of an update by a stale gradient, and what they compute.
struct Stale<'a> {
    step: StaleStep,
    /// The weights of a part before the step; empty if the part is not measured.
    before: Vec<f32>,
    /// The sum of the squares of the measured weights before the step, and the sum of the squares of the step.
    squares: [f64; 2],
    /// The look-ahead weights; empty if there are none.
    ahead: &'a mut [f32],
    /// The result of [`VariableRule::steps_ahead`]; `None` if the update makes no look-ahead weights.
    steps_ahead: Option<f32>,
    /// The average of the weights; empty if this update does not change it.
    average: &'a mut [f32],
}

/// Moves an average toward the weights by this share of the distance. A share of 1 overwrites the average with the
/// weights, whatever it was.
fn move_average(kernel: Kernel, share: f32, weights: &[f32], average: &mut [f32]) {
    if share == 1.0 {
        return average.copy_from_slice(weights);
    }
    kernel.run(|| {
        for (average, weight) in average.iter_mut().zip(weights) {
            *average += share * (*weight - *average);
        }
    });
}

/// The number of sums that are added up side by side. It is fixed, so that the result is the same on each machine.
const LANES: usize = 16;

/// Returns the sum of the squares of the weights before a step, and the sum of the squares of the step.
fn squares_of_step(kernel: Kernel, before: &[f32], after: &[f32]) -> [f64; 2] {
    let sums = kernel.run(SquaresOfStep { before, after });
    sums.map(|sums| sums.into_iter().map(f64::from).sum())
}

/// The weights before and after a step.
struct SquaresOfStep<'a> {
    before: &'a [f32],
    after: &'a [f32],
}

impl WithSimd for SquaresOfStep<'_> {
    type Output = [[f32; LANES]; 2];

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> Self::Output {
        let (mut weights, mut steps) = ([0.0; LANES], [0.0; LANES]);
        let (before, rest_before) = self.before.as_chunks::<LANES>();
        let (after, rest_after) = self.after.as_chunks::<LANES>();
        for (before, after) in before.iter().zip(after) {
            for lane in 0..LANES {
                let moved = after[lane] - before[lane];
                weights[lane] += before[lane] * before[lane];
                steps[lane] += moved * moved;
            }
        }
        for (before, after) in rest_before.iter().zip(rest_after) {
            weights[0] += before * before;
            steps[0] += (after - before) * (after - before);
        }
        [weights, steps]
    }
}

/// Adds a gradient times a factor to a sum.
fn add(factor: f32, gradient: &[LeF32], sum: &mut [f32]) {
    Kernel::best().run(|| {
        for (sum, g) in sum.iter_mut().zip(gradient) {
            *sum += factor * g.get();
        }
    });
}

fn all_finite(kernel: Kernel, values: &[f32]) -> bool {
    let exponents = || {
        values
            .iter()
            .fold(0, |most, v| most.max(v.to_bits() & 0x7fff_ffff))
    };
    kernel.run(exponents) < f32::INFINITY.to_bits()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_squares_of_a_step_are_the_same_on_each_machine() {
        for length in [0, 1, LANES - 1, LANES, 3 * LANES + 5] {
            let before: Vec<f32> = (0..length).map(|i| (i as f32).sin()).collect();
            let after: Vec<f32> = (0..length).map(|i| (i as f32 + 0.1).sin()).collect();
            let step: Vec<f32> = after.iter().zip(&before).map(|(a, b)| a - b).collect();
            let expected = [squares(&before), squares(&step)];
            for kernel in Kernel::all() {
                let found = squares_of_step(kernel, &before, &after);
                assert_eq!(found, squares_of_step(Kernel::baseline(), &before, &after));
                for (found, expected) in found.into_iter().zip(expected) {
                    assert!((found - expected).abs() <= 1e-6 * expected, "{length}");
                }
            }
        }
    }
}
