//! The interface of metrics.

use candle_core::{Result, Tensor};

use crate::input::Batch;

/// A metric over all samples of an evaluation. `Model::metrics` returns the metrics of a model's own.
///
/// ```
/// # mod flambeau { pub use {candle_core, flambeau_model::*}; }
/// use flambeau::candle_core::{Result, Tensor};
/// use flambeau::{Batch, Metric};
///
/// /// The largest absolute value of the outputs.
/// #[derive(Default)]
/// struct Largest(f64);
///
/// impl Metric for Largest {
///     fn add(&mut self, outputs: &Tensor, _: &Batch) -> Result<()> {
///         let largest = outputs.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>()?;
///         self.0 = self.0.max(f64::from(largest));
///         Ok(())
///     }
///
///     fn value(&mut self) -> f64 {
///         self.0
///     }
/// }
/// # fn main() {}
/// ```
pub trait Metric {
    /// Adds the outputs of the model for a batch.
    ///
    /// # Errors
    /// If the outputs do not fit the batch, or candle's.
    fn add(&mut self, outputs: &Tensor, batch: &Batch) -> Result<()>;

    /// Returns the value over all batches that were added; NaN if it is undefined for them.
    fn value(&mut self) -> f64;
}
