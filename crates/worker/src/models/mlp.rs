use candle_core::{Result, Tensor};
use candle_nn::{Init, Module, VarBuilder};

use super::dense::Dense;
use super::inputs::{Inputs, Vectors};
use super::options::Options;
use crate::model::{Batch, Model, Pass, Setup};

/// A multi-layer perceptron: hidden layers of the widths in `model.hidden`, each with ReLU
/// (`hidden.0.weight`, `hidden.0.bias`, ...), and `output.weight`, `output.bias`. Its input is the row of all numbers,
/// and beside it the vectors of ids: `embedding.INPUT.weight` of shape `[categories, model.embedding]`.
pub struct Mlp {
    inputs: Inputs,
    vectors: Vectors,
    dense: Dense,
}

impl Model for Mlp {
    fn new(setup: &Setup, vars: VarBuilder) -> Result<Self> {
        Options::of(setup, &[])?;
        let inputs = Inputs::of(setup, &vars)?;
        let size = setup.settings.embedding;
        let init = Init::Randn {
            mean: 0.0,
            stdev: (size as f64).powf(-0.5),
        };
        let vectors = inputs.vectors_of(setup, "embedding", size, init, &vars)?;
        let features = inputs.width + inputs.vector_count() * size;
        let hidden = &setup.settings.hidden;
        Ok(Self {
            dense: Dense::new(features, hidden, setup.outputs(), &vars)?,
            inputs,
            vectors,
        })
    }

    fn forward(&self, batch: &Batch, _: &Pass) -> Result<Tensor> {
        let mut parts = Vec::from_iter(self.inputs.numbers(batch)?);
        for vectors in self.inputs.vectors(&self.vectors, batch)? {
            parts.push(vectors.joined()?);
        }
        match parts.as_slice() {
            [part] => self.dense.forward(part),
            parts => self.dense.forward(&Tensor::cat(parts, 1)?),
        }
    }
}
