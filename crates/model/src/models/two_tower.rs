use std::collections::HashMap;
use std::sync::Arc;

use candle_core::{D, DType, Device, Result, Tensor, Var, bail};
use candle_nn::init::ZERO;
use candle_nn::{Init, Module, VarBuilder};

use super::dense::Dense;
use super::inputs::{Inputs, Looked, Vectors};
use super::options::Options;
use crate::{Batch, Loss, Metric, Model, Pass, Setup};

/// Added to a query's scores for other samples that have the query's own item, so that the item is no alternative to
/// itself.
const LEFT_OUT: f64 = -1e9;

/// Added to the square of a vector's length, which may be 0.
const EPSILON: f64 = 1e-12;

/// The number of queries whose scores for all items are computed at once.
const QUERIES: usize = 256;

/// The largest `recall` in `model.options`.
const MOST_ITEMS: usize = 1000;

/// The number of places for frequencies of items. Items with the same place share their frequency.
const PLACES: usize = 1 << 16;

/// The weight of a batch in the moving averages of frequencies.
const PART: f64 = 0.01;

/// The least frequency that is used. An item that no batch has had has this frequency.
const LEAST: f64 = 1e-6;

/// Two towers for retrieval (Yi et al., "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item
/// Recommendations", RecSys 2019): a perceptron over the inputs of the query, and another over the inputs of the item.
/// A sample is a pair of a query and an item that belong together, whatever its target is. The score of a query and an
/// item is the product of their vectors, each of length 1, divided by a temperature.
///
/// The loss is the model's own (`objective.loss = "model"`): the cross entropy of each query's own item among the items
/// of the batch. So the loss depends on which samples are in the same batch. Frequent items occur more often as
/// alternatives, so the logarithm of an item's share of the samples is subtracted from its scores (section 3 there; the
/// shares are moving averages). An item that occurs more than once in a batch is never an alternative to itself. Two
/// items are the same if they have the same ids. The comparison ignores inputs that are numbers or lists of ids, so the
/// other inputs of the item must identify it together. If there are none, each sample counts as a different item, and
/// scores are not corrected for frequency.
///
/// Settings in `model.options`: `item`, the names of the item's inputs (all other inputs are the query's);
/// `temperature` (0.05); `recall` (10). The metric `recall_10` is the share of held-out samples whose item is among the
/// ten items with the largest scores, out of all items that occur in the held-out samples.
///
/// The outputs are the vectors of query and item, of shape `[samples, 2, model.embedding]`. Tables: `query` and `item`,
/// of dimension `model.embedding`. Variables: those of the perceptrons, with the widths in `model.hidden`
/// (`query.hidden.0.weight`, ..., `query.output.bias`, and the same with `item`), and `item.running_frequencies`.
pub struct TwoTower {
    query: Tower,
    item: Tower,
    frequencies: Tensor,
    temperature: f64,
    recall: usize,
}

/// A perceptron over the vectors and numbers of some inputs.
struct Tower {
    inputs: Arc<Inputs>,
    vectors: Vectors,
    dense: Dense,
}

impl Model for TwoTower {
    fn new(setup: &Setup, vars: VarBuilder) -> Result<Self> {
        if setup.objective.loss != Loss::Model {
            bail!("two-tower has a loss of its own; set `objective.loss` to \"model\"");
        }
        let options = Options::new(setup, &["item", "temperature", "recall"])?;
        let item = options.names("item")?;
        if let Some(name) = item
            .iter()
            .find(|name| !setup.data.inputs.iter().any(|field| field.name == **name))
        {
            bail!(
                "`model.options.item` has {name:?}, which is no input; the inputs are {}",
                setup.data.input_names()
            );
        }
        let tower = |name, of_item| {
            Tower::new(setup, name, &vars, |input| item.contains(&input) == of_item)
        };
        Ok(Self {
            query: tower("query", false)?,
            item: tower("item", true)?,
            frequencies: vars
                .pp("item")
                .get_with_hints(PLACES, "running_frequencies", ZERO)?,
            temperature: options.positive("temperature", 0.05)?,
            recall: options.count("recall", 10, MOST_ITEMS)?,
        })
    }

    fn forward(&self, batch: &Batch, _: &Pass) -> Result<Tensor> {
        let (query, item) = (self.query.forward(batch)?, self.item.forward(batch)?);
        Tensor::stack(&[query, item], 1)
    }

