//! The settings of optimizers and schedules; the crate `optimizer` has their computations.

use serde::{Deserialize, Serialize};

use super::JobError;

macro_rules! settings {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty = $default:expr,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct $name { $($(#[$field_doc])* pub $field: $type,)* }

        impl Default for $name {
            fn default() -> Self {
                Self { $($field: $default,)* }
            }
        }
    };
}

settings! {
    /// Stochastic gradient descent.
    Sgd {
        /// Step size.
        learning_rate: f32 = 0.1,
        /// Added to the gradient, times the weight.
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
        /// Added to the gradient, times the weight.
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
        /// Added to the gradient, times the weight.
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
        /// Added to the gradient, times the weight.
        weight_decay: f32 = 0.0,
    }
}
settings! {
    /// Adam with weight decay of its own (AdamW).
    AdamW {
        /// Step size.
        learning_rate: f32 = 0.001,
        /// The share of the mean that remains after a step.
        beta1: f32 = 0.9,
        /// The share of the mean square that remains after a step.
        beta2: f32 = 0.999,
        /// Keeps the divisor from zero.
        epsilon: f32 = 1e-8,
        /// Taken off the weight itself, times the step size.
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
        /// Added to the gradient, times the weight.
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
        /// Added to the gradient, twice times the weight; not to the sum of squares.
        l2_shrinkage: f32 = 0.0,
        /// Added to the inverse step size.
        beta: f32 = 0.0,
    }
}

/// An optimizer and its settings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "name", rename_all = "lowercase")]
pub enum Optimizer {
    /// Stochastic gradient descent.
    Sgd(Sgd),
    /// Gradient descent with momentum.
    Momentum(Momentum),
    /// Adagrad.
    Adagrad(Adagrad),
    /// RMSProp.
    RmsProp(RmsProp),
    /// Adam.
    Adam(Adam),
    /// Adam with decoupled weight decay.
    AdamW(AdamW),
    /// FTRL-Proximal.
    Ftrl(Ftrl),
}

impl Default for Optimizer {
    fn default() -> Self {
        Self::Adam(Adam::default())
    }
}

impl Optimizer {
    /// The names by which optimizers are chosen.
    pub const NAMES: [&'static str; 7] = [
        "sgd", "momentum", "adagrad", "rmsprop", "adam", "adamw", "ftrl",
    ];

    /// Returns the optimizer of that name with its default settings.
    pub fn named(name: &str) -> Option<Self> {
        Some(match name {
            "sgd" => Self::Sgd(Sgd::default()),
            "momentum" => Self::Momentum(Momentum::default()),
            "adagrad" => Self::Adagrad(Adagrad::default()),
            "rmsprop" => Self::RmsProp(RmsProp::default()),
            "adam" => Self::Adam(Adam::default()),
            "adamw" => Self::AdamW(AdamW::default()),
            "ftrl" => Self::Ftrl(Ftrl::default()),
            _ => return None,
        })
    }

    /// Returns whether a step depends on the gradients of earlier ones in its direction.
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

    /// Returns the name by which it is chosen.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Sgd(_) => "sgd",
            Self::Momentum(_) => "momentum",
            Self::Adagrad(_) => "adagrad",
            Self::RmsProp(_) => "rmsprop",
            Self::Adam(_) => "adam",
            Self::AdamW(_) => "adamw",
            Self::Ftrl(_) => "ftrl",
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

    /// Returns the learning rate before any schedule.
    pub fn learning_rate(&self) -> f32 {
        match self {
            Self::Sgd(s) => s.learning_rate,
            Self::Momentum(s) => s.learning_rate,
            Self::Adagrad(s) => s.learning_rate,
            Self::RmsProp(s) => s.learning_rate,
            Self::Adam(s) => s.learning_rate,
            Self::AdamW(s) => s.learning_rate,
            Self::Ftrl(s) => s.learning_rate,
        }
    }

    /// Returns the learning rate before any schedule, to be set.
    pub fn learning_rate_mut(&mut self) -> &mut f32 {
        match self {
            Self::Sgd(s) => &mut s.learning_rate,
            Self::Momentum(s) => &mut s.learning_rate,
            Self::Adagrad(s) => &mut s.learning_rate,
            Self::RmsProp(s) => &mut s.learning_rate,
            Self::Adam(s) => &mut s.learning_rate,
            Self::AdamW(s) => &mut s.learning_rate,
            Self::Ftrl(s) => &mut s.learning_rate,
        }
    }

    /// Returns the weight decay, to be set; none for an optimizer without one.
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
        let positive: fn(f32) -> bool = |x| x.is_finite() && x > 0.0;
        let not_negative: fn(f32) -> bool = |x| x.is_finite() && x >= 0.0;
        let fraction: fn(f32) -> bool = |x| (0.0..1.0).contains(&x);
        const POSITIVE: &str = "must be positive";
        const NOT_NEGATIVE: &str = "must not be negative";
        const FRACTION: &str = "must be at least 0 and less than 1";
        type Check = (&'static str, f32, fn(f32) -> bool, &'static str);
        let rate = self.learning_rate();
        let mut checks: Vec<Check> = vec![("optimizer.learning_rate", rate, positive, POSITIVE)];
        let decay = |x| ("optimizer.weight_decay", x, not_negative, NOT_NEGATIVE);
        let epsilon = |x| ("optimizer.epsilon", x, positive, POSITIVE);
        let accumulator = |x| {
            (
                "optimizer.initial_accumulator",
                x,
                not_negative,
                NOT_NEGATIVE,
            )
        };
        match self {
            Self::Sgd(s) => checks.push(decay(s.weight_decay)),
            Self::Momentum(s) => checks.extend([
                decay(s.weight_decay),
                ("optimizer.momentum", s.momentum, fraction, FRACTION),
            ]),
            Self::Adagrad(s) => checks.extend([
                decay(s.weight_decay),
                epsilon(s.epsilon),
                accumulator(s.initial_accumulator),
            ]),
            Self::RmsProp(s) => checks.extend([
                decay(s.weight_decay),
                epsilon(s.epsilon),
                ("optimizer.alpha", s.alpha, fraction, FRACTION),
                ("optimizer.momentum", s.momentum, fraction, FRACTION),
            ]),
            Self::Adam(Adam {
                beta1,
                beta2,
                epsilon: e,
                weight_decay,
                ..
            })
            | Self::AdamW(AdamW {
                beta1,
                beta2,
                epsilon: e,
                weight_decay,
                ..
            }) => checks.extend([
                decay(*weight_decay),
                epsilon(*e),
                ("optimizer.beta1", *beta1, fraction, FRACTION),
                ("optimizer.beta2", *beta2, fraction, FRACTION),
            ]),
            Self::Ftrl(s) => checks.extend([
                // At zero, a weight with zero gradients would be divided by zero.
                (
                    "optimizer.initial_accumulator",
                    s.initial_accumulator,
                    positive,
                    POSITIVE,
                ),
                ("optimizer.l1", s.l1, not_negative, NOT_NEGATIVE),
                ("optimizer.l2", s.l2, not_negative, NOT_NEGATIVE),
                (
                    "optimizer.l2_shrinkage",
                    s.l2_shrinkage,
                    not_negative,
                    NOT_NEGATIVE,
                ),
                ("optimizer.beta", s.beta, not_negative, NOT_NEGATIVE),
                (
                    "optimizer.learning_rate_power",
                    -s.learning_rate_power,
                    not_negative,
                    "must not be positive (shown here negated)",
                ),
            ]),
        }
        for (field, value, ok, expected) in checks {
            if !ok(value) {
                return Err(JobError::Setting {
                    field,
                    value: value.to_string(),
                    expected,
                });
            }
        }
        Ok(())
    }
}

/// The learning-rate schedule. The rate is the optimizer's, times a factor that depends on the number of updates
/// that the block has taken.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Schedule {
    /// The factor's shape after warm-up.
    pub kind: ScheduleKind,
    /// Updates over which the factor first rises in a line to 1. 0: none.
    pub warmup_steps: u64,
    /// `step`: updates between two cuts.
    pub step_every: u64,
    /// `step`: the share of the factor that each cut leaves.
    pub step_factor: f32,
    /// `cosine`: updates at which the floor is reached, warm-up included. Absent: at the job's end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total_steps: Option<u64>,
    /// `cosine`: the factor at the end.
    pub floor: f32,
}

