use candle_core::{Result, Tensor, bail};
use candle_nn::init::ZERO;
use candle_nn::{Init, Module, VarBuilder};
use nn::Linear;

use super::dense::Dense;
use super::inputs::{Inputs, Looked, Vectors};
use super::options::Options;
use crate::{Batch, Model, Pass, Setup};

/// The distribution of the vectors' initial values.
const SPREAD: Init = Init::Randn {
    mean: 0.0,
    stdev: 0.01,
};

/// A weight for each feature, and a multi-layer perceptron over vectors of ids (Cheng et al., "Wide & Deep Learning for
/// Recommender Systems", DLRS 2016), without crossed features. Numbers are inputs of the perceptron too. The model
/// predicts a number or a binary target.
///
/// Tables: `embedding` of dimension `model.embedding`; `linear` of dimension 1, whose rows are initially zeros.
/// Variables: `numbers.weight` and `numbers.bias` if the data has numbers, and those of the perceptron, with the widths
/// in `model.hidden`: `hidden.0.weight`, `hidden.0.bias`, ..., `output.weight`, `output.bias`.
pub struct WideDeep {
    wide: Wide,
    vectors: Vectors,
    deep: Dense,
}

impl WideDeep {
    /// Returns the vectors of a batch's ids, and the sum of the outputs of both parts, of shape `[samples, 1]`.
    pub(super) fn with_vectors(&self, batch: &Batch) -> Result<(Vec<Looked>, Tensor)> {
        let (numbers, outputs) = self.wide.forward(batch)?;
        let vectors = self.wide.inputs.vectors(&self.vectors, batch)?;
        let outputs = (outputs + self.deep.forward(&joined(&vectors, numbers)?)?)?;
        Ok((vectors, outputs))
    }
}

impl Model for WideDeep {
    fn new(setup: &Setup, vars: VarBuilder) -> Result<Self> {
        Options::new(setup, &[])?;
        let wide = Wide::new(setup, &vars)?;
        let size = setup.settings.embedding;
        let features = wide.inputs.width + wide.inputs.vector_count() * size;
        Ok(Self {
            vectors: wide.inputs.table(setup, "embedding", size, SPREAD)?,
            deep: Dense::new(features, &setup.settings.hidden, 1, &vars)?,
            wide,
        })
    }

    fn forward(&self, batch: &Batch, _: &Pass) -> Result<Tensor> {
        Ok(self.with_vectors(batch)?.1)
    }
}

/// The inputs, and a weight for each number and each id.
struct Wide {
    inputs: Inputs,
    numbers: Option<Linear>,
    ids: Vectors,
}

impl Wide {
    fn new(setup: &Setup, vars: &VarBuilder) -> Result<Self> {
        if setup.outputs() != 1 {
            bail!(
                "it predicts a number or a binary target, but the target has {} outputs",
                setup.outputs()
            );
        }
        let inputs = Inputs::new(setup, vars)?;
        let width = inputs.width;
        let line = || Linear::new(width, 1, vars.pp("numbers"));
        Ok(Self {
            numbers: (width > 0).then(line).transpose()?,
            ids: inputs.table(setup, "linear", 1, ZERO)?,
            inputs,
        })
    }

    /// Returns the numbers of a batch, if there are any, and the weighted sum of each sample's features, of shape
    /// `[samples, 1]`.
    fn forward(&self, batch: &Batch) -> Result<(Option<Tensor>, Tensor)> {
        let numbers = self.inputs.numbers(batch)?;
        let mut sum: Option<Tensor> = None;
        let mut add = |part: Tensor| -> Result<()> {
            sum = Some(match sum.take() {
                Some(sum) => (sum + part)?,
                None => part,
            });
            Ok(())
        };
        if let (Some(numbers), Some(line)) = (&numbers, &self.numbers) {
            add(line.forward(numbers)?)?;
        }
        for weights in self.inputs.vectors(&self.ids, batch)? {
            add(weights.sum()?)?;
        }
        match sum {
            Some(sum) => Ok((numbers, sum)),
            None => bail!("the data has no input"),
        }
    }
}

/// Returns the vectors of each sample side by side, with the numbers behind them.
fn joined(vectors: &[Looked], numbers: Option<Tensor>) -> Result<Tensor> {
    let mut parts = vectors
        .iter()
        .map(Looked::joined)
        .collect::<Result<Vec<_>>>()?;
    parts.extend(numbers);
    match parts.as_slice() {
        [part] => Ok(part.clone()),
        parts => Tensor::cat(parts, 1),
    }
}
