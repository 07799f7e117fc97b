//! Momentum, and Nesterov's (Sutskever et al., "On the Importance of Initialization and Momentum in
//! Deep Learning", ICML 2013, section 2), in the form in which the rate stands outside the velocity.

use shared_proto::job::Momentum;

use crate::stale::carry;
use crate::{LookAhead, Part, Rule, Slots, Update};

impl Rule for Momentum {
    fn slots(&self) -> Slots {
        Slots {
            count: 1,
            initial: 0.0,
        }
    }

    fn apply(&self, update: Update, part: Part) {
        let (rate, decay, mu) = (update.rate(), self.weight_decay, self.momentum);
        // The share of the newest gradient that is added once more.
        let again = if self.nesterov { 1.0 } else { 0.0 };
        let kept = if self.nesterov { mu } else { 1.0 };
        update.kernel.run(|| {
            for (w, g, velocity) in part.with_slot() {
                let g = g + decay * *w;
                *velocity = mu * *velocity + g;
                *w -= rate * (again * g + kept * *velocity);
            }
        });
    }

    fn look_ahead(&self, update: Update, updates: f64, ahead: LookAhead) {
        let carry = carry(self.momentum, updates, |_| 1.0);
        if !self.nesterov {
            return ahead.step_again(update.kernel, carry);
        }
        // A step of Nesterov's has the velocity as it is one update later.
        let far = update.rate() * self.momentum * carry;
        update.kernel.run(|| {
            let weights = ahead.weights.iter().zip(ahead.slots[0]);
            for (made, (w, velocity)) in ahead.made.iter_mut().zip(weights) {
                *made = w - far * velocity;
            }
        });
    }
}