    fn loss(&self, outputs: &Tensor, batch: &Batch, pass: &Pass) -> Result<Tensor> {
        let [query, item] = both(outputs)?;
        let mut scores = (query.matmul(&item.t()?)? / self.temperature)?;
        if let Some(keys) = self.item.inputs.keys(batch)? {
            let shares = self.shares(&keys, pass)?.to_dtype(scores.dtype())?;
            scores = scores.broadcast_sub(&shares.log()?)?;
            let keys = Tensor::new(keys, outputs.device())?;
            scores = without_repeats(&scores, &keys)?;
        }
        let own = Tensor::arange(0, query.dim(0)? as u32, outputs.device())?;
        match batch.weights() {
            None => nn::cross_entropy(&scores, &own),
            Some(weights) => {
                let logs = candle_nn::ops::log_softmax(&scores, D::Minus1)?;
                let own = logs.gather(&own.unsqueeze(1)?, 1)?.squeeze(1)?;
                (own * weights)?.neg()?.mean_all()
            }
        }
    }

    fn metrics(&self) -> Vec<(String, Box<dyn Metric>)> {
        let recall = RecallOfItems {
            inputs: Arc::clone(&self.item.inputs),
            recall: Recall::new(self.recall),
        };
        vec![(format!("recall_{}", self.recall), Box::new(recall))]
    }
}

impl TwoTower {
    /// Returns each item's share of the samples. In training, first updates the shares with the batch.
    fn shares(&self, keys: &[i64], pass: &Pass) -> Result<Tensor> {
        let device = self.frequencies.device();
        let places = keys
            .iter()
            .map(|key| (key.cast_unsigned() % PLACES as u64) as u32);
        let places = Tensor::from_iter(places, device)?;
        let mut frequencies = self.frequencies.detach();
        if pass.training {
            let of_each = Tensor::full((PART / keys.len() as f64) as f32, keys.len(), device)?;
            frequencies = (frequencies * (1.0 - PART))?.index_add(&places, &of_each, 0)?;
            Var::from_tensor(&self.frequencies)?.set(&frequencies)?;
        }
        frequencies.index_select(&places, 0)?.maximum(LEAST)
    }
}

impl Tower {
    fn new(
        setup: &Setup,
        name: &str,
        vars: &VarBuilder,
        takes: impl Fn(&str) -> bool,
    ) -> Result<Self> {
        let inputs = Inputs::some_of(setup, vars, takes)?;
        if inputs.is_empty() {
            bail!(
                "the {name} has no input; let `model.options.item` name the inputs of the item, and leave others for the query"
            );
        }
        let size = setup.settings.embedding;
        let spread = Init::Randn {
            mean: 0.0,
            stdev: (size as f64).powf(-0.5),
        };
        let vectors = match inputs.vector_count() {
            0 => Vectors::Variables(Vec::new()),
            _ => inputs.table(setup, name, size, spread)?,
        };
        let features = inputs.width + inputs.vector_count() * size;
        Ok(Self {
            dense: Dense::new(features, &setup.settings.hidden, size, &vars.pp(name))?,
            inputs: Arc::new(inputs),
            vectors,
        })
    }

    /// Returns the vectors of a batch, each of length 1, of shape `[samples, model.embedding]`.
    fn forward(&self, batch: &Batch) -> Result<Tensor> {
        let vectors = self.inputs.vectors(&self.vectors, batch)?;
        let parts = vectors.iter().map(Looked::joined);
        let mut parts = parts.collect::<Result<Vec<_>>>()?;
        parts.extend(self.inputs.numbers(batch)?);
        let vectors = self.dense.forward(&Tensor::cat(&parts, 1)?)?;
        let length = (vectors.sqr()?.sum_keepdim(1)? + EPSILON)?.sqrt()?;
        vectors.broadcast_div(&length)
    }
}

/// Lowers each query's scores for other samples that have the query's own item, so that these samples do not count.
/// `keys` has the key of each sample's item.
fn without_repeats(scores: &Tensor, keys: &Tensor) -> Result<Tensor> {
    let own = Tensor::eye(scores.dim(0)?, DType::F32, scores.device())?;
    let same = keys.unsqueeze(1)?.broadcast_eq(&keys.unsqueeze(0)?)?;
    let repeats = (same.to_dtype(DType::F32)? - own)?;
    scores + (repeats * LEFT_OUT)?.to_dtype(scores.dtype())?
}

/// Returns the vectors of the queries and of the items, each of shape `[samples, size]`.
fn both(outputs: &Tensor) -> Result<[Tensor; 2]> {
    let of = |place| outputs.narrow(1, place, 1)?.squeeze(1)?.contiguous();
    Ok([of(0)?, of(1)?])
}

