//! Metrics of two classes, which need the outputs of the whole evaluation.

use candle_core::{Result, Tensor};

use super::loss::Loss;
use super::metric::Metric;
use super::scores::Scores;
use crate::input::Batch;

/// The logits and targets of all samples of two classes, and a value that is computed from them.
pub(super) struct Pairs {
    loss: Loss,
    pairs: Vec<(f64, bool)>,
    value: fn(&mut [(f64, bool)]) -> f64,
}

impl Pairs {
    /// Returns an accumulator of `value`, for outputs of a model with this loss.
    pub(super) fn new(loss: Loss, value: fn(&mut [(f64, bool)]) -> f64) -> Self {
        Self {
            loss,
            pairs: Vec::new(),
            value,
        }
    }
}

impl Metric for Pairs {
    fn add(&mut self, outputs: &Tensor, batch: &Batch) -> Result<()> {
        let scores = Scores::of(self.loss, outputs, batch)?;
        let pair = |i| (scores.logit(i), scores.targets[i] > 0.5);
        self.pairs.extend((0..scores.samples()).map(pair));
        Ok(())
    }

    fn value(&mut self) -> f64 {
        match self.pairs.iter().any(|(logit, _)| logit.is_nan()) {
            true => f64::NAN,
            false => (self.value)(&mut self.pairs),
        }
    }
}

/// Returns the share of pairs of a positive and a negative sample in which the positive one has the larger logit; a
/// tie counts half.
pub(super) fn auc(pairs: &mut [(f64, bool)]) -> f64 {
    pairs.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
    let (mut below, mut sum, mut positives) = (0.0, 0.0, 0.0);
    // -0.0 and 0.0 are one logit, so groups go by `==`.
    for equal in pairs.chunk_by(|a, b| a.0 == b.0) {
        let here = equal.iter().filter(|(_, positive)| *positive).count() as f64;
        let negatives = equal.len() as f64 - here;
        sum += here * (below + negatives / 2.0);
        below += negatives;
        positives += here;
    }
    sum / (positives * below)
}

/// Returns the harmonic mean of precision and recall at the probability 0.5.
pub(super) fn f1(pairs: &mut [(f64, bool)]) -> f64 {
    let count = |of: fn(&&(f64, bool)) -> bool| pairs.iter().filter(of).count() as f64;
    let right = count(|(logit, positive)| *logit > 0.0 && *positive);
    let wrong = count(|(logit, positive)| (*logit > 0.0) != *positive);
    2.0 * right / (2.0 * right + wrong)
}

/// Returns the mean of the predicted probabilities, divided by the share of samples that are positive.
pub(super) fn calibration(pairs: &mut [(f64, bool)]) -> f64 {
    let predicted: f64 = pairs
        .iter()
        .map(|(logit, _)| 1.0 / (1.0 + (-logit).exp()))
        .sum();
    match pairs.iter().filter(|(_, positive)| *positive).count() {
        0 => f64::NAN,
        observed => predicted / observed as f64,
    }
}
