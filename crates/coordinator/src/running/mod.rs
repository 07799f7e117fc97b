//! A coordinator from its beginning to its end.
//!
//! - `run`: the process; `settings`: its settings; `error`: the errors with which it ends
//! - `work`: the work on a job; `one_job`: the coordinator of one; `long_lived`: that of one after the other, `job`: one of its queue
//! - [`embedded`]: a coordinator without a process of its own, for simulations
//! - `begin`: begins with a fresh job, a checkpoint, or the state of an earlier process; `best`: takes the best weights along
//! - `wiring`: builds a running coordinator from its parts, for both; `gauges`: metrics, `rings`: those of rings,
//!   `total`: counters that go on from job to job

mod begin;
mod best;
pub mod embedded;
mod error;
mod gauges;
mod job;
mod long_lived;
mod one_job;
mod place;
mod rings;
mod run;
mod settings;
mod total;
mod wiring;
mod work;

pub use error::CoordinatorError;
pub use run::run;
pub use settings::{Settings, read_job};
