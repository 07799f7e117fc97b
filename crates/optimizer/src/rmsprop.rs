//! RMSProp (Tieleman and Hinton, "Neural Networks for Machine Learning", lecture 6.5, 2012), with
//! optional momentum.

use shared_proto::job::RmsProp;

use crate::stale::carry;
use crate::{LookAhead, Part, Rule, Slots, Update};

impl Rule for RmsProp {
    fn slots(&self) -> Slots {
        Slots {
            count: if self.momentum > 0.0 { 2 } else { 1 },
            initial: 0.0,
        }
    }

    fn apply(&self, update: Update, part: Part) {
        let (rate, decay, mu) = (update.rate(), self.weight_decay, self.momentum);
        let (alpha, epsilon) = (self.alpha, self.epsilon);
        // Each closure is a single loop, as `Kernel::run` requires.
        if mu > 0.0 {
            update.kernel.run(|| {
                for (w, g, square, velocity) in part.with_two_slots() {
                    let g = g + decay * *w;
                    *square = alpha * *square + (1.0 - alpha) * g * g;
                    *velocity = mu * *velocity + g / (square.sqrt() + epsilon);
                    *w -= rate * *velocity;
                }
            });
        } else {
            update.kernel.run(|| {
                for (w, g, square) in part.with_slot() {
                    let g = g + decay * *w;
                    *square = alpha * *square + (1.0 - alpha) * g * g;
                    *w -= rate * (g / (square.sqrt() + epsilon));
                }
            });
        }
    }

    fn look_ahead(&self, update: Update, updates: f64, ahead: LookAhead) {
        ahead.step_again(update.kernel, carry(self.momentum, updates, |_| 1.0));
    }
}
