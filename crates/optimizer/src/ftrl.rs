//! FTRL-Proximal (McMahan et al., "Ad Click Prediction: a View from the Trenches", KDD 2013,
//! algorithm 1), with TensorFlow's conventions: the l2 strength counts twice in the divisor, and
//! shrinkage acts on the linear term alone.

use shared_proto::job::Ftrl;
use shared_proto::kernel::{Simd, WithSimd};

use crate::{Part, Rule, Slots, Update};

impl Rule for Ftrl {
    fn slots(&self) -> Slots {
        // The linear term begins at zero, the sum of squares does not; `apply` adds where it begins.
        Slots {
            count: 2,
            initial: 0.0,
        }
    }

    fn apply(&self, update: Update, part: Part) {
        update.kernel.run(Work {
            settings: self,
            rate: update.learning_rate,
            factor: update.factor,
            part,
        });
    }
}

/// The update of a part.
struct Work<'a> {
    settings: &'a Ftrl,
    rate: f32,
    factor: f32,
    part: Part<'a>,
}

impl WithSimd for Work<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let elements = self.part.with_two_slots();
        update_elements(self.settings, self.rate, self.factor, elements);
    }
}

/// Updates elements, each a weight, its gradient, its sum of squares and its linear term. `factor` is the part of each step that is made.
#[inline(always)]
pub(crate) fn update_elements<'a>(
    settings: &Ftrl,
    rate: f32,
    factor: f32,
    elements: impl Iterator<Item = (&'a mut f32, f32, &'a mut f32, &'a mut f32)>,
) {
    // A schedule may end at a rate of 0. Such an update changes nothing, and the formula would divide by 0.
    if rate == 0.0 {
        return;
    }
    // The usual power is the square root, which is a single instruction.
    if settings.learning_rate_power == -0.5 {
        update_with_power(settings, rate, factor, f32::sqrt, elements);
    } else {
        let power = -settings.learning_rate_power;
        update_with_power(settings, rate, factor, |n| n.powf(power), elements);
    }
}

#[inline(always)]
fn update_with_power<'a>(
    settings: &Ftrl,
    rate: f32,
    factor: f32,
    raise: impl Fn(f32) -> f32,
    elements: impl Iterator<Item = (&'a mut f32, f32, &'a mut f32, &'a mut f32)>,
) {
    let (begin, l1, shrinkage) = (
        settings.initial_accumulator,
        settings.l1,
        settings.l2_shrinkage,
    );
    let l2 = settings.l2 + settings.beta / (2.0 * rate);
    for (w, g, sum, linear) in elements {
        let before = begin + *sum;
        *sum += g * g;
        let (old, new) = (raise(before), raise(begin + *sum));
        *linear += g + 2.0 * shrinkage * *w - (new - old) / rate * *w;
        let divisor = new / rate + 2.0 * l2;
        let whole = (linear.clamp(-l1, l1) - *linear) / divisor;
        // A weight that is exactly 0 is what l1 is for.
        let is_zero = l1 > 0.0 && linear.abs() <= l1;
        if factor == 1.0 || is_zero {
            *w = whole;
        } else {
            *w += factor * (whole - *w);
            // The weight of the next step follows from the linear term.
            *linear = -*w * divisor - l1.copysign(*w);
        }
    }
}
