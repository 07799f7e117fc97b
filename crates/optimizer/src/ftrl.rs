//! FTRL-Proximal (McMahan et al., "Ad Click Prediction: a View from the Trenches", KDD 2013,
//! algorithm 1), with TensorFlow's conventions: the l2 strength counts twice in the divisor, and
//! shrinkage acts on the linear term alone.

use shared_proto::job::Ftrl;

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
        let power = -self.learning_rate_power;
        update.kernel.run(|| {
            // The usual power has an instruction of its own.
            if power == 0.5 {
                accumulate(self, update, f32::sqrt, part);
            } else {
                accumulate(self, update, |n| n.powf(power), part);
            }
        });
    }
}

#[inline(always)]
fn accumulate(settings: &Ftrl, update: Update, raise: impl Fn(f32) -> f32, part: Part) {
    let rate = update.learning_rate;
    let (begin, l1, shrinkage) = (
        settings.initial_accumulator,
        settings.l1,
        settings.l2_shrinkage,
    );
    let l2 = settings.l2 + settings.beta / (2.0 * rate);
    for (w, g, sum, linear) in part.with_two_slots() {
        let before = begin + *sum;
        *sum += g * g;
        let (old, new) = (raise(before), raise(begin + *sum));
        *linear += g + 2.0 * shrinkage * *w - (new - old) / rate * *w;
        let divisor = new / rate + 2.0 * l2;
        *w = (linear.clamp(-l1, l1) - *linear) / divisor;
    }
}
