use candle_core::{Result, Tensor, bail};
use candle_nn::init::ZERO;
use candle_nn::{Init, Module, VarBuilder};
use nn::Linear;

use super::dense::Dense;
use super::inputs::{Inputs, Looked, Vectors};
use super::options::Options;
use crate::model::{Batch, Model, Pass, Setup};

/// The standard deviation of the vectors' initial values.
pub(super) const SPREAD: Init = Init::Randn {
    mean: 0.0,
    stdev: 0.01,
};

/// A factorization machine and a multi-layer perceptron over the same vectors of ids (Guo et al., "DeepFM: A
/// Factorization-Machine based Neural Network for CTR Prediction", IJCAI 2017). Numbers have a weight each, and go into the
/// perceptron as they are. It predicts a number or a binary target.
///
/// Tables: `embedding` of dimension `model.embedding`; `linear` of dimension 1, with rows of zeros at first. Variables:
/// `numbers.weight` and `numbers.bias` if the data has numbers, and the perceptron's, with the widths in
/// `model.hidden`: `hidden.0.weight`, `hidden.0.bias`, ..., `output.weight`, `output.bias`.
pub struct DeepFm {
    wide: Wide,
    vectors: Vectors,
    deep: Dense,
}

/// A weight for each number and each id, and the inputs that have them.
pub(super) struct Wide {
    pub(super) inputs: Inputs,
    numbers: Option<Linear>,
    ids: Vectors,
}

impl Wide {
    pub(super) fn new(setup: &Setup, vars: &VarBuilder) -> Result<Self> {
        if setup.outputs() != 1 {
            bail!(
                "it predicts a number or a binary target, but the target has {} outputs",
                setup.outputs()
            );
        }
        let inputs = Inputs::of(setup, vars)?;
        let width = inputs.width;
        let line = || Linear::new(width, 1, vars.pp("numbers"));
        Ok(Self {
            numbers: (width > 0).then(line).transpose()?,
            ids: inputs.table(setup, "linear", 1, ZERO)?,
            inputs,
        })
    }

    /// Returns the numbers of a batch, and the weighted sum of each sample, of shape `[samples, 1]`.
    pub(super) fn forward(&self, batch: &Batch) -> Result<(Option<Tensor>, Tensor)> {
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
pub(super) fn joined(vectors: &[Looked], numbers: Option<Tensor>) -> Result<Tensor> {
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

/// Returns the sum of the products of all pairs of a sample's vectors, of shape `[samples, 1]`: half the
/// difference between the square of their sum and the sum of their squares (Rendle, "Factorization Machines", ICDM 2010, lemma 3.1).
pub(super) fn pairs(vectors: &[Looked]) -> Result<Option<Tensor>> {
    if let [Looked::Dense(vectors)] = vectors {
        return nn::sum_of_pairs(vectors).map(Some);
    }
    let mut sums: Option<(Tensor, Tensor)> = None;
    for vectors in vectors {
        let (sum, squares) = (vectors.sum()?, vectors.squares()?.sum()?);
        sums = Some(match sums.take() {
            Some(before) => ((before.0 + sum)?, (before.1 + squares)?),
            None => (sum, squares),
        });
    }
    let pairs = sums.map(|(sum, squares)| (sum.sqr()? - squares)?.sum_keepdim(1)? * 0.5);
    pairs.transpose()
}

impl Model for DeepFm {
    fn new(setup: &Setup, vars: VarBuilder) -> Result<Self> {
        Options::of(setup, &[])?;
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
        let (numbers, mut outputs) = self.wide.forward(batch)?;
        let vectors = self.wide.inputs.vectors(&self.vectors, batch)?;
        if let Some(pairs) = pairs(&vectors)? {
            outputs = (outputs + pairs)?;
        }
        outputs + self.deep.forward(&joined(&vectors, numbers)?)?
    }
}
