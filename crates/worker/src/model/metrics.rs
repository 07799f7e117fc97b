//! Metrics: measurements over a whole evaluation. Each takes the outputs of batch after batch.

use std::collections::BTreeMap;
use std::fmt;

use candle_core::{DType, Result, Tensor};

use super::loss::{Loss, like};
use crate::input::{Batch, InputError};

/// Metrics of an evaluation, by name; `loss` is always there.
pub type Metrics = BTreeMap<String, f64>;

/// A measurement over all samples of an evaluation.
pub trait Metric {
    /// Takes the outputs of the model for a batch.
    ///
    /// # Errors
    /// If they do not fit, or candle's.
    fn add(&mut self, outputs: &Tensor, batch: &Batch) -> Result<()>;

    /// Returns the value over all batches; NaN if it is not defined for them.
    fn value(&mut self) -> f64;
}

/// A metric that comes with Flambeau.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Name {
    /// The share of samples with the right class. Binary: the right side of the probability 0.5.
    Accuracy,
    /// The share of samples whose class is among the so many with the largest logits.
    Top(usize),
    /// The area under the ROC curve, exact over the whole evaluation; ties count half (Fawcett, "An introduction to
    /// ROC analysis", 2006, section 7). For two classes.
    Auc,
    /// The mean of minus the logarithm of the probability of the right class.
    LogLoss,
    /// The harmonic mean of precision and recall at the probability 0.5. For two classes.
    F1,
    /// The mean of the predicted probabilities, divided by the share of samples that are 1. For two classes.
    Calibration,
    /// The root of the mean squared error.
    Rmse,
    /// The mean absolute error.
    Mae,
}

impl Name {
    /// Returns the metrics that are measured for a loss unless the job names others.
    pub(super) fn usual(loss: Loss) -> &'static [Self] {
        match loss {
            Loss::CrossEntropy { .. } => &[Self::Accuracy],
            Loss::BinaryCrossEntropy => &[Self::Accuracy, Self::Auc, Self::LogLoss],
            Loss::MeanSquaredError | Loss::MeanAbsoluteError => &[Self::Rmse, Self::Mae],
        }
    }

    /// Reads the name of a metric that a job with this loss measures.
    ///
    /// # Errors
    /// [`InputError::Metric`] lists those that there are for the loss.
    pub(super) fn read(
        name: &str,
        loss: Loss,
        outputs: usize,
    ) -> std::result::Result<Self, InputError> {
        let top = name.strip_prefix("top_").and_then(|n| n.parse().ok());
        let known = match loss {
            Loss::CrossEntropy { .. } => {
                "accuracy, top_5 (or another number), log_loss, and for two classes auc, f1 and calibration"
            }
            Loss::BinaryCrossEntropy => "accuracy, auc, log_loss, f1, calibration",
            Loss::MeanSquaredError | Loss::MeanAbsoluteError => "rmse, mae",
        };
        let (classes, numbers) = match loss {
            Loss::CrossEntropy { .. } | Loss::BinaryCrossEntropy => (true, false),
            Loss::MeanSquaredError | Loss::MeanAbsoluteError => (false, true),
        };
        let several = matches!(loss, Loss::CrossEntropy { .. });
        let two = classes && (!several || outputs == 2);
        match name {
            "accuracy" if classes => Ok(Self::Accuracy),
            "auc" if two => Ok(Self::Auc),
            "log_loss" if classes => Ok(Self::LogLoss),
            "f1" if two => Ok(Self::F1),
            "calibration" if two => Ok(Self::Calibration),
            "rmse" if numbers => Ok(Self::Rmse),
            "mae" if numbers => Ok(Self::Mae),
            _ => match top.filter(|n| several && *n > 0) {
                Some(n) => Ok(Self::Top(n)),
                None => Err(InputError::Metric {
                    name: name.to_owned(),
                    known,
                }),
            },
        }
    }

    /// Returns an accumulator of this metric.
    pub(super) fn metric(self, loss: Loss) -> Box<dyn Metric> {
        let mean = |of: fn(&Scores, usize) -> f64, root| -> Box<dyn Metric> {
            Box::new(Mean {
                loss,
                of,
                root,
                sum: 0.0,
                count: 0,
            })
        };
        let pairs = |value| -> Box<dyn Metric> {
            Box::new(Pairs {
                loss,
                pairs: Vec::new(),
                value,
            })
        };
        match self {
            Self::Accuracy => mean(|scores, i| scores.is_right(i, 1), false),
            Self::Top(most) => Box::new(Top {
                most,
                right: 0.0,
                count: 0,
            }),
            Self::LogLoss => mean(Scores::log_loss, false),
            Self::Rmse => mean(|scores, i| scores.error(i).powi(2), true),
            Self::Mae => mean(|scores, i| scores.error(i).abs(), false),
            Self::Auc => pairs(auc),
            Self::F1 => pairs(f1),
            Self::Calibration => pairs(calibration),
        }
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Accuracy => f.write_str("accuracy"),
            Self::Top(most) => write!(f, "top_{most}"),
            Self::Auc => f.write_str("auc"),
            Self::LogLoss => f.write_str("log_loss"),
            Self::F1 => f.write_str("f1"),
            Self::Calibration => f.write_str("calibration"),
            Self::Rmse => f.write_str("rmse"),
            Self::Mae => f.write_str("mae"),
        }
    }
}

