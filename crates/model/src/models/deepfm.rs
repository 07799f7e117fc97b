use candle_core::{Result, Tensor};
use candle_nn::VarBuilder;

use super::inputs::Looked;
use super::wide_deep::WideDeep;
use crate::{Batch, Model, Pass, Setup};

/// A factorization machine and a multi-layer perceptron over the same vectors of ids (Guo et al., "DeepFM: A
/// Factorization-Machine based Neural Network for CTR Prediction", IJCAI 2017): the output of [`WideDeep`], plus the
/// products of all pairs of vectors. It predicts a number or a binary target.
///
/// Tables and variables are those of [`WideDeep`].
pub struct DeepFm(WideDeep);

impl Model for DeepFm {
    fn new(setup: &Setup, vars: VarBuilder) -> Result<Self> {
        WideDeep::new(setup, vars).map(Self)
    }

    fn forward(&self, batch: &Batch, _: &Pass) -> Result<Tensor> {
        let (vectors, outputs) = self.0.with_vectors(batch)?;
        match pairs(&vectors)? {
            Some(pairs) => outputs + pairs,
            None => Ok(outputs),
        }
    }
}

/// Returns the sum of the products of all pairs of a sample's vectors, of shape `[samples, 1]`: half the difference
/// between the square of the vectors' sum and the sum of their squares (Rendle, "Factorization Machines", ICDM 2010,
/// lemma 3.1). `None` if there are no vectors.
fn pairs(vectors: &[Looked]) -> Result<Option<Tensor>> {
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
