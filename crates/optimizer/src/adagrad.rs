//! Adagrad (Duchi, Hazan and Singer, "Adaptive Subgradient Methods", JMLR 2011, figure 1, diagonal).

use shared_proto::job::Adagrad;

use crate::stale::OF_SUMS;
use crate::{Part, Rule, Slots, Update};

impl Rule for Adagrad {
    fn slots(&self) -> Slots {
        Slots {
            count: 1,
            initial: self.initial_accumulator,
        }
    }

    fn stale_exponent(&self) -> f64 {
        OF_SUMS
    }

    fn apply(&self, update: Update, part: Part) {
        let (rate, decay, epsilon) = (update.rate(), self.weight_decay, self.epsilon);
        part.update(update.kernel, move |w, g, [sum]| {
            let g = g + decay * w;
            let sum = sum + g * g;
            (w - rate * g / (sum.sqrt() + epsilon), [sum])
        });
    }
}
