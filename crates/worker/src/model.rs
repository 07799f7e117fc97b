//! The interface of models.
//!
//! A model of your own is a struct with candle layers and an implementation of [`Model`]: `new`
//! takes its variables from a [`VarBuilder`], `loss` computes the mean loss of a batch. Everything
//! else (initial values, gradients, pulling and pushing) is done around it.
//!
//! ```
//! use candle_core::{Device, Result, Tensor};
//! use candle_nn::{Linear, Module, VarBuilder};
//! use worker::model::{Batch, Metrics, Model, Setup, classification_metrics};
//! use worker::registry::Registry;
//! use worker::variables::Variables;
//!
//! struct Straight(Linear);
//!
//! impl Model for Straight {
//!     fn new(setup: &Setup, vars: VarBuilder) -> Result<Self> {
//!         let features = setup.sample_shape.iter().product();
//!         // Its variables: "line.weight" and "line.bias".
//!         Ok(Self(candle_nn::linear(features, setup.classes, vars.pp("line"))?))
//!     }
//!
//!     fn loss(&self, batch: &Batch) -> Result<Tensor> {
//!         let logits = self.0.forward(&batch.inputs.flatten_from(1)?)?;
//!         candle_nn::loss::cross_entropy(&logits, &batch.targets)
//!     }
//!
//!     // May be left out; the loss alone is measured then.
//!     fn metrics(&self, batch: &Batch) -> Result<Metrics> {
//!         let logits = self.0.forward(&batch.inputs.flatten_from(1)?)?;
//!         classification_metrics(&logits, &batch.targets)
//!     }
//! }
//!
//! # fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
//! let registry = Registry::builtin().model::<Straight>("straight");
//!
//! let settings = shared_proto::job::Model::default();
//! let setup = Setup { settings: &settings, sample_shape: &[2, 2], classes: 3 };
//! let (variables, model) = Variables::build(1, &Device::Cpu, |vars| {
//!     registry.build("straight", &setup, vars)
//! })?;
//! assert_eq!(variables.specs()[1].name, "line.weight");
//!
//! let batch = Batch {
//!     inputs: Tensor::new(&[[[0.1f32, 0.2], [0.3, 0.4]], [[1.0, 0.0], [0.0, 1.0]]], &Device::Cpu)?,
//!     targets: Tensor::new(&[0u32, 2], &Device::Cpu)?,
//! };
//! let loss = model.loss(&batch)?;
//! let gradients = variables.gradients(&loss.backward()?, None)?;
//! assert_eq!(gradients.values.len(), 2);
//! assert!(model.metrics(&batch)?["accuracy"] <= 1.0);
//! # Ok(())
//! # }
//! ```

use std::collections::BTreeMap;

use candle_core::{D, DType, Tensor};
use candle_nn::VarBuilder;

use crate::candle_error::plain;

/// Samples that are computed together.
#[derive(Clone, Debug)]
pub struct Batch {
    /// The inputs as `f32`, of shape `[samples, ...sample shape]`.
    pub inputs: Tensor,
    /// The classes as `u32`, of shape `[samples]`.
    pub targets: Tensor,
}

/// The settings from which a model is built.
#[derive(Clone, Copy, Debug)]
pub struct Setup<'a> {
    /// The job's `[model]`; settings of a model's own are in its `options`.
    pub settings: &'a shared_proto::job::Model,
    /// The shape of one sample, without the batch dimension.
    pub sample_shape: &'a [usize],
    /// The number of classes of the targets.
    pub classes: usize,
}

/// Means over a batch, by name; `loss` is always there.
pub type Metrics = BTreeMap<String, f64>;

/// A model that can be trained. The module's page shows how to write one.
pub trait Model: 'static {
    /// Builds the model on variables that it asks `vars` for. Their names and shapes must depend
    /// on `setup` alone, because all workers share them, and they are `f32`.
    ///
    /// # Errors
    /// If it cannot be built, for example for samples of a wrong shape.
    fn new(setup: &Setup, vars: VarBuilder) -> candle_core::Result<Self>
    where
        Self: Sized;

    /// Returns the loss, a scalar: the mean over the samples of the batch. Its gradient is pushed, so it must depend
    /// on each variable.
    ///
    /// # Errors
    /// candle's.
    fn loss(&self, batch: &Batch) -> candle_core::Result<Tensor>;

    /// Returns the metrics of an evaluation as means over the samples of the batch. `loss` must be among them. The
    /// default is the loss alone; [`classification_metrics`] adds the accuracy.
    ///
    /// # Errors
    /// candle's.
    fn metrics(&self, batch: &Batch) -> candle_core::Result<Metrics> {
        let loss = number(&self.loss(batch)?)?;
        Ok(Metrics::from([("loss".to_owned(), loss)]))
    }
}

/// Returns `loss` (mean cross entropy) and `accuracy` (the share of samples for which the logit of their class is
/// the largest) of logits of shape `[samples, classes]`.
///
/// # Errors
/// candle's.
pub fn classification_metrics(logits: &Tensor, targets: &Tensor) -> candle_core::Result<Metrics> {
    let loss = candle_nn::loss::cross_entropy(logits, targets)?;
    let right = logits.argmax(D::Minus1)?.eq(targets)?;
    let accuracy = right.to_dtype(DType::F64)?.mean_all()?;
    Ok(Metrics::from([
        ("loss".to_owned(), number(&loss)?),
        ("accuracy".to_owned(), number(&accuracy)?),
    ]))
}

fn number(scalar: &Tensor) -> candle_core::Result<f64> {
    scalar.to_dtype(DType::F64)?.to_scalar()
}

/// The error of a model that cannot be built.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// No model has this name.
    #[error(
        "there is no model {name:?}; `model.name` may be {known}, or a model of your own once it is in the registry"
    )]
    Unknown {
        /// The name.
        name: String,
        /// The names that exist.
        known: String,
    },
    /// The model could not be built.
    #[error("model {name:?} cannot be built: {}", plain(source))]
    Build {
        /// The model's name.
        name: String,
        /// candle's error.
        source: candle_core::Error,
    },
}
