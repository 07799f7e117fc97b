//! The worker's copy of the model, with its data.
//!
//! - `interface`: what the training step and strategies ask of a replica
//! - `thread`: a candle model on a thread of its own
//! - `reader`: the thread that reads its batches
//! - `error`: the errors of all of these

mod error;
mod interface;
mod reader;
mod thread;

pub use error::ReplicaError;
pub use interface::{Computed, Description, Positions, Prepared, Replica, Step};
pub(crate) use thread::{EVALUATION_BATCH, build, precision};
pub use thread::{ModelReplica, evaluate};
