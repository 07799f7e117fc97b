//! A coordinator from its beginning to its end.
//!
//! - `run`: the process; `settings`: its settings; `error`: the errors with which it ends
//! - `work`: the work on a job; `one_job`: the coordinator of one job; `long_lived`: the coordinator of one job after
//!   the other; `job`: a job of its queue
//! - [`embedded`]: a coordinator without a process of its own, for simulations
//! - `begin`: begins with a fresh job, a checkpoint, or the state of an earlier process; `best`: takes the best weights along
//! - `place`: where the coordinator listens, and how `flambeau status` finds it
//! - `wiring`: builds a running coordinator from its parts; `gauges`: metrics; `rings`: metrics of rings; `total`:
//!   counters that continue from job to job

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
