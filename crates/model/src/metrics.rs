//! Metrics: measurements over a whole evaluation. Each metric receives the outputs of one batch after another.

use std::collections::BTreeMap;
use std::fmt;

use candle_core::{DType, Result, Tensor};

use super::loss::Loss;
use super::metric::Metric;
use super::pairs::{Pairs, auc, calibration, f1};
use super::scores::Scores;
use crate::input::{Batch, InputError, Scale};

/// The values of an evaluation's metrics, by name. There is always a `loss`.
pub type Metrics = BTreeMap<String, f64>;

/// A built-in metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Name {
    /// The share of samples whose class has the largest logit; of a binary target, the share of samples whose
    /// probability is on the right side of 0.5.
    Accuracy,
    /// The share of samples whose class is among this number of largest logits.
    Top(usize),
    /// The area under the ROC curve, exact over the whole evaluation; ties count half (Fawcett, "An introduction to
    /// ROC analysis", 2006, section 7). For two classes.
    Auc,
    /// The mean negative logarithm of the probability of the right class.
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
            Loss::Model => &[],
        }
    }

    /// Reads the name of a metric that a job with this loss measures.
    ///
    /// # Errors
    /// [`InputError::Metric`] lists the metrics for the loss.
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
            Loss::Model => "those of the model, which are always measured",
        };
        let (classes, numbers) = match loss {
            Loss::CrossEntropy { .. } | Loss::BinaryCrossEntropy => (true, false),
            Loss::MeanSquaredError | Loss::MeanAbsoluteError => (false, true),
            Loss::Model => (false, false),
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

    /// Returns an accumulator of this metric, for a target that has been standardised with `scale`.
    pub(crate) fn metric(self, loss: Loss, scale: Option<Scale>) -> Box<dyn Metric> {
        let unit = match self {
            Self::Rmse | Self::Mae => scale.map_or(1.0, |scale| scale.deviation),
            _ => 1.0,
        };
        let mean = |of: fn(&Scores, usize) -> f64, root| -> Box<dyn Metric> {
            Box::new(Mean {
                loss,
                of,
                root,
                unit,
                sum: 0.0,
                weight: 0.0,
            })
        };
        let pairs = |value| -> Box<dyn Metric> { Box::new(Pairs::new(loss, value)) };
        match self {
            Self::Accuracy => mean(|scores, i| scores.is_right(i, 1), false),
            Self::Top(most) => Box::new(Top {
                most,
                right: 0.0,
                weight: 0.0,
            }),
            Self::LogLoss => Box::new(LogLoss {
                loss: loss.plain(),
                sum: 0.0,
                weight: 0.0,
            }),
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

/// The weighted mean of a number over all samples, or the square root of this mean.
struct Mean {
    loss: Loss,
    of: fn(&Scores, usize) -> f64,
    root: bool,
    /// The factor of the result: the deviation of the labels if the target is standardised, otherwise 1.
    unit: f64,
    sum: f64,
    weight: f64,
}

impl Metric for Mean {
    fn add(&mut self, outputs: &Tensor, batch: &Batch) -> Result<()> {
        let scores = Scores::new(self.loss, outputs, batch)?;
        let samples = scores.samples();
        let weighted = |i| scores.weight(i) * (self.of)(&scores, i);
        self.sum += (0..samples).map(weighted).sum::<f64>();
        self.weight += scores.weight_of_all();
        Ok(())
    }

    fn value(&mut self) -> f64 {
        let mean = self.sum / self.weight;
        self.unit * if self.root { mean.sqrt() } else { mean }
    }
}

/// The share of samples that have their class among the largest outputs.
struct Top {
    most: usize,
    right: f64,
    weight: f64,
}

impl Metric for Top {
    fn add(&mut self, outputs: &Tensor, batch: &Batch) -> Result<()> {
        let scores = Scores::new(Loss::CrossEntropy { smoothing: 0.0 }, outputs, batch)?;
        let samples = scores.samples();
        let right = (0..samples).map(|i| scores.weight(i) * scores.is_right(i, self.most));
        self.right += right.sum::<f64>();
        self.weight += scores.weight_of_all();
        Ok(())
    }

    fn value(&mut self) -> f64 {
        self.right / self.weight
    }
}

/// The weighted mean of the loss of each sample, computed in `f64`.
struct LogLoss {
    loss: Loss,
    sum: f64,
    weight: f64,
}

impl Metric for LogLoss {
    fn add(&mut self, outputs: &Tensor, batch: &Batch) -> Result<()> {
        let losses = self.loss.of_each(&outputs.to_dtype(DType::F64)?, batch)?;
        match batch.weights() {
            Some(weights) => {
                let weights = weights.to_dtype(DType::F64)?;
                self.sum += (losses * &weights)?.sum_all()?.to_scalar::<f64>()?;
                self.weight += weights.sum_all()?.to_scalar::<f64>()?;
            }
            None => {
                self.sum += losses.sum_all()?.to_scalar::<f64>()?;
                self.weight += losses.elem_count() as f64;
            }
        }
        Ok(())
    }

    fn value(&mut self) -> f64 {
        self.sum / self.weight
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device::Cpu;
    use std::slice::from_ref;

    const BINARY: Loss = Loss::BinaryCrossEntropy;
    const CLASSES: Loss = Loss::CrossEntropy { smoothing: 0.0 };

    fn measure(name: Name, loss: Loss, batches: &[Batch], outputs: &[Tensor]) -> f64 {
        let mut metric = name.metric(loss, None);
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
            (Batch::new(size).with_target("y", target), outputs)
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
    fn weighted_losses_and_metrics_are_those_of_pytorch_and_scikit_learn() {
        const VECTORS: &str = include_str!("../tests/vectors/weighted.json");
        let vectors: serde_json::Value = serde_json::from_str(VECTORS).unwrap();
        let numbers = |value: &serde_json::Value| -> Vec<f32> {
            let numbers = value.as_array().unwrap().iter();
            numbers.map(|n| n.as_f64().unwrap() as f32).collect()
        };
        for (name, loss) in [
            ("cross-entropy", CLASSES),
            ("binary-cross-entropy", BINARY),
            ("mean-squared-error", Loss::MeanSquaredError),
            ("mean-absolute-error", Loss::MeanAbsoluteError),
        ] {
            let case = &vectors[name];
            let targets = numbers(&case["targets"]);
            let (samples, outputs) = (targets.len(), numbers(&case["outputs"]));
            let target = Tensor::new(targets, &Cpu).unwrap();
            let target = match loss {
                Loss::CrossEntropy { .. } => target.to_dtype(DType::U32).unwrap(),
                _ => target,
            };
            let weights = Tensor::new(numbers(&case["weights"]), &Cpu).unwrap();
            let batch = Batch::new(samples)
                .with_target("y", target)
                .with_weights(weights);
            let shape = (samples, outputs.len() / samples);
            let outputs = Tensor::new(outputs, &Cpu).unwrap().reshape(shape).unwrap();
            let outputs = candle_core::Var::from_tensor(&outputs).unwrap();
            let value = loss.of(&outputs, &batch).unwrap();
            let expected = case["loss"].as_f64().unwrap();
            let found = f64::from(value.to_scalar::<f32>().unwrap());
            assert!(
                (found - expected).abs() < 1e-6,
                "{name}: {found} {expected}"
            );
            let gradients = value.backward().unwrap();
            let gradient = gradients.get(&outputs).unwrap().flatten_all().unwrap();
            let gradient = gradient.to_vec1::<f32>().unwrap();
            for (found, expected) in gradient.iter().zip(numbers(&case["gradient"])) {
                assert!((found - expected).abs() < 1e-6, "{name}: {gradient:?}");
            }
            for (metric, expected) in case["metrics"].as_object().unwrap() {
                let measured = Name::read(metric, loss, shape.1).unwrap();
                let found = measure(
                    measured,
                    loss,
                    from_ref(&batch),
                    from_ref(outputs.as_tensor()),
                );
                let expected = expected.as_f64().unwrap();
                assert!(
                    (found - expected).abs() < 1e-6,
                    "{name}, {metric}: {found} {expected}"
                );
            }
        }
    }

    #[test]
    fn a_sample_of_weight_three_counts_as_three_samples() {
        let logits = [2.0, -1.0, 0.5, 0.5, -0.5, 3.0, -2.0];
        let targets = [1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0];
        let weights = [1, 3, 2, 1, 4, 0, 2];
        let repeat = |numbers: &[f32]| -> Vec<f32> {
            let times = numbers.iter().zip(weights);
            times.flat_map(|(n, times)| vec![*n; times]).collect()
        };
        let target = Tensor::new(&targets, &Cpu).unwrap();
        let weighted = Tensor::new(&weights.map(|weight| weight as f32), &Cpu).unwrap();
        let batch = Batch::new(7)
            .with_target("y", target)
            .with_weights(weighted);
        let outputs = Tensor::new(&logits, &Cpu).unwrap().reshape((7, 1)).unwrap();
        let (batches, repeated) = binary(&repeat(&logits), &repeat(&targets));
        for (name, loss) in [
            (Name::Accuracy, BINARY),
            (Name::Auc, BINARY),
            (Name::LogLoss, BINARY),
            (Name::F1, BINARY),
            (Name::Calibration, BINARY),
            (Name::Rmse, Loss::MeanSquaredError),
            (Name::Mae, Loss::MeanSquaredError),
        ] {
            let found = measure(name, loss, from_ref(&batch), from_ref(&outputs));
            let expected = measure(name, loss, &batches, &repeated);
            assert!(
                (found - expected).abs() < 1e-12,
                "{name}: {found} {expected}"
            );
        }
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
        let batches = [Batch::new(3).with_target("y", target)];
        let of = |name| measure(name, CLASSES, &batches, &outputs);
        assert!((of(Name::Accuracy) - 1.0 / 3.0).abs() < 1e-12);
        assert!((of(Name::Top(2)) - 1.0).abs() < 1e-12);
        assert!((of(Name::Top(1)) - of(Name::Accuracy)).abs() < 1e-12);
    }

    #[test]
    fn the_log_loss_of_classes_has_no_smoothing() {
        let outputs = [Tensor::new(&[[0f32, 3f32.ln()], [1.0, 1.0]], &Cpu).unwrap()];
        let target = Tensor::new(&[1u32, 0], &Cpu).unwrap();
        let batches = [Batch::new(2).with_target("y", target)];
        let smooth = Loss::CrossEntropy { smoothing: 0.2 };
        let expected = ((4f64 / 3.0).ln() + 2f64.ln()) / 2.0;
        for loss in [CLASSES, smooth] {
            let found = measure(Name::LogLoss, loss, &batches, &outputs);
            assert!((found - expected).abs() < 1e-7, "{found} {expected}");
        }
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
        let batches = [Batch::new(1).with_target("y", target)];
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
            Batch::new(target.len()).with_target("y", Tensor::new(target, &Cpu).unwrap())
        };
        let batches = [batch(&[0.0, 2.0]), batch(&[2.0])];
        let loss = Loss::MeanSquaredError;
        let rmse = measure(Name::Rmse, loss, &batches, &outputs);
        assert!((rmse - (10.0f64 / 3.0).sqrt()).abs() < 1e-12);
        // A target of several numbers counts once for each.
        let several = [Tensor::new(&[[1f32, 2.0], [3.0, 4.0]], &Cpu).unwrap()];
        let target = Tensor::new(&[[1f32, 2.0], [3.0, 8.0]], &Cpu).unwrap();
        let batch = [Batch::new(2).with_target("y", target)];
        assert!((measure(Name::Rmse, loss, &batch, &several) - 2.0).abs() < 1e-12);
        let mae = measure(Name::Mae, loss, &batches, &outputs);
        assert!((mae - 4.0 / 3.0).abs() < 1e-12);
        // A target that was changed is measured in its own unit.
        let scale = Scale {
            mean: 100.0,
            deviation: 10.0,
        };
        let mut metric = Name::Rmse.metric(loss, Some(scale));
        metric.add(&outputs[0], &batches[0]).unwrap();
        assert!((metric.value() - 10.0 * 0.5f64.sqrt()).abs() < 1e-12);
    }
}
