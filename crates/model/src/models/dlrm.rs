use candle_core::{DType, Result, Tensor, bail};
use candle_nn::{Init, Module, VarBuilder};

use super::dense::Dense;
use super::inputs::{Inputs, Looked, Vectors};
use super::options::Options;
use crate::{Batch, Model, Pass, Setup};

/// The model of Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems"
/// (2019). A perceptron turns the numbers into one vector. This vector, and the products of all pairs among this vector
/// and the vectors of ids, are the inputs of a second perceptron. The model predicts a number or a binary target.
///
/// Table: `embedding` of dimension `model.embedding`. Variables: `bottom.hidden.0.weight`, ..., `bottom.output.weight`,
/// `bottom.output.bias` and `top.hidden.0.weight`, ..., with the widths in `model.hidden`.
pub struct Dlrm {
    inputs: Inputs,
    vectors: Vectors,
    bottom: Dense,
    top: Dense,
    /// The indices of the pairs in the flattened matrix of all products.
    pairs: Vec<u32>,
}

impl Model for Dlrm {
    fn new(setup: &Setup, vars: VarBuilder) -> Result<Self> {
        Options::new(setup, &[])?;
        let inputs = Inputs::new(setup, &vars)?;
        if setup.outputs() != 1 || inputs.width == 0 {
            bail!(
                "it takes numbers and ids and predicts a number or a binary target; the data has {} numbers, the target {} outputs",
                inputs.width,
                setup.outputs()
            );
        }
        let (size, hidden) = (setup.settings.embedding, &setup.settings.hidden);
        let init = Init::Randn {
            mean: 0.0,
            stdev: (size as f64).powf(-0.5),
        };
        let vectors = inputs.vector_count() as u32 + 1;
        let pairs = (0..vectors).flat_map(|row| (0..row).map(move |column| row * vectors + column));
        let pairs: Vec<u32> = pairs.collect();
        Ok(Self {
            vectors: inputs.table(setup, "embedding", size, init)?,
            bottom: Dense::new(inputs.width, hidden, size, &vars.pp("bottom"))?,
            top: Dense::new(size + pairs.len(), hidden, 1, &vars.pp("top"))?,
            inputs,
            pairs,
        })
    }

    fn forward(&self, batch: &Batch, _: &Pass) -> Result<Tensor> {
        let Some(numbers) = self.inputs.numbers(batch)? else {
            bail!("the batch has no numbers");
        };
        let numbers = self.bottom.forward(&numbers)?.relu()?;
        let mut vectors = vec![numbers.unsqueeze(1)?];
        for looked in self.inputs.vectors(&self.vectors, batch)? {
            vectors.push(match looked {
                Looked::Dense(vectors) => vectors,
                ragged @ Looked::Ragged { .. } => ragged.sum()?.unsqueeze(1)?,
            });
        }
        let vectors = Tensor::cat(&vectors, 1)?.to_dtype(DType::F32)?;
        let products = vectors.matmul(&vectors.t()?)?.flatten_from(1)?;
        let pairs = Tensor::new(self.pairs.as_slice(), products.device())?;
        let pairs = products.index_select(&pairs, 1)?;
        self.top.forward(&Tensor::cat(&[numbers, pairs], 1)?)
    }
}