/// The shape of a learning-rate schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ScheduleKind {
    /// The factor stays 1.
    Constant,
    /// The factor is cut at a fixed number of updates.
    Step,
    /// The factor falls along half a cosine wave.
    Cosine,
}

impl Default for Schedule {
    fn default() -> Self {
        Self {
            kind: ScheduleKind::Constant,
            warmup_steps: 0,
            step_every: 1000,
            step_factor: 0.1,
            total_steps: None,
            floor: 0.0,
        }
    }
}

impl Schedule {
    pub(super) fn validate(&self) -> Result<(), JobError> {
        let wrong = |field, value: String, expected| {
            Err(JobError::Setting {
                field,
                value,
                expected,
            })
        };
        if self.step_every == 0 {
            return wrong("schedule.step_every", "0".to_owned(), "must be at least 1");
        }
        if !(self.step_factor > 0.0 && self.step_factor <= 1.0) {
            let value = self.step_factor.to_string();
            return wrong(
                "schedule.step_factor",
                value,
                "must be above 0 and at most 1",
            );
        }
        if !(0.0..=1.0).contains(&self.floor) {
            let value = self.floor.to_string();
            return wrong("schedule.floor", value, "must lie between 0 and 1");
        }
        match self.total_steps {
            Some(total) if total <= self.warmup_steps => wrong(
                "schedule.total_steps",
                total.to_string(),
                "must be more than schedule.warmup_steps",
            ),
            _ => Ok(()),
        }
    }
}
