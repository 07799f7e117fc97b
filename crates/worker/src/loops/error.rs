//! The errors of training loops.

use collective::CollectiveError;
use shared_proto::job::JobError;

use crate::candle_error::plain;
use crate::device::DeviceError;
use crate::variables::VariablesError;

/// The error of a training loop that is distributed among replicas.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoopError {
    /// A device cannot be used.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Several devices where one is possible.
    #[error("one device is possible here, but {0} are named; use Strategy::mirrored for several")]
    Devices(usize),
    /// A setting makes no sense.
    #[error(transparent)]
    Setting(#[from] JobError),
    /// The replicas have different variables.
    #[error(
        "the replicas have different variables; the function that builds the model must create the same ones on each device"
    )]
    Different,
    /// A pattern matches no variable.
    #[error("no variable matches {pattern:?}; the model has {variables:?}")]
    NoVariable {
        /// The pattern.
        pattern: String,
        /// The names of the model's variables.
        variables: Vec<String>,
    },
    /// A variable has an optimizer already.
    #[error(
        "variable {0:?} has an optimizer already; let the patterns of optimizers match different variables"
    )]
    TwoOptimizers(String),
    /// The variables cannot be read or written.
    #[error(transparent)]
    Variables(#[from] VariablesError),
    /// The step has failed.
    #[error("the step failed: {}", plain(.0))]
    Step(#[from] candle_core::Error),
    /// A gradient is not finite.
    #[error(
        "the gradient of a replica is NaN or infinite; no variable of this optimizer was changed; lower the learning rate, or set clip_norm"
    )]
    NonFinite,
    /// A setting has no effect in a loop.
    #[error("job setting `{setting}` has no effect in a loop of your own; {advice}")]
    NoEffect {
        /// The setting.
        setting: &'static str,
        /// Advice to the user.
        advice: &'static str,
    },
    /// The replicas make different calls.
    #[error(
        "the replicas make different calls of minimize and sum; each must make the same ones in the same order, whatever its samples are"
    )]
    OutOfStep,
    /// Another replica has failed.
    #[error("another replica has failed: {0}")]
    Other(CollectiveError),
    /// A step has failed before.
    #[error(
        "a replica has failed in an earlier step, so the replicas may differ; build the model anew, and load its variables"
    )]
    Failed,
    /// A replica's step has panicked.
    #[error("the step of a replica has panicked: {0}")]
    Panicked(String),
}

impl LoopError {
    /// Returns how far the error is from the cause of a failed step: a panic may be about the failure of another replica, and others
    /// are consequences of one.
    pub(super) fn distance(&self) -> u8 {
        match self {
            Self::Other(_) | Self::OutOfStep => 2,
            Self::Panicked(_) => 1,
            _ => 0,
        }
    }
}

impl From<CollectiveError> for LoopError {
    fn from(error: CollectiveError) -> Self {
        match error {
            CollectiveError::Differs { .. } => Self::OutOfStep,
            error => Self::Other(error),
        }
    }
}
