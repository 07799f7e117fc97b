//! RMSProp (Tieleman and Hinton, "Neural Networks for Machine Learning", lecture 6.5, 2012), with
//! optional momentum.

use shared_proto::job::RmsProp;

use crate::stale::{OF_MOMENTS, carry};
use crate::{Part, Rule, Slots, Update};

impl Rule for RmsProp {
    fn slots(&self) -> Slots {
        Slots {
            count: if self.momentum > 0.0 { 2 } else { 1 },
            initial: 0.0,
        }
    }

    fn stale_exponent(&self) -> f64 {
        OF_MOMENTS
    }

    fn apply(&self, update: Update, part: Part) {
        let (rate, decay, mu) = (update.rate(), self.weight_decay, self.momentum);
        let (alpha, epsilon) = (self.alpha, self.epsilon);
        if mu > 0.0 {
            part.update(update.kernel, move |w, g, [square, velocity]| {
                let g = g + decay * w;
                let square = alpha * square + (1.0 - alpha) * g * g;
                let velocity = mu * velocity + g / (square.sqrt() + epsilon);
                (w - rate * velocity, [square, velocity])
            });
        } else {
            part.update(update.kernel, move |w, g, [square]| {
                let g = g + decay * w;
                let square = alpha * square + (1.0 - alpha) * g * g;
                (w - rate * (g / (square.sqrt() + epsilon)), [square])
            });
        }
    }

    fn steps_ahead(&self, _: Update, updates: f64) -> f32 {
        carry(self.momentum, updates, |_| 1.0)
    }
}
