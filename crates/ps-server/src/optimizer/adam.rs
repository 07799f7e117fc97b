//! Adam (Kingma and Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015, algorithm 1) and
//! AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019, algorithm 2).

use shared_proto::job::Adam;
use shared_proto::payload::LeF32;

use super::{Rule, Slots, Update, with_two_slots};

/// Adam: weight decay is part of the gradient.
pub(super) struct Coupled(pub(super) Adam);

/// AdamW: weight decay acts on the weight itself.
pub(super) struct Decoupled(pub(super) Adam);

const SLOTS: Slots = Slots {
    count: 2,
    initial: 0.0,
};

impl Rule for Coupled {
    fn slots(&self) -> Slots {
        SLOTS
    }

    fn apply(&self, update: Update, weights: &mut [f32], gradient: &[LeF32], slots: &mut [f32]) {
        apply(
            &self.0,
            self.0.weight_decay,
            0.0,
            update,
            weights,
            gradient,
            slots,
        );
    }
}

impl Rule for Decoupled {
    fn slots(&self) -> Slots {
        SLOTS
    }

    fn apply(&self, update: Update, weights: &mut [f32], gradient: &[LeF32], slots: &mut [f32]) {
        apply(
            &self.0,
            0.0,
            self.0.weight_decay,
            update,
            weights,
            gradient,
            slots,
        );
    }
}

fn apply(
    settings: &Adam,
    coupled: f32,
    decoupled: f32,
    update: Update,
    weights: &mut [f32],
    gradient: &[LeF32],
    slots: &mut [f32],
) {
    let Adam {
        beta1,
        beta2,
        epsilon,
        ..
    } = *settings;
    // What the means lack for having begun at zero, in f64 because it begins near one.
    let lack = |beta: f32| 1.0 - f64::from(beta).powi(update.number.min(i32::MAX as u64) as i32);
    let step = (f64::from(update.learning_rate) / lack(beta1)) as f32;
    let root = lack(beta2).sqrt() as f32;
    let keep = 1.0 - update.learning_rate * decoupled;
    for (w, g, mean, square) in with_two_slots(weights, gradient, slots) {
        let g = g + coupled * *w;
        *mean += (1.0 - beta1) * (g - *mean);
        *square = beta2 * *square + (1.0 - beta2) * g * g;
        *w = keep * *w - step * *mean / (square.sqrt() / root + epsilon);
    }
}
