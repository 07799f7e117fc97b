//! A parameter server: holds a shard's blocks, applies gradients in place, gates pulls.
//!
//! The data's way goes through these modules in this order:
//! - [`run`]: the process
//! - `listener`: a port, or a socket file; `threads`: the threads that serve sessions
//! - `service`, `session`: a worker's stream; each message is read, handed to the shard, answered
//! - `limits`: the memory of a session, and the number of sessions of a worker
//! - `shard`: pushes and pulls, on one screen: check, apply, new version; `checks`: the checks of a push
//! - `gate`: admission of messages by clock: proceed, wait or reject
//! - `store`: the blocks of an epoch
//! - `block`: weights and slots under one lock, with version, dedup marks and staged gradients
//! - `follow`: views, and the work that they order; `save`, `load`: checkpoints, while training continues
//! - `reports`: calls to the coordinator about the shard; `counters`: its metrics
//! - [`embedded`]: a server without a process of its own, for simulations
//! - `fuzzing`: the driver of a fuzz target
//! - the crate `optimizer`: how a gradient changes weights, and how fast

mod block;
mod checks;
mod counters;
pub mod embedded;
mod follow;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod gate;
mod limits;
mod listener;
mod load;
mod reports;
mod run;
mod save;
mod service;
mod session;
mod shard;
mod store;
mod threads;

pub use run::{PsError, Settings, run};
