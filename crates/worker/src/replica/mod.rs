//! The worker's copy of the model, with its data.
//!
//! - `interface`: what the training step and strategies ask of a replica
//! - `thread`: a candle model on a thread of its own
//! - `error`: the errors of both

mod error;
mod interface;
mod thread;

pub use error::ReplicaError;
pub use interface::{Computed, Description, Positions, Prepared, Replica, Step};
pub(crate) use thread::{EVALUATION_BATCH, build};
pub use thread::{ModelReplica, evaluate};
