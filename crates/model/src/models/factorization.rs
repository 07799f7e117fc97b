use candle_core::{Result, Tensor, bail};
use candle_nn::init::ZERO;
use candle_nn::{Init, VarBuilder};

use super::inputs::{Inputs, Vectors};
use super::options::Options;
use crate::{Batch, Model, Pass, Setup};

/// The standard deviation of the vectors' initial values.
const SPREAD: f64 = 0.01;

/// A factorization machine of degree 2 (Rendle, "Factorization Machines", ICDM 2010): a bias, a weight for each
/// feature, and for each pair of features the product of their vectors, which have `model.embedding` elements. With a
/// user and an item as features, it equals matrix factorization with biases. It predicts a number or a binary target.
///
/// Variables: `bias`; for each input of ids `linear.INPUT.weight` of shape `[categories, 1]` and
/// `embedding.INPUT.weight` of shape `[categories, model.embedding]`; for numbers `numbers.weight` of shape `[numbers,
/// 1]` and `numbers.vectors` of shape `[numbers, model.embedding]`.
pub struct FactorizationMachine {
    inputs: Inputs,
    /// The weights of ids.
    weights: Vectors,
    /// The vectors of ids.
    vectors: Vectors,
    numbers: Option<Numbers>,
    bias: Tensor,
}

/// The weights and the vectors of numbers.
struct Numbers {
    weights: Tensor,
    vectors: Tensor,
}

impl Model for FactorizationMachine {
    fn new(setup: &Setup, vars: VarBuilder) -> Result<Self> {
        if setup.outputs() != 1 {
            bail!(
                "it predicts a number or a binary target, but the target has {} outputs; use `mlp` or `logistic`",
                setup.outputs()
            );
        }
        let size = setup.settings.embedding;
        let spread = Init::Randn {
            mean: 0.0,
            stdev: SPREAD,
        };
        Options::new(setup, &[])?;
        let inputs = Inputs::new(setup, &vars)?;
        let numbers = |width| {
            let vars = vars.pp("numbers");
            Ok(Numbers {
                weights: vars.get_with_hints((width, 1), "weight", ZERO)?,
                vectors: vars.get_with_hints((width, size), "vectors", spread)?,
            })
        };
        let numbers: Option<Result<Numbers>> = (inputs.width > 0).then(|| numbers(inputs.width));
        Ok(Self {
            weights: inputs.vectors_of(setup, "linear", 1, ZERO, &vars)?,
            vectors: inputs.vectors_of(setup, "embedding", size, spread, &vars)?,
            inputs,
            numbers: numbers.transpose()?,
            bias: vars.get_with_hints(1, "bias", ZERO)?,
        })
    }

    fn forward(&self, batch: &Batch, _: &Pass) -> Result<Tensor> {
        let mut outputs = self.bias.broadcast_as((batch.samples(), 1))?;
        // The sum of the vectors, and the sum of their squares, of shape [samples, size].
        let mut sums: Option<(Tensor, Tensor)> = None;
        let mut add = |sum: Tensor, squares: Tensor| -> Result<()> {
            sums = Some(match sums.take() {
                Some(before) => ((before.0 + sum)?, (before.1 + squares)?),
                None => (sum, squares),
            });
            Ok(())
        };
        for weights in self.inputs.vectors(&self.weights, batch)? {
            outputs = (outputs + weights.sum()?)?;
        }
        for vectors in self.inputs.vectors(&self.vectors, batch)? {
            add(vectors.sum()?, vectors.squares()?.sum()?)?;
        }
        if let (Some(values), Some(numbers)) = (self.inputs.numbers(batch)?, &self.numbers) {
            outputs = (outputs + values.matmul(&numbers.weights)?)?;
            let squares = values.sqr()?.matmul(&numbers.vectors.sqr()?)?;
            add(values.matmul(&numbers.vectors)?, squares)?;
        }
        match sums {
            // The pairs' products are half of what the square of the sum has beyond the sum of the squares (lemma 3.1).
            Some((sum, squares)) => outputs + ((sum.sqr()? - squares)?.sum_keepdim(1)? * 0.5)?,
            None => Ok(outputs),
        }
    }
}
