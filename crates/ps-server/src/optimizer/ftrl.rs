//! FTRL-Proximal (McMahan et al., "Ad Click Prediction: a View from the Trenches", KDD 2013,
//! algorithm 1), with TensorFlow's conventions: the l2 strength counts twice in the divisor, and
//! shrinkage acts on the linear term alone.

use shared_proto::job::Ftrl;
use shared_proto::payload::LeF32;

use super::{Rule, Slots, Update};

impl Rule for Ftrl {
    fn slots(&self) -> Slots {
        // The linear term begins at zero, the sum of squares does not; `apply` adds where it begins.
        Slots {
            count: 2,
            initial: 0.0,
        }
    }

    fn apply(&self, update: Update, weights: &mut [f32], gradient: &[LeF32], slots: &mut [f32]) {
        let (rate, power) = (update.learning_rate, -self.learning_rate_power);
        let l2 = self.l2 + self.beta / (2.0 * rate);
        let raise = |n: f32| {
            if power == 0.5 {
                n.sqrt()
            } else {
                n.powf(power)
            }
        };
        for (w, g, sum, linear) in super::with_two_slots(weights, gradient, slots) {
            let before = self.initial_accumulator + *sum;
            *sum += g * g;
            let (old, new) = (raise(before), raise(self.initial_accumulator + *sum));
            *linear += g + 2.0 * self.l2_shrinkage * *w - (new - old) / rate * *w;
            let divisor = new / rate + 2.0 * l2;
            *w = (linear.clamp(-self.l1, self.l1) - *linear) / divisor;
        }
    }
}
