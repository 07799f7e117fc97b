//! Adam (Kingma and Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015, algorithm 1) and
//! AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019, algorithm 2).

use shared_proto::job::{Adam, AdamW};

use crate::stale::{OF_MOMENTS, carry};
use crate::{Part, Rule, Slots, Update};

const SLOTS: Slots = Slots {
    count: 2,
    initial: 0.0,
};

impl Rule for Adam {
    fn slots(&self) -> Slots {
        SLOTS
    }

    fn stale_exponent(&self) -> f64 {
        OF_MOMENTS
    }

    fn apply(&self, update: Update, part: Part) {
        Moments::from(self).apply(update, 1.0, self.weight_decay, part);
    }

    fn steps_ahead(&self, update: Update, updates: f64) -> f32 {
        Moments::from(self).steps_ahead(update, updates)
    }
}

impl Rule for AdamW {
    fn slots(&self) -> Slots {
        SLOTS
    }

    fn stale_exponent(&self) -> f64 {
        OF_MOMENTS
    }

    fn apply(&self, update: Update, part: Part) {
        let keep = 1.0 - update.rate() * self.weight_decay;
        Moments::from(self).apply(update, keep, 0.0, part);
    }

    fn steps_ahead(&self, update: Update, updates: f64) -> f32 {
        Moments::from(self).steps_ahead(update, updates)
    }
}

/// Returns the bias correction of a moving average that begins at zero, after `updates` updates: the sum of the weights
/// of its terms. It is computed in f64, because the powers begin near one.
fn lack(beta: f32, updates: u64) -> f64 {
    1.0 - f64::from(beta).powi(updates.min(i32::MAX as u64) as i32)
}

/// The settings that Adam and AdamW have in common.
struct Moments {
    beta1: f32,
    beta2: f32,
    epsilon: f32,
}

impl From<&Adam> for Moments {
    fn from(settings: &Adam) -> Self {
        Self {
            beta1: settings.beta1,
            beta2: settings.beta2,
            epsilon: settings.epsilon,
        }
    }
}

impl From<&AdamW> for Moments {
    fn from(settings: &AdamW) -> Self {
        Self {
            beta1: settings.beta1,
            beta2: settings.beta2,
            epsilon: settings.epsilon,
        }
    }
}

impl Moments {
    /// Returns the result of [`Rule::steps_ahead`], as if the second moment stayed the same and weight decay continued.
    fn steps_ahead(&self, update: Update, updates: f64) -> f32 {
        let now = lack(self.beta1, update.number);
        let unbiased = |later| now / lack(self.beta1, update.number.saturating_add(later));
        carry(self.beta1, updates, unbiased)
    }

    /// Applies a gradient, to which `decay` times the weight is added. The weight itself is multiplied by `keep`.
    fn apply(&self, update: Update, keep: f32, decay: f32, part: Part) {
        let (beta1, beta2, epsilon) = (self.beta1, self.beta2, self.epsilon);
        let step = (f64::from(update.rate()) / lack(beta1, update.number)) as f32;
        let root = lack(beta2, update.number).sqrt() as f32;
        part.update(update.kernel, move |w, g, [mean, square]| {
            let g = g + decay * w;
            let mean = mean + (1.0 - beta1) * (g - mean);
            let square = beta2 * square + (1.0 - beta2) * g * g;
            let w = keep * w - step * mean / (square.sqrt() / root + epsilon);
            (w, [mean, square])
        });
    }
}
