use candle_core::{Result, Tensor};
use candle_nn::{Module, VarBuilder};

use super::dense::Dense;
use crate::model::{Batch, Model, Pass, Setup};

/// A multi-layer perceptron: hidden layers of the widths in `model.hidden`, each with ReLU
/// (`hidden.0.weight`, `hidden.0.bias`, ...), and `output.weight`, `output.bias`.
pub struct Mlp(Dense);

impl Model for Mlp {
    fn new(setup: &Setup, vars: VarBuilder) -> Result<Self> {
        let features = setup.features()?;
        let hidden = &setup.settings.hidden;
        Ok(Self(Dense::new(features, hidden, setup.outputs(), &vars)?))
    }

    fn forward(&self, batch: &Batch, _: &Pass) -> Result<Tensor> {
        self.0.forward(batch.input()?)
    }
}
