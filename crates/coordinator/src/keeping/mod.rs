//! The cluster under its lock, and all that it leaves on disks.
//!
//! - `shared`: the cluster under its lock; persists its changes before it publishes them
//! - `state`: the store of the state that outlives a process; `reserve`: disk space for it
//! - `keeper`: manifests, and the claim to the store of checkpoints
//! - `run_dir`: `metrics.jsonl` and `summary.json`; `tensorboard`: event files beside them
//! - `history`: the records as far as charts show them

pub(crate) mod history;
pub(crate) mod keeper;
mod reserve;
pub(crate) mod run_dir;
pub(crate) mod shared;
pub(crate) mod state;
mod tensorboard;
