use candle_core::{Result, Tensor};
use candle_nn::{Init, Module, VarBuilder};
use nn::Embedding;

use super::dense::Dense;
use super::inputs::Inputs;
use crate::model::{Batch, Model, Pass, Setup};

/// A multi-layer perceptron: hidden layers of the widths in `model.hidden`, each with ReLU
/// (`hidden.0.weight`, `hidden.0.bias`, ...), and `output.weight`, `output.bias`. Its input is the row of all numbers,
/// and beside it the vectors of ids: `embedding.INPUT.weight` of shape `[categories, model.embedding]`.
pub struct Mlp {
    inputs: Inputs,
    tables: Vec<Embedding>,
    dense: Dense,
}

impl Model for Mlp {
    fn new(setup: &Setup, vars: VarBuilder) -> Result<Self> {
        let inputs = Inputs::of(setup, &vars)?;
        let size = setup.settings.embedding;
        let init = Init::Randn {
            mean: 0.0,
            stdev: (size as f64).powf(-0.5),
        };
        let named = |name: &str| vars.pp("embedding").pp(name);
        let table = |name: &str, rows| Embedding::with_init(rows, size, init, named(name));
        let tables = inputs
            .ids
            .iter()
            .map(|ids| table(&ids.name, ids.categories));
        let tables = tables.collect::<Result<_>>()?;
        let vectors: usize = inputs.ids.iter().map(|ids| ids.count.unwrap_or(1)).sum();
        let features = inputs.width + vectors * size;
        let hidden = &setup.settings.hidden;
        Ok(Self {
            dense: Dense::new(features, hidden, setup.outputs(), &vars)?,
            inputs,
            tables,
        })
    }

    fn forward(&self, batch: &Batch, _: &Pass) -> Result<Tensor> {
        let mut parts = Vec::from_iter(self.inputs.numbers(batch)?);
        for (ids, table) in self.inputs.ids.iter().zip(&self.tables) {
            parts.push(ids.vectors(table, batch)?.joined()?);
        }
        match parts.as_slice() {
            [part] => self.dense.forward(part),
            parts => self.dense.forward(&Tensor::cat(parts, 1)?),
        }
    }
}
