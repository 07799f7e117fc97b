use candle_core::{Result, Tensor};
use candle_nn::VarBuilder;
use candle_nn::init::ZERO;

use super::inputs::{Inputs, Vectors};
use super::options::Options;
use crate::{Batch, Model, Pass, Setup};

/// Logistic regression, and for other targets softmax or linear regression: `output.weight` of shape
/// `[outputs, numbers]`, `output.bias`, and for each input of ids, dense or sparse, `embedding.INPUT.weight` of shape
/// `[categories, outputs]`. All are zeros at first.
pub struct Logistic {
    inputs: Inputs,
    weight: Option<Tensor>,
    vectors: Vectors,
    bias: Tensor,
}

impl Model for Logistic {
    fn new(setup: &Setup, vars: VarBuilder) -> Result<Self> {
        Options::new(setup, &[])?;
        let inputs = Inputs::new(setup, &vars)?;
        let outputs = setup.outputs();
        let vectors = inputs.vectors_of(setup, "embedding", outputs, ZERO, &vars)?;
        let vars = vars.pp("output");
        let weight = (inputs.width > 0)
            .then(|| vars.get_with_hints((outputs, inputs.width), "weight", ZERO));
        Ok(Self {
            inputs,
            weight: weight.transpose()?,
            vectors,
            bias: vars.get_with_hints(outputs, "bias", ZERO)?,
        })
    }

    fn forward(&self, batch: &Batch, _: &Pass) -> Result<Tensor> {
        let shape = (batch.samples(), self.bias.elem_count());
        let mut sums = self.bias.broadcast_as(shape)?;
        if let (Some(numbers), Some(weight)) = (self.inputs.numbers(batch)?, &self.weight) {
            sums = (sums + numbers.matmul(&weight.t()?)?)?;
        }
        for vectors in self.inputs.vectors(&self.vectors, batch)? {
            sums = (sums + vectors.sum()?)?;
        }
        Ok(sums)
    }
}