/// The share of samples whose item is among the items with the largest scores.
struct Recall {
    most: usize,
    /// The vector of each sample's query, and the index of the sample's item.
    queries: Vec<(Vec<f32>, usize)>,
    /// The vectors of all items.
    items: Vec<f32>,
    /// The index of each item among the vectors of `items`, by the item's key.
    known: HashMap<i64, usize>,
    width: usize,
}

impl Recall {
    fn new(most: usize) -> Self {
        Self {
            most,
            queries: Vec::new(),
            items: Vec::new(),
            known: HashMap::new(),
            width: 0,
        }
    }

    /// Adds the vectors of samples, of shape `[samples, 2, size]`. `keys` has the key of each sample's item. Without
    /// keys, each sample has an item of its own.
    fn add(&mut self, outputs: &Tensor, keys: Option<&[i64]>) -> Result<()> {
        let [queries, items] = both(&outputs.to_dtype(DType::F32)?)?;
        let (queries, items) = (queries.to_vec2::<f32>()?, items.to_vec2::<f32>()?);
        for (sample, (query, item)) in queries.into_iter().zip(items).enumerate() {
            self.width = item.len();
            let new = self.items.len() / item.len().max(1);
            let number = match keys {
                None => new,
                Some(keys) => *self.known.entry(keys[sample]).or_insert(new),
            };
            if number == new {
                self.items.extend(item);
            }
            self.queries.push((query, number));
        }
        Ok(())
    }

    /// Returns the share of all samples that were added.
    fn measured(&self) -> Result<f64> {
        let count = self.items.len() / self.width.max(1);
        let items = Tensor::from_slice(&self.items, (count, self.width), &Device::Cpu)?.t()?;
        let mut found = 0;
        for part in self.queries.chunks(QUERIES) {
            let vectors = part.iter().flat_map(|(query, _)| query).copied();
            let vectors = Tensor::from_iter(vectors, &Device::Cpu)?.reshape((part.len(), ()))?;
            let scores = vectors.matmul(&items)?.to_vec2::<f32>()?;
            for (scores, (_, own)) in scores.iter().zip(part) {
                let own = scores[*own];
                // An item of the same score is in front, so that equal scores of all items find none.
                let front = scores.iter().filter(|score| **score >= own).count();
                found += usize::from((1..=self.most).contains(&front));
            }
        }
        Ok(found as f64 / self.queries.len() as f64)
    }
}

/// The recall of items that are identified by their ids.
struct RecallOfItems {
    inputs: Arc<Inputs>,
    recall: Recall,
}

impl Metric for RecallOfItems {
    fn add(&mut self, outputs: &Tensor, batch: &Batch) -> Result<()> {
        let keys = self.inputs.keys(batch)?;
        self.recall.add(outputs, keys.as_deref())
    }

    fn value(&mut self) -> f64 {
        self.recall.measured().unwrap_or(f64::NAN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_item_is_no_alternative_to_itself() {
        let scores = Tensor::new(
            &[[1f32, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]],
            &Device::Cpu,
        );
        let keys = Tensor::new(&[7i64, 8, 7], &Device::Cpu).unwrap();
        let own = Tensor::new(&[0u32, 1, 2], &Device::Cpu).unwrap();
        let scores = without_repeats(&scores.unwrap(), &keys).unwrap();
        let loss = nn::cross_entropy(&scores, &own).unwrap();
        let log = |rows: &[f64], own: f64| rows.iter().map(|x| x.exp()).sum::<f64>().ln() - own;
        let expected = log(&[1.0, 2.0], 1.0) + log(&[4.0, 5.0, 6.0], 5.0) + log(&[8.0, 9.0], 9.0);
        let loss = f64::from(loss.to_scalar::<f32>().unwrap());
        assert!((loss - expected / 3.0).abs() < 1e-6, "{loss}");
    }

    /// The ranks of three queries among three items, by hand.
    #[test]
    fn recall_counts_items_once() {
        let vectors = |pairs: &[[[f32; 2]; 2]; 2]| Tensor::new(pairs, &Device::Cpu).unwrap();
        let recall = |most| {
            let mut recall = Recall::new(most);
            let (east, north) = ([1.0, 0.0], [0.0, 1.0]);
            let outputs = vectors(&[[east, east], [east, north]]);
            recall.add(&outputs, Some(&[7, 8])).unwrap();
            // Item 7 again, and a third item in the middle.
            let outputs = vectors(&[[north, east], [east, [0.8, 0.6]]]);
            recall.add(&outputs, Some(&[7, 9])).unwrap();
            recall.measured().unwrap()
        };
        // Of east: 7, 9, 8. Of north: 8, 9, 7.
        assert_eq!([recall(1), recall(2), recall(3)], [0.25, 0.5, 1.0]);
    }
}
