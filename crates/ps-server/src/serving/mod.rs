//! The path of messages between workers and the shard.
//!
//! - `threads`: the threads that serve sessions
//! - `service`, `session`: a worker's stream; each message is read, handed to the shard, answered;
//!   `session/waiting`: the pulls that must wait
//! - `limits`: limits on the memory of a session, and on the number of sessions of a worker

pub(crate) mod limits;
mod service;
mod session;
mod threads;

pub(crate) use service::Sessions;
pub(crate) use threads::{SessionThreads, serve};
