//! The errors of replicas.

use std::any::Any;

use model::ModelError;
use model::candle_error::plain;
use model::input::{BatchError, InputError};
use variables::VariablesError;

/// The error of a replica. No variant is transient.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReplicaError {
    /// The data cannot be read.
    #[error(transparent)]
    Input(#[from] InputError),
    /// The model cannot be built.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A pattern of a group or of `model.init_except` matches no variable.
    #[error(
        "the pattern {pattern:?} of `groups` or `model.init_except` matches no variable of the model; its variables are {variables:?}"
    )]
    Pattern {
        /// The pattern.
        pattern: String,
        /// The names of the model's variables.
        variables: Vec<String>,
    },
    /// A pattern of the job's `tables` matches no table.
    #[error(
        "the pattern {pattern:?} of `tables` matches no table of the model; its tables are {tables:?}"
    )]
    TablePattern {
        /// The pattern.
        pattern: String,
        /// The names of the model's tables.
        tables: Vec<String>,
    },
    /// The devices do not fit the job, or an operation of several devices has failed.
    #[error("{0}")]
    Devices(String),
    /// A model cannot be cut into the stages that the job wants.
    #[error("{0}")]
    Chain(String),
    /// A stage of a model has failed while it computed.
    #[error("{stage} failed: {}", plain(source))]
    Stage {
        /// The stage, with its blocks and its device.
        stage: String,
        /// candle's error.
        source: Box<candle_core::Error>,
    },
    /// Values do not fit the variables.
    #[error(transparent)]
    Variables(#[from] VariablesError),
    /// The job wants synchronised batch normalisation, but no layer of the model with this name takes part in it.
    #[error(
        "`strategy.batch_norm = \"synchronised\"` has no effect on the model {0:?}: no layer in it is an `nn::BatchNorm` that trains; leave the setting out, or use that layer in place of another batch normalisation"
    )]
    Unsynchronised(String),
    /// candle failed while computing.
    #[error("the model failed: {}", plain(.0))]
    Compute(#[from] candle_core::Error),
    /// The model has panicked, or the thread that reads its data.
    #[error("the model panicked: {0}")]
    Panicked(String),
    /// The thread could not be started.
    #[error("cannot start the model's thread: {0}")]
    Thread(std::io::Error),
}

impl ReplicaError {
    /// Returns whether a device ran out of memory, judged by the driver's text, which candle's error contains.
    pub fn is_out_of_memory(&self) -> bool {
        let text = self.to_string().to_ascii_lowercase();
        ["out of memory", "out_of_memory"]
            .iter()
            .any(|words| text.contains(words))
    }

    /// Returns the error of a job that wants NCCL where it is not possible.
    pub fn no_nccl(problem: &str) -> Self {
        Self::Devices(format!(
            "`strategy.cross_device = \"nccl\"` is not possible: {problem}; leave it out, or use \"host\""
        ))
    }
}

impl From<BatchError> for ReplicaError {
    fn from(error: BatchError) -> Self {
        match error {
            BatchError::Data(error) => Self::Input(error),
            BatchError::Candle(error) => Self::Compute(error),
        }
    }
}

/// Returns the text of a panic.
pub fn panic_message(panic: &(dyn Any + Send)) -> String {
    match (panic.downcast_ref::<&str>(), panic.downcast_ref::<String>()) {
        (Some(text), _) => (*text).to_owned(),
        (_, Some(text)) => text.clone(),
        _ => "without a message".to_owned(),
    }
}
