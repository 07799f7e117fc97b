//! The worker: batch, pull, forward and backward in candle, push. The model computes in the crate `flambeau-replica`.
//!
//! The data path goes through these modules in this order:
//! - [`run`]: the process
//! - `member`: registers and joins by the job's strategy; `trainer`: asks for work
//! - `step`: one training step: input, pull, compute, push; `unfinished`: the step with an unacknowledged push
//! - [`strategy`]: where weights come from and gradients go to
//! - `error`: the errors of a worker; `trouble`: distinguishes this worker's own errors from those of the job
//! - `counters`: metrics
//! - `reporter`: reports finished steps to the coordinator
//! - [`embedded`]: a worker without a process and a model of its own, for simulations
//! - [`loops`]: training loops that a program writes itself
//! - [`tf_config`]: the cluster that `TF_CONFIG` describes, a variable that launchers for TensorFlow set
//! - `best`: the best evaluation of a run
//! - [`alone`]: jobs and models without a cluster

pub mod alone;
mod best;
mod counters;
pub mod embedded;
mod error;
pub mod loops;
mod member;
mod reporter;
mod run;
mod step;
mod step_report;
pub mod strategy;
pub mod tf_config;
mod trainer;
mod trouble;
mod unfinished;

pub use data::shuffle;
pub use error::WorkerError;
pub use run::{Settings, run};
pub use trouble::cannot_work;
