//! The coordinator: one address that everybody is given. It alone decides who is live, where blocks
//! live, who works on which data, which step is committed, and when the job has ended; it says so
//! in numbered views, which shards follow.
//!
//! - [`run`]: the process
//! - `service`: the gRPC face; locks the cluster, asks it, publishes what has changed
//! - `limits`: how long the names in a call may be
//! - `begin`: a fresh job, one from a checkpoint, or the one that an earlier process was at
//! - `cluster`: what is decided, without sockets, clocks or threads
//! - [`embedded`]: a coordinator without a process of its own, for simulations
//! - `placement`: blocks to shards; `splits`: data to workers
//! - `state`: what a coordinator that starts again needs to know; `keeper`: checkpoints' manifests
//! - `record`: `metrics.jsonl` and `summary.json` in the run directory

mod begin;
mod callers;
mod cluster;
pub mod embedded;
mod gauges;
mod keeper;
mod limits;
mod placement;
mod record;
mod run;
mod service;
mod shared;
mod splits;
mod state;

pub use keeper::can_begin_with;
pub use record::Summary;
pub use run::{CoordinatorError, Settings, read_job, run};
pub use state::is_at_work;
