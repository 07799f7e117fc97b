//! Metrics of binary classification, which need the outputs of the whole evaluation.

use candle_core::{Result, Tensor};

use super::loss::Loss;
use super::metric::Metric;
use super::scores::Scores;
use crate::input::Batch;

/// A sample of a binary classification.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scored {
    logit: f64,
    positive: bool,
    weight: f64,
}

/// All samples of a binary classification, and the function that computes the metric from them.
pub(crate) struct Pairs {
    loss: Loss,
    pairs: Vec<Scored>,
    value: fn(&mut [Scored]) -> f64,
}

impl Pairs {
    /// Returns an accumulator of `value`, for outputs of a model with this loss.
    pub(crate) fn new(loss: Loss, value: fn(&mut [Scored]) -> f64) -> Self {
        Self {
            loss,
            pairs: Vec::new(),
            value,
        }
    }
}

impl Metric for Pairs {
    fn add(&mut self, outputs: &Tensor, batch: &Batch) -> Result<()> {
        let scores = Scores::new(self.loss, outputs, batch)?;
        let pair = |i| Scored {
            logit: scores.logit(i),
            positive: scores.targets[i] > 0.5,
            weight: scores.weight(i),
        };
        self.pairs.extend((0..scores.samples()).map(pair));
        Ok(())
    }

    fn value(&mut self) -> f64 {
        match self.pairs.iter().any(|pair| pair.logit.is_nan()) {
            true => f64::NAN,
            false => (self.value)(&mut self.pairs),
        }
    }
}

/// Returns the share of pairs of a positive and a negative sample in which the positive sample has the larger logit. A
/// tie counts half. The weight of a pair is the product of the weights of its samples.
pub(crate) fn auc(pairs: &mut [Scored]) -> f64 {
    pairs.sort_unstable_by(|a, b| a.logit.total_cmp(&b.logit));
    let (mut below, mut sum, mut positives) = (0.0, 0.0, 0.0);
    // -0.0 and 0.0 are one logit, so groups go by `==`.
    for equal in pairs.chunk_by(|a, b| a.logit == b.logit) {
        let here = weight_of(equal, |pair| pair.positive);
        let negatives = weight_of(equal, |pair| !pair.positive);
        sum += here * (below + negatives / 2.0);
        below += negatives;
        positives += here;
    }
    sum / (positives * below)
}

/// Returns the total weight of the samples for which `holds` returns true.
fn weight_of(pairs: &[Scored], holds: impl Fn(&Scored) -> bool) -> f64 {
    let of = pairs.iter().filter(|pair| holds(pair));
    of.map(|pair| pair.weight).sum()
}

/// Returns the harmonic mean of precision and recall at the probability 0.5.
pub(crate) fn f1(pairs: &mut [Scored]) -> f64 {
    let right = weight_of(pairs, |pair| pair.logit > 0.0 && pair.positive);
    let wrong = weight_of(pairs, |pair| (pair.logit > 0.0) != pair.positive);
    2.0 * right / (2.0 * right + wrong)
}

/// Returns the mean of the predicted probabilities, divided by the share of samples that are positive.
pub(crate) fn calibration(pairs: &mut [Scored]) -> f64 {
    let probability = |pair: &Scored| pair.weight / (1.0 + (-pair.logit).exp());
    let predicted: f64 = pairs.iter().map(probability).sum();
    match weight_of(pairs, |pair| pair.positive) {
        0.0 => f64::NAN,
        observed => predicted / observed,
    }
}
