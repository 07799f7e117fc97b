use candle_core::{Result, Tensor, bail};
use candle_nn::VarBuilder;
use candle_nn::init::ZERO;

use crate::model::{Batch, Feature, Model, Pass, Ragged, Setup};

/// Logistic regression, and for other targets softmax or linear regression: `output.weight` of shape
/// `[outputs, features]`, `output.bias`, both zeros at first. Takes one input, dense or sparse.
pub struct Logistic {
    weight: Tensor,
    bias: Tensor,
}

impl Model for Logistic {
    fn new(setup: &Setup, vars: VarBuilder) -> Result<Self> {
        let input = setup
            .data
            .input()
            .map_err(|error| candle_core::Error::msg(error.to_string()))?;
        let features = match input.categories.filter(|_| input.ragged) {
            Some(categories) => categories as usize,
            None => setup.features()?,
        };
        let (outputs, vars) = (setup.outputs(), vars.pp("output"));
        Ok(Self {
            weight: vars.get_with_hints((outputs, features), "weight", ZERO)?,
            bias: vars.get_with_hints(outputs, "bias", ZERO)?,
        })
    }

    fn forward(&self, batch: &Batch, _: &Pass) -> Result<Tensor> {
        let sums = match batch.inputs().values().next() {
            Some(Feature::Dense(values)) => values
                .reshape((values.dim(0)?, ()))?
                .matmul(&self.weight.t()?)?,
            Some(Feature::Ragged(values)) => self.sparse(values)?,
            None => bail!("the batch has no input"),
        };
        sums.broadcast_add(&self.bias)
    }
}

impl Logistic {
    /// Returns, for each sample, the sum of its values, each times the weights of its feature.
    fn sparse(&self, features: &Ragged) -> Result<Tensor> {
        let samples = features.offsets.len() - 1;
        let zeros = Tensor::zeros(
            (samples, self.weight.dim(0)?),
            self.weight.dtype(),
            self.weight.device(),
        )?;
        if features.values.elem_count() == 0 {
            return Ok(zeros);
        }
        let mut rows = self
            .weight
            .t()?
            .contiguous()?
            .index_select(&features.values, 0)?;
        if let Some(weights) = &features.weights {
            rows = rows.broadcast_mul(&weights.unsqueeze(1)?)?;
        }
        let owners = features.offsets.windows(2).enumerate();
        let owners = owners.flat_map(|(i, ends)| std::iter::repeat_n(i as u32, ends[1] - ends[0]));
        let owners = Tensor::from_iter(owners, self.weight.device())?;
        zeros.index_add(&owners, &rows, 0)
    }
}
