//! The contents of a block of a dense variable: consecutive elements.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use optimizer::{MOST_SLOTS, Part, Update, VariableRule};
use shared_proto::kernel::Kernel;
use shared_proto::payload::{self, Dtype, Elements, LeF32};
use shared_proto::values::Values;

use super::contents::{Contents, Limit, RowsLost, SharedValues, Wanted, squares};

/// The number of elements that are updated at a time: they are in the first-level cache when the result is checked.
pub(super) const PART: usize = 2048;

/// Consecutive elements of a variable.
#[derive(Debug, Default)]
pub(super) struct Dense {
    /// Empty until initial values come. Shared with the answers that are being sent and with the
    /// checkpoint that is being written: while one of these uses the values, an update leaves them as they
    /// are and continues with a copy.
    weights: Arc<Vec<f32>>,
    /// The arrays of slots, each as long as the weights, back to back.
    slots: Arc<Vec<f32>>,
}

impl Dense {
    pub(super) fn restored(weights: &Bytes, slots: &Bytes) -> Self {
        let numbers = |bytes: &Bytes| -> Arc<Vec<f32>> {
            Arc::new(payload::elements(bytes).iter().map(|v| v.get()).collect())
        };
        Self {
            weights: numbers(weights),
            slots: numbers(slots),
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
            finite: true,
        }
    }
}

impl Contents for Dense {
    fn initialize(&mut self, values: &Elements, rule: &VariableRule) {
        let weights = values.to_vec();
        self.slots = Arc::new(rule.initial_slots(&weights));
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
            None => Elements::of(payload::share(&self.weights), Dtype::F32),
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
        size_of_val(&**self.weights) + size_of_val(&**self.slots)
    }

    fn share(&mut self, _: u64) -> SharedValues {
        SharedValues::Dense {
            weights: payload::share(&self.weights),
            slots: payload::share(&self.slots),
        }
    }
}

/// Sums gradients of so many elements, each times its factor, part by part, and hands over each limited sum.
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
    /// True while all changed values are finite.
    finite: bool,
}

impl Begun<'_> {
    fn apply(&mut self, range: Range<usize>, gradient: &[LeF32]) {
        for (start, gradient) in range.step_by(PART).zip(gradient.chunks(PART)) {
            self.apply_part(start..start + gradient.len(), gradient);
        }
    }

    fn apply_part(&mut self, range: Range<usize>, gradient: &[LeF32]) {
        let slots = self
            .slots
            .each_mut()
            .map(|slot| slot.get_mut(range.clone()).unwrap_or_default());
        let part = Part {
            weights: &mut self.weights[range.clone()],
            gradient,
            slots,
        };
        self.rule.apply(self.update, part);
        let slots = self.slots.each_ref();
        let slots = slots.map(|slot| slot.get(range.clone()).unwrap_or_default());
        let finite = |values: &[f32]| all_finite(self.update.kernel, values);
        self.finite &= finite(&self.weights[range.clone()]) && slots.into_iter().all(finite);
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
