//! Stochastic gradient descent (Robbins and Monro, "A Stochastic Approximation Method", 1951).

use shared_proto::job::Sgd;

use crate::stale::OF_A_MEAN;
use crate::{Part, Rule, Slots, Update};

impl Rule for Sgd {
    fn slots(&self) -> Slots {
        Slots {
            count: 0,
            initial: 0.0,
        }
    }

    fn stale_exponent(&self) -> f64 {
        OF_A_MEAN
    }

    fn apply(&self, update: Update, part: Part) {
        let (rate, decay) = (update.rate(), self.weight_decay);
        part.update(update.kernel, move |w, g, []| {
            (w - rate * (g + decay * w), [])
        });
    }
}
