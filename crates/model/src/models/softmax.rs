use candle_core::{Result, Tensor};
use candle_nn::{Module, VarBuilder};

use super::dense::Dense;
use super::options::Options;
use crate::{Batch, Model, Pass, Setup};

/// Softmax regression, that is one linear layer: `output.weight`, `output.bias`.
pub struct Softmax(Dense);

impl Model for Softmax {
    fn new(setup: &Setup, vars: VarBuilder) -> Result<Self> {
        Options::new(setup, &[])?;
        let features = setup.features()?;
        Ok(Self(Dense::new(features, &[], setup.outputs(), &vars)?))
    }

    fn forward(&self, batch: &Batch, _: &Pass) -> Result<Tensor> {
        self.0.forward(batch.input()?)
    }
}
