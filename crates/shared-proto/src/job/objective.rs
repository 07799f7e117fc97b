//! The loss that a job minimises, and the metrics that it measures.

use serde::{Deserialize, Serialize};

use super::JobError;

/// The loss and the metrics of a job.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Objective {
    /// The loss function.
    pub loss: LossName,
    /// Cross entropy: the share of each target's probability that is spread over all classes, at least 0 and below 1.
    pub label_smoothing: f32,
    /// The metrics of evaluations, beside the loss: `accuracy`, `top_5`, `auc`, `log_loss`, `f1`, `calibration`, `rmse`,
    /// `mae`. Empty: the usual ones for the loss.
    pub metrics: Vec<String>,
}

/// The name of a loss function.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LossName {
    /// Cross entropy for classes, binary cross entropy for a target that is 0 or 1, the mean squared error for numbers.
    #[default]
    Auto,
    /// Cross entropy of classes.
    CrossEntropy,
    /// Cross entropy of a target that is 0 or 1.
    BinaryCrossEntropy,
    /// The mean squared error of numbers.
    MeanSquaredError,
    /// The mean absolute error of numbers.
    MeanAbsoluteError,
    /// The model's own.
    Model,
}

impl LossName {
    /// Returns the name as a job file has it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::CrossEntropy => "cross-entropy",
            Self::BinaryCrossEntropy => "binary-cross-entropy",
            Self::MeanSquaredError => "mean-squared-error",
            Self::MeanAbsoluteError => "mean-absolute-error",
            Self::Model => "model",
        }
    }
}

impl Objective {
    pub(super) fn validate(&self) -> Result<(), JobError> {
        match (0.0..1.0).contains(&self.label_smoothing) {
            true => Ok(()),
            false => Err(JobError::Setting {
                field: "objective.label_smoothing",
                value: self.label_smoothing.to_string(),
                expected: "must be at least 0 and less than 1",
            }),
        }
    }
}
