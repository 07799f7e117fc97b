//! The interface of metrics.

use candle_core::{Result, Tensor};

use crate::input::Batch;

/// A measurement over all samples of an evaluation.
pub trait Metric {
    /// Takes the outputs of the model for a batch.
    ///
    /// # Errors
    /// If they do not fit, or candle's.
    fn add(&mut self, outputs: &Tensor, batch: &Batch) -> Result<()>;

    /// Returns the value over all batches; NaN if it is not defined for them.
    fn value(&mut self) -> f64;
}
