use candle_core::{Result, Tensor};
use candle_nn::{Init, VarBuilder};

use super::dense::Dense;
use super::inputs::{Inputs, Vectors};
use super::options::Options;
use crate::{Batch, Model, Pass, Setup, forward_blocks};

/// A multi-layer perceptron: hidden layers of the widths in `model.hidden`, each with ReLU (`hidden.0.weight`,
/// `hidden.0.bias`, ...), and `output.weight`, `output.bias`. Its input is the row of all numbers, followed by the
/// vectors of ids: `embedding.INPUT.weight` of shape `[categories, model.embedding]`. Each layer is a block; the first
/// block also has the vectors.
pub struct Mlp {
    inputs: Inputs,
    vectors: Vectors,
    dense: Dense,
}

impl Model for Mlp {
    fn new(setup: &Setup, vars: VarBuilder) -> Result<Self> {
        Options::new(setup, &[])?;
        let hidden = &setup.settings.hidden;
        let block = |block| setup.block(block, hidden.len() + 1, &vars);
        let first = block(0)?;
        let inputs = Inputs::new(setup, &first)?;
        let size = setup.settings.embedding;
        let init = Init::Randn {
            mean: 0.0,
            stdev: (size as f64).powf(-0.5),
        };
        let vectors = inputs.vectors_of(setup, "embedding", size, init, &first)?;
        let features = inputs.width + inputs.vector_count() * size;
        Ok(Self {
            dense: Dense::in_blocks(features, hidden, setup.outputs(), block)?,
            inputs,
            vectors,
        })
    }

    fn forward(&self, batch: &Batch, pass: &Pass) -> Result<Tensor> {
        forward_blocks(self, batch, pass)
    }

    fn blocks(&self) -> usize {
        self.dense.layers()
    }

    fn forward_block(
        &self,
        block: usize,
        x: Option<&Tensor>,
        batch: &Batch,
        _: &Pass,
    ) -> Result<Tensor> {
        if let Some(x) = x {
            return self.dense.layer(block, x);
        }
        let mut parts = Vec::from_iter(self.inputs.numbers(batch)?);
        for vectors in self.inputs.vectors(&self.vectors, batch)? {
            parts.push(vectors.joined()?);
        }
        match parts.as_slice() {
            [part] => self.dense.layer(block, part),
            parts => self.dense.layer(block, &Tensor::cat(parts, 1)?),
        }
    }
}
