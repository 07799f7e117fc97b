//! The worker: batch, pull, forward and backward in candle, push. candle lives here and only here.
//!
//! The data path goes through these modules in this order:
//! - [`run`]: the process
//! - `member`: registers and joins by the job's strategy; `trainer`: asks for work
//! - `step`: one training step: input, pull, compute, push; `unfinished`: the step with an unacknowledged push
//! - [`input`]: samples of the crate `data` become batches
//! - [`strategy`]: where weights come from and gradients go to; `strategy/parameter_server` is the one that ships
//! - [`replica`]: the model on its own thread
//! - [`model`], [`models`], [`registry`]: the interface of models, those that ship, and those that a job can name
//! - [`variables`]: the only place where bytes meet candle's memory; [`tables`]: embedding tables in a model
//! - `error`: the errors of a worker; `trouble`: distinguishes this worker's own errors from those of the job
//! - [`device`]: the device to compute on; `counters`: metrics
//! - `reporter`: reports finished steps to the coordinator
//! - [`embedded`]: a worker without a process and a model of its own, for simulations
//! - [`loops`]: training loops that a program writes itself
//! - [`tf_config`]: the cluster that a launcher made for TensorFlow describes
//! - `best`: the best evaluation of a run
//! - [`evaluator`]: a model that is evaluated with the weights of many checkpoints
//! - [`finder`]: the search for a learning rate
//! - [`local`]: the same job in one process, for comparison; [`predict`]: what a trained model says of samples

mod best;
mod candle_error;
mod counters;
pub mod device;
pub mod embedded;
mod error;
pub mod evaluator;
pub mod finder;
pub mod input;
pub mod local;
pub mod loops;
mod member;
pub mod model;
pub mod models;
pub mod predict;
pub mod registry;
pub mod replica;
mod reporter;
mod run;
mod step;
pub mod strategy;
pub mod tables;
pub mod tf_config;
pub mod threads;
mod trainer;
mod trouble;
mod unfinished;
pub mod variables;

pub use data::shuffle;
pub use error::WorkerError;
pub use run::{Settings, run};
pub use trouble::cannot_work;
