use candle_core::{Result, Tensor};
use candle_nn::{Module, VarBuilder};

use super::{dense::Dense, layers::cross_entropy};
use crate::model::{Batch, Metrics, Model, Setup, classification_metrics};

/// Softmax regression, that is one linear layer: `output.weight`, `output.bias`.
pub struct Softmax(Dense);

impl Model for Softmax {
    fn new(setup: &Setup, vars: VarBuilder) -> Result<Self> {
        let features = setup.sample_shape.iter().product();
        Ok(Self(Dense::new(features, &[], setup.classes, &vars)?))
    }

    fn loss(&self, batch: &Batch) -> Result<Tensor> {
        cross_entropy(&self.0.forward(&batch.inputs)?, &batch.targets)
    }

    fn metrics(&self, batch: &Batch) -> Result<Metrics> {
        classification_metrics(&self.0.forward(&batch.inputs)?, &batch.targets)
    }
}
