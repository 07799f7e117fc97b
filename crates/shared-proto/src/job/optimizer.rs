//! The settings of optimizers and schedules; the crate `optimizer` has their computations.

use serde::{Deserialize, Serialize};

use super::JobError;
use super::require::require;
use super::settings::settings;

settings! {
    /// Stochastic gradient descent.
    Sgd {
        /// Step size.
        learning_rate: f32 = 0.1,
        /// The weight times this factor is added to the gradient.
        weight_decay: f32 = 0.0,
    }
}
settings! {
    /// Gradient descent with momentum.
    Momentum {
        /// Step size.
        learning_rate: f32 = 0.05,
        /// The share of the velocity that remains after a step.
        momentum: f32 = 0.9,
        /// Look ahead along the velocity.
        nesterov: bool = false,
        /// The weight times this factor is added to the gradient.
        weight_decay: f32 = 0.0,
    }
}
settings! {
    /// Adagrad.
    Adagrad {
        /// Step size.
        learning_rate: f32 = 0.05,
        /// The initial value of the sum of squares.
        initial_accumulator: f32 = 0.0,
        /// Keeps the divisor from zero.
        epsilon: f32 = 1e-10,
        /// The weight times this factor is added to the gradient.
        weight_decay: f32 = 0.0,
    }
}
settings! {
    /// RMSProp.
    RmsProp {
        /// Step size.
        learning_rate: f32 = 0.002,
        /// The share of the mean square that remains after a step.
        alpha: f32 = 0.99,
        /// Keeps the divisor from zero.
        epsilon: f32 = 1e-8,
        /// The share of the velocity that remains after a step.
        momentum: f32 = 0.0,
        /// The weight times this factor is added to the gradient.
        weight_decay: f32 = 0.0,
    }
}
settings! {
    /// Adam with decoupled weight decay (AdamW).
    AdamW {
        /// Step size.
        learning_rate: f32 = 0.001,
        /// The share of the mean that remains after a step.
        beta1: f32 = 0.9,
        /// The share of the mean square that remains after a step.
        beta2: f32 = 0.999,
        /// Keeps the divisor from zero.
        epsilon: f32 = 1e-8,
        /// The weight times this factor and the step size is subtracted from the weight itself.
        weight_decay: f32 = 0.01,
    }
}
settings! {
    /// Adam.
    Adam {
        /// Step size.
        learning_rate: f32 = 0.001,
        /// The share of the mean that remains after a step.
        beta1: f32 = 0.9,
        /// The share of the mean square that remains after a step.
        beta2: f32 = 0.999,
        /// Keeps the divisor from zero.
        epsilon: f32 = 1e-8,
        /// The weight times this factor is added to the gradient.
        weight_decay: f32 = 0.0,
    }
}
settings! {
    /// Follow the regularised leader, proximal.
    Ftrl {
        /// Step size.
        learning_rate: f32 = 0.1,
        /// The power of the sum of squares in the step size; not positive.
        learning_rate_power: f32 = -0.5,
        /// The initial value of the sum of squares.
        initial_accumulator: f32 = 0.1,
        /// Draws small weights to zero.
        l1: f32 = 0.0,
        /// Shrinks weights.
        l2: f32 = 0.0,
        /// The weight times twice this factor is added to the gradient, but not to the sum of squares.
        l2_shrinkage: f32 = 0.0,
        /// Added to the inverse step size.
        beta: f32 = 0.0,
    }
}

