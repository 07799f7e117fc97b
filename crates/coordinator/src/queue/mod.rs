//! The jobs of a long-lived cluster: submitted, one at work, ended.
//!
//! - `entry`: one job of the queue; `jobs`: the decisions about them, without files or clocks
//! - `store`: the jobs on disk
//! - `job_queue`: the jobs under their lock. A change is persisted before it is answered.

mod entry;
mod job_queue;
mod jobs;
mod store;

#[cfg(test)]
mod tests;

pub(crate) use entry::{Entry, Outcome};
pub(crate) use job_queue::{JobQueue, QueueError};
pub(crate) use jobs::{Cancelled, End, Submission};
