//! The errors of operations on variables.

use std::io;
use std::path::PathBuf;

use candle_core::Error;
use shared_proto::blocks::VariableSpec;

use model::candle_error::plain;

/// The error of an operation on variables.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VariablesError {
    /// A variable has no gradient.
    #[error(
        "{variable} has no gradient: either the loss does not use it, or it goes through an operation for which candle computes none (LayerNorm::forward with a bias, RmsNorm::forward, softmax_last_dim: use layer_norm_slow, RmsNorm::forward_diff, softmax), or through `detach`"
    )]
    NoGradient {
        /// The variable.
        variable: VariableSpec,
    },
    /// A variable has elements that are NaN or infinite.
    #[error(
        "{variable} has values that are NaN or infinite; lower the learning rate, or set clip_norm"
    )]
    NonFinite {
        /// The variable.
        variable: VariableSpec,
    },
    /// Variables, elements, slots or a prepared update do not exist, or a vector has the wrong length.
    #[error("{0}")]
    Range(String),
    /// A file cannot be read or written.
    #[error("{} cannot be {action}: {source}", path.display())]
    File {
        /// The attempted operation.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A file with initial values cannot be read.
    #[error("{} cannot be read: {reason}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What is wrong with the file.
        reason: String,
    },
    /// A file holds other variables than the model has.
    #[error(
        "{} holds the variables of another model, nothing was loaded: {differences}", path.display()
    )]
    Mismatch {
        /// The file.
        path: PathBuf,
        /// The differences.
        differences: String,
    },
    /// candle failed.
    #[error("candle: {}", plain(.0))]
    Candle(#[from] Error),
}
