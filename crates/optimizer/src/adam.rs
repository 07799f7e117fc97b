//! Adam (Kingma and Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015, algorithm 1) and
//! AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019, algorithm 2).

use shared_proto::job::{Adam, AdamW};

use crate::{Part, Rule, Slots, Update};

const SLOTS: Slots = Slots {
    count: 2,
    initial: 0.0,
};

impl Rule for Adam {
    fn slots(&self) -> Slots {
        SLOTS
    }

    fn apply(&self, update: Update, part: Part) {
        let moments = Moments {
            beta1: self.beta1,
            beta2: self.beta2,
            epsilon: self.epsilon,
        };
        moments.apply(update, 1.0, self.weight_decay, part);
    }
}

impl Rule for AdamW {
    fn slots(&self) -> Slots {
        SLOTS
    }

    fn apply(&self, update: Update, part: Part) {
        let moments = Moments {
            beta1: self.beta1,
            beta2: self.beta2,
            epsilon: self.epsilon,
        };
        let keep = 1.0 - update.learning_rate * self.weight_decay;
        moments.apply(update, keep, 0.0, part);
    }
}

/// The settings that Adam and AdamW have in common.
struct Moments {
    beta1: f32,
    beta2: f32,
    epsilon: f32,
}

impl Moments {
    /// Applies a gradient, to which `decay` times the weight is added. The weight itself is multiplied by `keep`.
    fn apply(&self, update: Update, keep: f32, decay: f32, part: Part) {
        let (beta1, beta2, epsilon) = (self.beta1, self.beta2, self.epsilon);
        // Corrects the bias of means that begin at zero; in f64, because the powers begin near one.
        let power = update.number.min(i32::MAX as u64) as i32;
        let lack = |beta: f32| 1.0 - f64::from(beta).powi(power);
        let step = (f64::from(update.learning_rate) / lack(beta1)) as f32;
        let root = lack(beta2).sqrt() as f32;
        update.kernel.run(|| {
            for (w, g, mean, square) in part.with_two_slots() {
                let g = g + decay * *w;
                *mean += (1.0 - beta1) * (g - *mean);
                *square = beta2 * *square + (1.0 - beta2) * g * g;
                *w = keep * *w - step * *mean / (square.sqrt() / root + epsilon);
            }
        });
    }
}
