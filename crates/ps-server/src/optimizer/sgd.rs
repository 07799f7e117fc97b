//! Stochastic gradient descent (Robbins and Monro, "A Stochastic Approximation Method", 1951).

use shared_proto::job::Sgd;
use shared_proto::payload::LeF32;

use super::{Rule, Slots, Update};

impl Rule for Sgd {
    fn slots(&self) -> Slots {
        Slots {
            count: 0,
            initial: 0.0,
        }
    }

    fn apply(&self, update: Update, weights: &mut [f32], gradient: &[LeF32], _: [&mut [f32]; 2]) {
        let (rate, decay) = (update.learning_rate, self.weight_decay);
        update.kernel.run(|| {
            for (w, g) in weights.iter_mut().zip(gradient) {
                *w -= rate * (g.get() + decay * *w);
            }
        });
    }
}
