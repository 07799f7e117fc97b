//! The cluster under its lock, and all that it leaves on disks.
//!
//! - `shared`: the cluster under its lock; persists its changes before it publishes them
//! - `state`: the state that outlives a process; `log`: the files in which it is, and the queue of jobs too
//! - `keeper`: manifests, and the claim to the store of checkpoints
//! - `run_dir`: `metrics.jsonl` and `summary.json`; `tensorboard`: event files beside them
//! - `history`: the records as far as charts show them

pub(crate) mod history;
pub(crate) mod keeper;
pub(crate) mod log;

pub(crate) mod run_dir;
pub(crate) mod shared;
pub(crate) mod state;
mod tensorboard;
