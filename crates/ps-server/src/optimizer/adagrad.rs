//! Adagrad (Duchi, Hazan and Singer, "Adaptive Subgradient Methods", JMLR 2011, figure 1, diagonal).

use shared_proto::job::Adagrad;
use shared_proto::payload::LeF32;

use super::{Rule, Slots, Update, with_slot};

impl Rule for Adagrad {
    fn slots(&self) -> Slots {
        Slots {
            count: 1,
            initial: self.initial_accumulator,
        }
    }

    fn apply(
        &self,
        update: Update,
        weights: &mut [f32],
        gradient: &[LeF32],
        slots: [&mut [f32]; 2],
    ) {
        let (rate, decay, epsilon) = (update.learning_rate, self.weight_decay, self.epsilon);
        update.kernel.run(|| {
            for (w, g, sum) in with_slot(weights, gradient, slots) {
                let g = g + decay * *w;
                *sum += g * g;
                *w -= rate * g / (sum.sqrt() + epsilon);
            }
        });
    }
}
