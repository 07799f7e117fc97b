//! The way of messages between workers and the shard.
//!
//! - `listener`: a port, or a socket file; `threads`: the threads that serve sessions
//! - `service`, `session`: a worker's stream; each message is read, handed to the shard, answered;
//!   `session/waiting`: the pulls that must wait
//! - `limits`: the memory of a session, and the number of sessions of a worker

pub(crate) mod limits;
mod listener;
mod service;
mod session;
mod threads;

pub(crate) use listener::Listener;
pub(crate) use service::Sessions;
pub(crate) use threads::{SessionThreads, serve_all};