/// The outputs and targets of a batch as numbers.
struct Scores {
    loss: Loss,
    /// The outputs of each sample.
    width: usize,
    outputs: Vec<f32>,
    targets: Vec<f32>,
}

impl Scores {
    fn of(loss: Loss, outputs: &Tensor, batch: &Batch) -> Result<Self> {
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
        })
    }

    fn samples(&self) -> usize {
        self.targets
            .len()
            .min(self.outputs.len() / self.width.max(1))
    }

    fn row(&self, sample: usize) -> &[f32] {
        &self.outputs[sample * self.width..][..self.width]
    }

    /// Returns 1 if the target's class is among the `most` largest outputs, else 0.
    fn is_right(&self, sample: usize, most: usize) -> f64 {
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

    fn error(&self, sample: usize) -> f64 {
        f64::from(self.outputs[sample]) - f64::from(self.targets[sample])
    }

    /// Returns the logit of class 1 against class 0.
    fn logit(&self, sample: usize) -> f64 {
        match self.row(sample) {
            [logit] => f64::from(*logit),
            [first, second] => f64::from(*second) - f64::from(*first),
            _ => f64::NAN,
        }
    }

    fn log_loss(&self, sample: usize) -> f64 {
        match self.loss {
            Loss::CrossEntropy { .. } => {
                let row = self.row(sample).iter().map(|v| f64::from(*v));
                let largest = row.clone().fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = row.clone().map(|v| (v - largest).exp()).sum();
                let own = row.clone().nth(self.targets[sample] as usize);
                largest + sum.ln() - own.unwrap_or(f64::NAN)
            }
            _ => {
                let logit = self.logit(sample);
                let towards = if self.targets[sample] > 0.5 {
                    -logit
                } else {
                    logit
                };
                towards.max(0.0) + (-towards.abs()).exp().ln_1p()
            }
        }
    }
}

/// The mean of a number over all samples, or its root.
struct Mean {
    loss: Loss,
    of: fn(&Scores, usize) -> f64,
    root: bool,
    sum: f64,
    count: usize,
}

impl Metric for Mean {
    fn add(&mut self, outputs: &Tensor, batch: &Batch) -> Result<()> {
        let scores = Scores::of(self.loss, outputs, batch)?;
        let samples = scores.samples();
        self.sum += (0..samples).map(|i| (self.of)(&scores, i)).sum::<f64>();
        self.count += samples;
        Ok(())
    }

    fn value(&mut self) -> f64 {
        let mean = self.sum / self.count as f64;
        if self.root { mean.sqrt() } else { mean }
    }
}