macro_rules! optimizers {
    ($($(#[$doc:meta])* $kind:ident = $name:literal,)*) => {
        /// An optimizer and its settings.
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(tag = "name")]
        pub enum Optimizer {
            $($(#[$doc])* #[serde(rename = $name)] $kind($kind),)*
        }

        impl Optimizer {
            /// The names by which optimizers are chosen.
            pub const NAMES: [&'static str; [$($name),*].len()] = [$($name),*];

            /// Returns the optimizer of that name with its default settings.
            pub fn named(name: &str) -> Option<Self> {
                match name {
                    $($name => Some(Self::$kind($kind::default())),)*
                    _ => None,
                }
            }

            /// Returns the name by which the optimizer is chosen.
            pub fn name(&self) -> &'static str {
                match self {
                    $(Self::$kind(_) => $name,)*
                }
            }

            /// Returns the learning rate before any schedule.
            pub fn learning_rate(&self) -> f32 {
                match self {
                    $(Self::$kind(settings) => settings.learning_rate,)*
                }
            }

            /// Returns a mutable reference to the learning rate before any schedule.
            pub fn learning_rate_mut(&mut self) -> &mut f32 {
                match self {
                    $(Self::$kind(settings) => &mut settings.learning_rate,)*
                }
            }
        }
    };
}

optimizers! {
    /// Stochastic gradient descent.
    Sgd = "sgd",
    /// Gradient descent with momentum.
    Momentum = "momentum",
    /// Adagrad.
    Adagrad = "adagrad",
    /// RMSProp.
    RmsProp = "rmsprop",
    /// Adam.
    Adam = "adam",
    /// Adam with decoupled weight decay.
    AdamW = "adamw",
    /// FTRL-Proximal.
    Ftrl = "ftrl",
}

impl Default for Optimizer {
    fn default() -> Self {
        Self::Adam(Adam::default())
    }
}

impl Optimizer {
    /// Returns whether the direction of a step depends on the gradients of earlier steps.
    pub fn has_momentum(&self) -> bool {
        self.momentum() > 0.0
    }

    /// Returns the part of a step's direction that the next step keeps.
    pub fn momentum(&self) -> f32 {
        match self {
            Self::Momentum(Momentum { momentum, .. }) | Self::RmsProp(RmsProp { momentum, .. }) => {
                *momentum
            }
            Self::Adam(Adam { beta1, .. }) | Self::AdamW(AdamW { beta1, .. }) => *beta1,
            Self::Sgd(_) | Self::Adagrad(_) | Self::Ftrl(_) => 0.0,
        }
    }

    /// Returns the number of values that a server keeps beside each weight.
    pub fn slots(&self) -> usize {
        match self {
            Self::Sgd(_) => 0,
            Self::Momentum(_) | Self::Adagrad(_) => 1,
            Self::RmsProp(settings) => match settings.momentum > 0.0 {
                true => 2,
                false => 1,
            },
            Self::Adam(_) | Self::AdamW(_) | Self::Ftrl(_) => 2,
        }
    }

    /// Returns a mutable reference to the weight decay; `None` for an optimizer without one.
    pub fn weight_decay_mut(&mut self) -> Option<&mut f32> {
        match self {
            Self::Sgd(s) => Some(&mut s.weight_decay),
            Self::Momentum(s) => Some(&mut s.weight_decay),
            Self::Adagrad(s) => Some(&mut s.weight_decay),
            Self::RmsProp(s) => Some(&mut s.weight_decay),
            Self::Adam(s) => Some(&mut s.weight_decay),
            Self::AdamW(s) => Some(&mut s.weight_decay),
            Self::Ftrl(_) => None,
        }
    }

    pub(crate) fn validate(&self) -> Result<(), JobError> {
        let positive = |x: f32| x.is_finite() && x > 0.0;
        let not_negative = |x: f32| x.is_finite() && x >= 0.0;
        let is_fraction = |x: f32| (0.0..1.0).contains(&x);
        let rate = self.learning_rate();
        require!(positive(rate), "optimizer.learning_rate" => rate, "must be positive");
        if let Some(decay) = self.clone().weight_decay_mut() {
            require!(not_negative(*decay), "optimizer.weight_decay" => *decay, "must not be negative");
        }
        let epsilon = |x: f32| {
            require!(positive(x), "optimizer.epsilon" => x, "must be positive");
            Ok(())
        };
        let momentum = |x: f32| {
            require!(is_fraction(x), "optimizer.momentum" => x, "must be at least 0 and less than 1");
            Ok(())
        };
        match self {
            Self::Sgd(_) => {}
            Self::Momentum(s) => momentum(s.momentum)?,
            Self::Adagrad(s) => {
                epsilon(s.epsilon)?;
                let first = s.initial_accumulator;
                require!(not_negative(first), "optimizer.initial_accumulator" => first, "must not be negative");
            }
            Self::RmsProp(s) => {
                epsilon(s.epsilon)?;
                require!(is_fraction(s.alpha), "optimizer.alpha" => s.alpha, "must be at least 0 and less than 1");
                momentum(s.momentum)?;
            }
            Self::Adam(Adam {
                beta1,
                beta2,
                epsilon: e,
                ..
            })
            | Self::AdamW(AdamW {
                beta1,
                beta2,
                epsilon: e,
                ..
            }) => {
                epsilon(*e)?;
                require!(is_fraction(*beta1), "optimizer.beta1" => *beta1, "must be at least 0 and less than 1");
                require!(is_fraction(*beta2), "optimizer.beta2" => *beta2, "must be at least 0 and less than 1");
            }
            Self::Ftrl(s) => {
                // At zero, a weight with zero gradients would be divided by zero.
                let first = s.initial_accumulator;
                require!(positive(first), "optimizer.initial_accumulator" => first, "must be positive");
                require!(not_negative(s.l1), "optimizer.l1" => s.l1, "must not be negative");
                require!(not_negative(s.l2), "optimizer.l2" => s.l2, "must not be negative");
                require!(not_negative(s.l2_shrinkage), "optimizer.l2_shrinkage" => s.l2_shrinkage, "must not be negative");
                require!(not_negative(s.beta), "optimizer.beta" => s.beta, "must not be negative");
                let power = s.learning_rate_power;
                require!(not_negative(-power), "optimizer.learning_rate_power" => power, "must not be positive");
            }
        }
        Ok(())
    }
}

settings! {
    /// The learning-rate schedule. The rate is the optimizer's, times a factor that depends on the number of updates
    /// that the block has taken.
    Schedule {
        /// The factor's shape after warm-up.
        kind: ScheduleKind = ScheduleKind::Constant,
        /// The number of updates over which the factor first rises linearly to 1. 0: no warm-up.
        warmup_steps: u64 = 0,
        /// `step`: the number of updates between two cuts.
        step_every: u64 = 1000,
        /// `step`: the share of the factor that each cut leaves.
        step_factor: f32 = 0.1,
        /// `cosine`: the number of updates, warm-up included, after which the factor reaches the floor. Absent: at the
        /// job's end.
        #[serde(skip_serializing_if = "Option::is_none")]
        total_steps: Option<u64> = None,
        /// `cosine`: the factor at the end.
        floor: f32 = 0.0,
    }
}

/// The shape of a learning-rate schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ScheduleKind {
    /// The factor stays 1.
    Constant,
    /// The factor is cut each time a fixed number of updates is done.
    Step,
    /// The factor falls along half a cosine wave.
    Cosine,
}

impl Schedule {
    pub(super) fn validate(&self) -> Result<(), JobError> {
        require!(self.step_every > 0, "schedule.step_every" => self.step_every, "must be at least 1");
        let factor = self.step_factor;
        require!(factor > 0.0 && factor <= 1.0, "schedule.step_factor" => factor, "must be above 0 and at most 1");
        require!((0.0..=1.0).contains(&self.floor), "schedule.floor" => self.floor, "must lie between 0 and 1");
        if let Some(total) = self.total_steps {
            let warmup = self.warmup_steps;
            require!(total > warmup, "schedule.total_steps" => total, "must be more than schedule.warmup_steps");
        }
        Ok(())
    }
}
