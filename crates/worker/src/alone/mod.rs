//! Jobs and models without a cluster, in one process.
//!
//! - [`local`]: a job, for comparison
//! - [`evaluator`]: a model that is evaluated with the weights of many checkpoints
//! - [`finder`]: the search for a learning rate
//! - [`predict`]: what a trained model says of samples

pub mod evaluator;
pub mod finder;
pub mod local;
pub mod predict;
