use candle_core::{Result, Tensor};
use candle_nn::{Module, VarBuilder};

use super::{dense::Dense, layers::cross_entropy};
use crate::model::{Batch, Metrics, Model, Setup, classification_metrics};

/// A multi-layer perceptron: hidden layers of the widths in `model.hidden`, each with ReLU
/// (`hidden.0.weight`, `hidden.0.bias`, ...), and `output.weight`, `output.bias`.
pub struct Mlp(Dense);

impl Model for Mlp {
    fn new(setup: &Setup, vars: VarBuilder) -> Result<Self> {
        let features = setup.sample_shape.iter().product();
        let hidden = &setup.settings.hidden;
        Ok(Self(Dense::new(features, hidden, setup.classes, &vars)?))
    }

    fn loss(&self, batch: &Batch) -> Result<Tensor> {
        cross_entropy(&self.0.forward(&batch.inputs)?, &batch.targets)
    }

    fn metrics(&self, batch: &Batch) -> Result<Metrics> {
        classification_metrics(&self.0.forward(&batch.inputs)?, &batch.targets)
    }
}
