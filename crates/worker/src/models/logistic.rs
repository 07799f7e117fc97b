use candle_core::{Result, Tensor};
use candle_nn::VarBuilder;
use candle_nn::init::ZERO;
use nn::Embedding;

use super::inputs::Inputs;
use crate::model::{Batch, Model, Pass, Setup};

/// Logistic regression, and for other targets softmax or linear regression: `output.weight` of shape
/// `[outputs, numbers]`, `output.bias`, and for each input of ids, dense or sparse, `INPUT.weight` of shape
/// `[categories, outputs]`. All are zeros at first.
pub struct Logistic {
    inputs: Inputs,
    weight: Option<Tensor>,
    tables: Vec<Embedding>,
    bias: Tensor,
}

impl Model for Logistic {
    fn new(setup: &Setup, vars: VarBuilder) -> Result<Self> {
        let inputs = Inputs::of(setup, &vars)?;
        let outputs = setup.outputs();
        let table = |name: &str, rows| Embedding::with_init(rows, outputs, ZERO, vars.pp(name));
        let tables = inputs
            .ids
            .iter()
            .map(|ids| table(&ids.name, ids.categories));
        let tables = tables.collect::<Result<_>>()?;
        let vars = vars.pp("output");
        let weight = (inputs.width > 0)
            .then(|| vars.get_with_hints((outputs, inputs.width), "weight", ZERO));
        Ok(Self {
            inputs,
            weight: weight.transpose()?,
            tables,
            bias: vars.get_with_hints(outputs, "bias", ZERO)?,
        })
    }

    fn forward(&self, batch: &Batch, _: &Pass) -> Result<Tensor> {
        let shape = (batch.samples(), self.bias.elem_count());
        let mut sums = self.bias.broadcast_as(shape)?;
        if let (Some(numbers), Some(weight)) = (self.inputs.numbers(batch)?, &self.weight) {
            sums = (sums + numbers.matmul(&weight.t()?)?)?;
        }
        for (ids, table) in self.inputs.ids.iter().zip(&self.tables) {
            sums = (sums + ids.vectors(table, batch)?.sum()?)?;
        }
        Ok(sums)
    }
}
