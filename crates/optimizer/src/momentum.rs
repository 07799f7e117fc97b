//! Momentum, and Nesterov's (Sutskever et al., "On the Importance of Initialization and Momentum in
//! Deep Learning", ICML 2013, section 2), in the form in which the rate stands outside the velocity.

use shared_proto::job::Momentum;

use crate::stale::{OF_A_MEAN, carry};
use crate::{LookAhead, Part, Rule, Slots, Update};

impl Rule for Momentum {
    fn slots(&self) -> Slots {
        Slots {
            count: 1,
            initial: 0.0,
        }
    }

    fn stale_exponent(&self) -> f64 {
        OF_A_MEAN
    }

    fn apply(&self, update: Update, part: Part) {
        let (rate, decay, mu) = (update.rate(), self.weight_decay, self.momentum);
        // The share of the newest gradient that is added once more.
        let again = if self.nesterov { 1.0 } else { 0.0 };
        let kept = if self.nesterov { mu } else { 1.0 };
        let Part {
            weights,
            gradient,
            slots: [velocities, ..],
            mut ahead,
        } = part;
        let nesterov_ahead = ahead.take_if(|_| self.nesterov);
        let part = Part {
            weights: &mut *weights,
            gradient,
            slots: [&mut *velocities, &mut [], &mut []],
            ahead,
        };
        part.update(update.kernel, move |w, g, [velocity]| {
            let g = g + decay * w;
            let velocity = mu * velocity + g;
            (w - rate * (again * g + kept * velocity), [velocity])
        });
        let Some(LookAhead { made, steps }) = nesterov_ahead else {
            return;
        };
        // Nesterov's step has the newest gradient twice: directly, and in the velocity. Later steps have it in the velocity alone, so these
        // look-ahead weights follow the velocity, and do not repeat the step.
        let far = rate * mu * steps;
        update.kernel.run(|| {
            for (made, (w, velocity)) in made.iter_mut().zip(weights.iter().zip(velocities)) {
                *made = *w - far * *velocity;
            }
        });
    }

    fn steps_ahead(&self, _: Update, updates: f64) -> f32 {
        carry(self.momentum, updates, |_| 1.0)
    }
}
