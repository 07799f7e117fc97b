//! Adagrad (Duchi, Hazan and Singer, "Adaptive Subgradient Methods", JMLR 2011, figure 1, diagonal).

use shared_proto::job::Adagrad;

use crate::{Part, Rule, Slots, Update};

impl Rule for Adagrad {
    fn slots(&self) -> Slots {
        Slots {
            count: 1,
            initial: self.initial_accumulator,
        }
    }

    fn apply(&self, update: Update, part: Part) {
        let (rate, decay, epsilon) = (update.rate(), self.weight_decay, self.epsilon);
        update.kernel.run(|| {
            for (w, g, sum) in part.with_slot() {
                let g = g + decay * *w;
                *sum += g * g;
                *w -= rate * g / (sum.sqrt() + epsilon);
            }
        });
    }
}
