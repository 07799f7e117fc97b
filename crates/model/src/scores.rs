//! The outputs of a model and their targets, as numbers.

use candle_core::{DType, Result, Tensor};

use super::loss::{Loss, like};
use crate::input::Batch;

/// The outputs and targets of a batch as numbers.
pub(crate) struct Scores {
    loss: Loss,
    /// The number of outputs for each sample. A target of several numbers counts as several samples, with one output
    /// each.
    width: usize,
    outputs: Vec<f32>,
    /// The target of each sample.
    pub(super) targets: Vec<f32>,
    /// The weight of each sample of the batch; `None` if all samples have the same weight.
    weights: Option<Vec<f32>>,
    /// The number of values in the target of a sample of the batch.
    of_target: usize,
}

impl Scores {
    /// Returns the outputs and targets of a batch.
    pub(crate) fn new(loss: Loss, outputs: &Tensor, batch: &Batch) -> Result<Self> {
        let target = batch.target()?;
        let outputs = match loss {
            Loss::CrossEntropy { .. } => outputs.clone(),
            _ => like(outputs, target)?,
        };
        let numbers = |tensor: &Tensor| -> Result<Vec<f32>> {
            tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1()
        };
        Ok(Self {
            loss,
            // A target of several numbers counts once for each.
            width: match loss {
                Loss::CrossEntropy { .. } => outputs.dim(1)?.max(1),
                _ => 1,
            },
            outputs: numbers(&outputs)?,
            targets: numbers(target)?,
            weights: batch.weights().map(numbers).transpose()?,
            of_target: (target.elem_count() / batch.samples().max(1)).max(1),
        })
    }

    /// Returns the number of samples.
    pub(crate) fn samples(&self) -> usize {
        self.targets
            .len()
            .min(self.outputs.len() / self.width.max(1))
    }

    /// Returns the weight of a sample.
    pub(crate) fn weight(&self, sample: usize) -> f64 {
        let weights = self.weights.as_ref();
        let weight = weights.and_then(|weights| weights.get(sample / self.of_target));
        weight.copied().map_or(1.0, f64::from)
    }

    /// Returns the total weight of all samples.
    pub(crate) fn weight_of_all(&self) -> f64 {
        (0..self.samples()).map(|sample| self.weight(sample)).sum()
    }

    fn row(&self, sample: usize) -> &[f32] {
        &self.outputs[sample * self.width..][..self.width]
    }

    /// Returns 1 if the target's class is among the `most` largest outputs, or if a single logit is on the right side
    /// of 0; otherwise 0.
    pub(crate) fn is_right(&self, sample: usize, most: usize) -> f64 {
        let right = match self.loss {
            Loss::CrossEntropy { .. } => {
                let (row, class) = (self.row(sample), self.targets[sample] as usize);
                let own = row.get(class).copied().unwrap_or(f32::NAN);
                // Of equal outputs the first counts, as with candle's argmax.
                let before = |(i, v): &(usize, &f32)| **v > own || (**v == own && *i < class);
                let numbers = class < row.len() && row.iter().all(|v| !v.is_nan());
                numbers && row.iter().enumerate().filter(before).count() < most
            }
            _ => {
                let logit = self.outputs[sample];
                !logit.is_nan() && (logit > 0.0) == (self.targets[sample] > 0.5)
            }
        };
        f64::from(u8::from(right))
    }

    /// Returns the output minus the target.
    pub(crate) fn error(&self, sample: usize) -> f64 {
        f64::from(self.outputs[sample]) - f64::from(self.targets[sample])
    }

    /// Returns the logit of class 1 against class 0; NaN if there are more classes.
    pub(crate) fn logit(&self, sample: usize) -> f64 {
        match self.row(sample) {
            [logit] => f64::from(*logit),
            [first, second] => f64::from(*second) - f64::from(*first),
            _ => f64::NAN,
        }
    }
}
