//! FTRL-Proximal (McMahan et al., "Ad Click Prediction: a View from the Trenches", KDD 2013,
//! algorithm 1), with TensorFlow's conventions: the l2 strength counts twice in the divisor, and
//! shrinkage acts on the linear term alone.

use shared_proto::job::Ftrl;

use crate::stale::OF_SUMS;
use crate::{Part, Rule, Slots, Update};

impl Rule for Ftrl {
    fn slots(&self) -> Slots {
        // The linear term begins at zero, the sum of squares does not; `apply` adds where it begins.
        Slots {
            count: 2,
            initial: 0.0,
        }
    }

    fn stale_exponent(&self) -> f64 {
        OF_SUMS
    }

    fn apply(&self, update: Update, part: Part) {
        let (rate, factor) = (update.learning_rate, update.factor);
        // A schedule may end at a rate of 0. Such an update changes nothing, and the formula would divide by 0.
        if rate == 0.0 {
            return part.update(update.kernel, move |w, _, []| (w, []));
        }
        // The usual power is the square root, which is a single instruction.
        if self.learning_rate_power == -0.5 {
            part.update(update.kernel, step(self, rate, factor, f32::sqrt));
        } else {
            let power = -self.learning_rate_power;
            let raise = move |n: f32| n.powf(power);
            part.update(update.kernel, step(self, rate, factor, raise));
        }
    }
}

/// Returns the function that updates one element at a rate above 0. It takes the weight, the gradient and the slots
/// (the sum of squares and the linear term), and returns the new weight and slots. `factor` is the fraction of the step
/// that is made. `raise` returns the power of a sum.
#[inline(always)]
pub(crate) fn step(
    settings: &Ftrl,
    rate: f32,
    factor: f32,
    raise: impl Fn(f32) -> f32,
) -> impl Fn(f32, f32, [f32; 2]) -> (f32, [f32; 2]) {
    let (begin, l1, shrinkage) = (
        settings.initial_accumulator,
        settings.l1,
        settings.l2_shrinkage,
    );
    let l2 = settings.l2 + settings.beta / (2.0 * rate);
    move |w, g, [sum, linear]| {
        let new_sum = sum + g * g;
        let (old, new) = (raise(begin + sum), raise(begin + new_sum));
        let linear = linear + (g + 2.0 * shrinkage * w - (new - old) / rate * w);
        let divisor = new / rate + 2.0 * l2;
        let whole = (linear.clamp(-l1, l1) - linear) / divisor;
        // A weight that is exactly 0 is what l1 is for.
        let is_zero = l1 > 0.0 && linear.abs() <= l1;
        if factor == 1.0 || is_zero {
            return (whole, [new_sum, linear]);
        }
        let w = w + factor * (whole - w);
        // The weight of the next step follows from the linear term.
        (w, [new_sum, -w * divisor - l1.copysign(w)])
    }
}
