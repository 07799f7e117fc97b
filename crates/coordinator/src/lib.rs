//! The coordinator. All other processes are given its address. It alone decides which members are live, where
//! blocks live, which worker has which data, which step is committed, and when the job has ended. It publishes
//! these decisions in numbered views, which shards follow.
//!
//! `calls` receives a call, the crate `flambeau-cluster` decides what changes, and `keeping` persists and publishes the
//! changes. `running` starts and stops a coordinator.
//!
//! - `keeping`: the cluster under its lock, its state on disk, checkpoints, the run directory
//! - `queue`: the jobs of a long-lived cluster
//! - `calls`: the gRPC service
//! - `page`: the live page for browsers, and reports
//! - `running`: the process, and [`embedded`] coordinators

mod calls;
mod keeping;
mod page;
mod queue;
mod running;

pub use cluster::Summary;
pub use keeping::history::History;
pub use keeping::keeper::can_begin_with;
pub use keeping::log::StateError;
pub use keeping::state::{is_at_work, state_files};
pub use page::report;
pub use running::{CoordinatorError, Settings, embedded, read_job, run};
