//! Loss functions.

use candle_core::{D, Result, Tensor, bail};

use crate::input::Batch;

const NO_LOSS: &str = "the job leaves the loss to the model, which has none; let `objective.loss` name one, or implement \
                       `Model::loss`";

/// A loss function: the mean of the losses of a batch's samples. If the batch has weights, each loss is first
/// multiplied by the weight of its sample.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Loss {
    /// `-log(softmax(logits)[class])`. The model returns a logit for each class. With smoothing `s`, the target gives
    /// `1 - s` to the class, and divides `s` equally among all classes (Szegedy et al., "Rethinking the Inception
    /// Architecture", CVPR 2016, section 7).
    CrossEntropy {
        /// The smoothing, at least 0 and below 1.
        smoothing: f32,
    },
    /// `-log(sigmoid(logit))` where the target is 1, `-log(1 - sigmoid(logit))` where it is 0. The model returns one
    /// logit.
    BinaryCrossEntropy,
    /// `(output - target)^2`.
    MeanSquaredError,
    /// `|output - target|`.
    MeanAbsoluteError,
    /// The loss of the model's own, `Model::loss`.
    #[default]
    Model,
}

impl Loss {
    /// Returns the mean over the samples of the batch, a scalar.
    ///
    /// # Errors
    /// If outputs and target do not fit, or candle's.
    pub fn of(self, outputs: &Tensor, batch: &Batch) -> Result<Tensor> {
        if let Some(weights) = batch.weights() {
            return (self.of_each(outputs, batch)? * weights)?.mean_all();
        }
        let target = &self.target(outputs, batch)?;
        match self {
            Self::CrossEntropy { smoothing } => {
                nn::cross_entropy_smooth(outputs, target, smoothing.into())
            }
            Self::BinaryCrossEntropy => nn::binary_cross_entropy(&like(outputs, target)?, target),
            Self::MeanSquaredError => nn::mean_squared_error(&like(outputs, target)?, target),
            Self::MeanAbsoluteError => nn::mean_absolute_error(&like(outputs, target)?, target),
            Self::Model => bail!("{NO_LOSS}"),
        }
    }

    /// Returns the loss of each sample, of shape `[samples]`.
    pub(super) fn of_each(self, outputs: &Tensor, batch: &Batch) -> Result<Tensor> {
        let target = &self.target(outputs, batch)?;
        match self {
            Self::CrossEntropy { smoothing } => {
                let logs = candle_nn::ops::log_softmax(outputs, D::Minus1)?;
                let own = logs.gather(&target.unsqueeze(1)?, 1)?.squeeze(1)?;
                let all = logs.mean(1)?;
                let smoothing = f64::from(smoothing);
                (own * (smoothing - 1.0))? - (all * smoothing)?
            }
            Self::BinaryCrossEntropy => {
                let outputs = like(outputs, target)?;
                per_sample(&nn::binary_cross_entropy_of_each(&outputs, target)?)
            }
            Self::MeanSquaredError => per_sample(&(like(outputs, target)? - target)?.sqr()?),
            Self::MeanAbsoluteError => {
                let apart = (like(outputs, target)? - target)?;
                // Not `abs`: its gradient in candle is 1 where both are equal, and that of `sign` is 0.
                per_sample(&(&apart * apart.sign()?)?)
            }
            Self::Model => bail!("{NO_LOSS}"),
        }
    }

    /// Returns the loss without label smoothing, which is for training alone.
    pub(crate) fn plain(self) -> Self {
        match self {
            Self::CrossEntropy { .. } => Self::CrossEntropy { smoothing: 0.0 },
            loss => loss,
        }
    }

    /// Returns the batch's target in the type that the loss takes.
    fn target(self, outputs: &Tensor, batch: &Batch) -> Result<Tensor> {
        match self {
            Self::CrossEntropy { .. } => Ok(batch.target()?.clone()),
            _ => batch.target()?.to_dtype(outputs.dtype()),
        }
    }
}

/// Returns outputs in the shape of the target: `[samples, 1]` stands for `[samples]`.
pub(crate) fn like(outputs: &Tensor, target: &Tensor) -> Result<Tensor> {
    if outputs.elem_count() != target.elem_count() || outputs.dim(0)? != target.dim(0)? {
        bail!(
            "the model returns outputs of shape {:?} for targets of shape {:?}",
            outputs.shape(),
            target.shape()
        );
    }
    outputs.reshape(target.shape())
}

fn per_sample(losses: &Tensor) -> Result<Tensor> {
    match losses.rank() {
        1 => Ok(losses.clone()),
        _ => losses.flatten_from(1)?.mean(1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{Device::Cpu, Var};

    const LOSSES: [Loss; 5] = [
        Loss::CrossEntropy { smoothing: 0.0 },
        Loss::CrossEntropy { smoothing: 0.1 },
        Loss::BinaryCrossEntropy,
        Loss::MeanSquaredError,
        Loss::MeanAbsoluteError,
    ];

    fn batch(loss: Loss) -> (Var, Batch) {
        let (outputs, target) = match loss {
            Loss::CrossEntropy { .. } => (
                Tensor::new(&[[0.5f32, -1.0, 2.0], [0.1, 0.2, 0.3]], &Cpu),
                Tensor::new(&[2u32, 0], &Cpu),
            ),
            // The second output equals its target.
            Loss::MeanAbsoluteError => (
                Tensor::new(&[[0.5f32], [0.0]], &Cpu),
                Tensor::new(&[1f32, 0.0], &Cpu),
            ),
            _ => (
                Tensor::new(&[[0.5f32], [-1.5]], &Cpu),
                Tensor::new(&[1f32, 0.0], &Cpu),
            ),
        };
        let batch = Batch::new(2).with_target("y", target.unwrap());
        (Var::from_tensor(&outputs.unwrap()).unwrap(), batch)
    }

    /// Weights of one for each sample change neither the loss nor its gradient, and a weight of two counts a sample
    /// twice.
    #[test]
    fn weights_of_samples_scale_their_losses() {
        for loss in LOSSES {
            let compute = |weights: Option<[f32; 2]>| {
                let (outputs, batch) = batch(loss);
                let batch = match weights {
                    Some(weights) => batch.with_weights(Tensor::new(&weights, &Cpu).unwrap()),
                    None => batch,
                };
                let value = loss.of(&outputs, &batch).unwrap();
                let gradients = value.backward().unwrap();
                let gradient = gradients.get(&outputs).unwrap().flatten_all().unwrap();
                (
                    value.to_scalar::<f32>().unwrap(),
                    gradient.to_vec1::<f32>().unwrap(),
                )
            };
            let (plain, gradient) = compute(None);
            let (ones, same) = compute(Some([1.0, 1.0]));
            assert!((plain - ones).abs() < 1e-6, "{loss:?}: {plain} {ones}");
            for (a, b) in gradient.iter().zip(&same) {
                assert!((a - b).abs() < 1e-6, "{loss:?}: {gradient:?} {same:?}");
            }
            let ((first, _), (second, _)) = (compute(Some([1.0, 0.0])), compute(Some([0.0, 1.0])));
            let (twice, _) = compute(Some([2.0, 1.0]));
            assert!((first + second - plain).abs() < 1e-6, "{loss:?}");
            assert!((2.0 * first + second - twice).abs() < 1e-6, "{loss:?}");
        }
    }
}
