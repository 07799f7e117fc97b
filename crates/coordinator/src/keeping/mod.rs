//! The cluster under its lock, and everything that the coordinator keeps on disk.
//!
//! - `shared`: the cluster under its lock; persists its changes before it publishes them
//! - `state`: the state that outlives a process; `log`: the files with this state, and with the queue of jobs
//! - `keeper`: manifests, and the claim to the store of checkpoints
//! - `run_dir`: `metrics.jsonl` and `summary.json`; `tensorboard`: event files beside them
//! - `history`: the points and remarks that charts show

pub(crate) mod history;
pub(crate) mod keeper;
pub(crate) mod log;

pub(crate) mod run_dir;
pub(crate) mod shared;
pub(crate) mod state;
mod tensorboard;