/// The share of samples whose class is among the largest outputs.
struct Top {
    most: usize,
    right: f64,
    count: usize,
}

impl Metric for Top {
    fn add(&mut self, outputs: &Tensor, batch: &Batch) -> Result<()> {
        let scores = Scores::of(Loss::CrossEntropy { smoothing: 0.0 }, outputs, batch)?;
        let samples = scores.samples();
        let right = (0..samples).map(|i| scores.is_right(i, self.most));
        self.right += right.sum::<f64>();
        self.count += samples;
        Ok(())
    }

    fn value(&mut self) -> f64 {
        self.right / self.count as f64
    }
}

/// The logits and targets of all samples of two classes, and a value that is computed from them.
struct Pairs {
    loss: Loss,
    pairs: Vec<(f64, bool)>,
    value: fn(&mut [(f64, bool)]) -> f64,
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
fn auc(pairs: &mut [(f64, bool)]) -> f64 {
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

fn f1(pairs: &mut [(f64, bool)]) -> f64 {
    let count = |of: fn(&&(f64, bool)) -> bool| pairs.iter().filter(of).count() as f64;
    let right = count(|(logit, positive)| *logit > 0.0 && *positive);
    let wrong = count(|(logit, positive)| (*logit > 0.0) != *positive);
    2.0 * right / (2.0 * right + wrong)
}

fn calibration(pairs: &mut [(f64, bool)]) -> f64 {
    let predicted: f64 = pairs
        .iter()
        .map(|(logit, _)| 1.0 / (1.0 + (-logit).exp()))
        .sum();
    match pairs.iter().filter(|(_, positive)| *positive).count() {
        0 => f64::NAN,
        observed => predicted / observed as f64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device::Cpu;

    const BINARY: Loss = Loss::BinaryCrossEntropy;
    const CLASSES: Loss = Loss::CrossEntropy { smoothing: 0.0 };

    fn measure(name: Name, loss: Loss, batches: &[Batch], outputs: &[Tensor]) -> f64 {
        let mut metric = name.metric(loss);
        for (batch, outputs) in batches.iter().zip(outputs) {
            metric.add(outputs, batch).unwrap();
        }
        metric.value()
    }

    fn binary(logits: &[f32], targets: &[f32]) -> (Vec<Batch>, Vec<Tensor>) {
        // Cut unevenly: a metric over all samples is no mean over batches.
        let cut = logits.len() / 3;
        let part = |range: std::ops::Range<usize>| {
            let size = range.len();
            let target = Tensor::new(&targets[range.clone()], &Cpu).unwrap();
            let outputs = Tensor::new(&logits[range], &Cpu).unwrap();
            let outputs = outputs.reshape((size, 1)).unwrap();
            (Batch::of(size).with_target("y", target), outputs)
        };
        [part(0..cut), part(cut..logits.len())].into_iter().unzip()
    }

    #[test]
    fn two_classes_are_measured_over_the_whole_evaluation() {
        let logits = [2.0, -1.0, 0.5, 0.5, -0.5, 3.0, -2.0];
        let targets = [1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0];
        let (batches, outputs) = binary(&logits, &targets);
        let of = |name| measure(name, BINARY, &batches, &outputs);
        // By hand: of the 12 pairs, one is a tie and one is the wrong way round.
        assert!((of(Name::Auc) - 10.5 / 12.0).abs() < 1e-12);
        assert!((of(Name::Accuracy) - 5.0 / 7.0).abs() < 1e-12);
        assert!((of(Name::F1) - 2.0 * 3.0 / (2.0 * 3.0 + 2.0)).abs() < 1e-12);
        let probability = |logit: f32| 1.0 / (1.0 + (-f64::from(logit)).exp());
        let expected: f64 = logits
            .iter()
            .zip(targets)
            .map(|(l, t)| {
                -(if t > 0.5 {
                    probability(*l)
                } else {
                    1.0 - probability(*l)
                })
                .ln()
            })
            .sum();
        assert!((of(Name::LogLoss) - expected / 7.0).abs() < 1e-9);
        let predicted: f64 = logits.iter().map(|l| probability(*l)).sum();
        assert!((of(Name::Calibration) - predicted / 4.0).abs() < 1e-9);
    }

    #[test]
    fn an_auc_of_one_class_alone_is_not_defined() {
        let (batches, outputs) = binary(&[1.0, 2.0, 3.0], &[1.0, 1.0, 1.0]);
        assert!(measure(Name::Auc, BINARY, &batches, &outputs).is_nan());
        let (batches, outputs) = binary(&[1.0, f32::NAN, 3.0], &[1.0, 0.0, 1.0]);
        assert!(measure(Name::Auc, BINARY, &batches, &outputs).is_nan());
    }

    #[test]
    fn classes_are_right_if_they_are_among_the_largest() {
        let outputs =
            [Tensor::new(&[[1f32, 3.0, 2.0], [5.0, 5.0, 0.0], [0.0, 1.0, 2.0]], &Cpu).unwrap()];
        let target = Tensor::new(&[2u32, 1, 2], &Cpu).unwrap();
        let batches = [Batch::of(3).with_target("y", target)];
        let of = |name| measure(name, CLASSES, &batches, &outputs);
        assert!((of(Name::Accuracy) - 1.0 / 3.0).abs() < 1e-12);
        assert!((of(Name::Top(2)) - 1.0).abs() < 1e-12);
        assert!((of(Name::Top(1)) - of(Name::Accuracy)).abs() < 1e-12);
    }

    #[test]
    fn outputs_that_are_no_numbers_are_never_right() {
        let (batches, outputs) = binary(&[f32::NAN, -1.0, 2.0], &[0.0, 0.0, 1.0]);
        let accuracy = measure(Name::Accuracy, BINARY, &batches, &outputs);
        assert!((accuracy - 2.0 / 3.0).abs() < 1e-12);
        for name in [Name::F1, Name::Auc, Name::Calibration] {
            assert!(measure(name, BINARY, &batches, &outputs).is_nan(), "{name}");
        }
        let outputs = [Tensor::new(&[[f32::NAN, 1.0]], &Cpu).unwrap()];
        let target = Tensor::new(&[1u32], &Cpu).unwrap();
        let batches = [Batch::of(1).with_target("y", target)];
        assert_eq!(measure(Name::Accuracy, CLASSES, &batches, &outputs), 0.0);
    }

    #[test]
    fn metrics_of_two_classes_are_refused_for_more() {
        for name in ["auc", "f1", "calibration"] {
            assert!(Name::read(name, CLASSES, 2).is_ok());
            let error = Name::read(name, CLASSES, 3).unwrap_err().to_string();
            assert!(error.contains("for two classes"), "{error}");
        }
    }

    #[test]
    fn numbers_are_measured_by_their_errors() {
        let outputs = [
            Tensor::new(&[1f32, 2.0], &Cpu).unwrap(),
            Tensor::new(&[5f32], &Cpu).unwrap(),
        ];
        let batch = |target: &[f32]| {
            Batch::of(target.len()).with_target("y", Tensor::new(target, &Cpu).unwrap())
        };
        let batches = [batch(&[0.0, 2.0]), batch(&[2.0])];
        let loss = Loss::MeanSquaredError;
        let rmse = measure(Name::Rmse, loss, &batches, &outputs);
        assert!((rmse - (10.0f64 / 3.0).sqrt()).abs() < 1e-12);
        // A target of several numbers counts once for each.
        let several = [Tensor::new(&[[1f32, 2.0], [3.0, 4.0]], &Cpu).unwrap()];
        let target = Tensor::new(&[[1f32, 2.0], [3.0, 8.0]], &Cpu).unwrap();
        let batch = [Batch::of(2).with_target("y", target)];
        assert!((measure(Name::Rmse, loss, &batch, &several) - 2.0).abs() < 1e-12);
        let mae = measure(Name::Mae, loss, &batches, &outputs);
        assert!((mae - 4.0 / 3.0).abs() < 1e-12);
    }
}
