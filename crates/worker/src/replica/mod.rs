//! The worker's copy of the model, with its data.
//!
//! - `interface`: what the training step and strategies ask of a replica
//! - `thread`: a candle model on a thread of its own
//! - `reader`: the thread that reads its batches; `evaluating`: an evaluation, part by part
//! - `error`: the errors of all of these

mod error;
mod evaluating;
mod interface;
mod reader;
mod thread;

pub use error::ReplicaError;
pub(crate) use evaluating::{EVALUATION_BATCH, Evaluating};
pub use interface::{
    Computed, Description, Evaluation, EvaluationPart, Positions, Prepared, Replica, Step,
};
pub use thread::ModelReplica;
pub(crate) use thread::{Built, build, precision};
