//! The coordinator. All other processes are given its address. It alone decides which members are live, where
//! blocks live, which worker has which data, which step is committed, and when the job has ended. It publishes
//! these decisions in numbered views, which shards follow.
//!
//! - [`run`]: the process
//! - `service`: the gRPC service; locks the cluster, asks it, publishes changes
//! - `messages`: messages of the service, read and written
//! - `callers`: the connections of members; `limits`: limits of names in calls
//! - `begin`: begins with a fresh job, a checkpoint, or the state of an earlier process
//! - `cluster`: the decisions, without sockets, clocks or threads; `shared`: the cluster under its lock
//! - `fuzzing`: the drivers of fuzz targets
//! - [`embedded`]: a coordinator without a process of its own, for simulations
//! - `placement`: blocks to shards; `splits`: data to workers
//! - `state`: the state that outlives a process; `keeper`: manifests, and the claim to the store
//! - `record`: `metrics.jsonl` and `summary.json` in the run directory; `gauges`: metrics

mod begin;
mod callers;
mod cluster;
pub mod embedded;
mod gauges;
mod keeper;
mod limits;
mod messages;
mod placement;
mod record;
mod run;
mod service;
mod shared;
mod splits;
mod state;

#[cfg(any(test, feature = "fuzzing"))]
pub use cluster::fuzzing;
pub use keeper::can_begin_with;
pub use record::Summary;
pub use run::{CoordinatorError, Settings, read_job, run};
pub use state::is_at_work;
