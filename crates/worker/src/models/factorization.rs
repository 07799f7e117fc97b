use candle_core::{Result, Tensor, bail};
use candle_nn::init::ZERO;
use candle_nn::{Init, VarBuilder};
use nn::Embedding;

use super::inputs::Inputs;
use crate::model::{Batch, Model, Pass, Setup};

/// The standard deviation of the vectors' initial values.
const SPREAD: f64 = 0.01;

/// A factorization machine of degree 2 (Rendle, "Factorization Machines", ICDM 2010): a bias, a weight for each feature,
/// and for each pair of features the product of their vectors, which have `model.embedding` elements. Of a user and an
/// item it is matrix factorization with biases. It predicts a number or a binary target.
///
/// Variables: `bias`; `INPUT.weight` of shape `[categories, 1]` and `INPUT.vectors.weight` of shape
/// `[categories, model.embedding]` for each input of ids; `numbers.weight` of shape `[numbers, 1]` and
/// `numbers.vectors` for numbers.
pub struct FactorizationMachine {
    inputs: Inputs,
    tables: Vec<Table>,
    numbers: Option<Numbers>,
    bias: Tensor,
}

/// The weights and the vectors of an input's ids.
struct Table {
    weights: Embedding,
    vectors: Embedding,
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
        let inputs = Inputs::of(setup, &vars)?;
        let table = |name: &str, rows| {
            let vars = vars.pp(name);
            Ok(Table {
                vectors: Embedding::with_init(rows, size, spread, vars.pp("vectors"))?,
                weights: Embedding::with_init(rows, 1, ZERO, vars)?,
            })
        };
        let tables = inputs
            .ids
            .iter()
            .map(|ids| table(&ids.name, ids.categories));
        let tables = tables.collect::<Result<_>>()?;
        let numbers = |width| {
            let vars = vars.pp("numbers");
            Ok(Numbers {
                weights: vars.get_with_hints((width, 1), "weight", ZERO)?,
                vectors: vars.get_with_hints((width, size), "vectors", spread)?,
            })
        };
        let numbers: Option<Result<Numbers>> = (inputs.width > 0).then(|| numbers(inputs.width));
        Ok(Self {
            inputs,
            tables,
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
        for (ids, table) in self.inputs.ids.iter().zip(&self.tables) {
            outputs = (outputs + ids.vectors(&table.weights, batch)?.sum()?)?;
            let vectors = ids.vectors(&table.vectors, batch)?;
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
