//! Jobs and models without a cluster, in one process.
//!
//! - [`local`]: a job in a single process, with which distributed runs are compared
//! - [`evaluator`]: a model that is evaluated with the weights of many checkpoints
//! - [`finder`]: the search for a learning rate
//! - [`predict`]: predictions of a trained model

pub mod evaluator;
pub mod finder;
pub mod local;
pub mod predict;
