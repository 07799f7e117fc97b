//! Losses.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp2, DType, Layout, Result, Shape, Tensor, WithDType, bail};

use crate::backward::keep_values;
use crate::storage::{check_float, computed_here, slice, with_slices, with_type};

/// Returns the mean over the batch of `-log(softmax(logits)[target])`, a scalar: logits of shape
/// `[samples, classes]`, targets as `u32` of shape `[samples]`.
///
/// # Errors
/// If the shapes or types do not fit, if a target is not below `classes` (on the CPU), or candle's.
pub fn cross_entropy(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    cross_entropy_smooth(logits, targets, 0.0)
}

/// Returns [`cross_entropy`] with smoothed labels: a part `smoothing` of each target is spread over all classes.
///
/// # Errors
/// Those of [`cross_entropy`], or if `smoothing` is not from 0 to 1.
pub fn cross_entropy_smooth(logits: &Tensor, targets: &Tensor, smoothing: f64) -> Result<Tensor> {
    if !(0.0..=1.0).contains(&smoothing) {
        bail!("label smoothing is from 0 to 1, not {smoothing}");
    }
    check_float(logits)?;
    let (samples, classes) = logits.dims2()?;
    if targets.dims() != [samples] || targets.dtype() != DType::U32 || logits.elem_count() == 0 {
        bail!(
            "targets of shape {:?} and type {:?} do not fit logits of shape {:?}; \
             logits [samples, classes] take u32 targets [samples], at least one",
            targets.shape(),
            targets.dtype(),
            logits.shape()
        );
    }
    if !computed_here(&[logits]) || !targets.device().is_cpu() {
        let nll = candle_nn::loss::cross_entropy(logits, targets)?;
        if smoothing == 0.0 {
            return Ok(nll);
        }
        let spread = candle_nn::ops::log_softmax(logits, 1)?.mean_all()?;
        return (nll * (1.0 - smoothing))? - (spread * smoothing)?;
    }
    let op = CrossEntropy { classes, smoothing };
    logits.contiguous()?.apply_op2(&targets.contiguous()?, op)
}

/// The mean cross entropy of contiguous logits with contiguous targets, computed in `f64`.
struct CrossEntropy {
    classes: usize,
    smoothing: f64,
}

impl CrossEntropy {
    fn loss<T: WithDType>(&self, logits: &[T], targets: &[u32]) -> Result<T> {
        let mut sum = 0.0;
        for (row, target) in logits.chunks_exact(self.classes).zip(targets) {
            let Some(of_target) = row.get(*target as usize) else {
                let classes = self.classes;
                bail!("there is no class {target}; there are {classes}, from 0");
            };
            let (largest, exponentials) = exponentials(row);
            let spread = self.smoothing / self.classes as f64;
            let mut target = of_target.to_f64() * (1.0 - self.smoothing);
            if spread > 0.0 {
                target += row.iter().map(|x| x.to_f64()).sum::<f64>() * spread;
            }
            sum += exponentials.ln() + largest - target;
        }
        Ok(T::from_f64(sum / targets.len() as f64))
    }

    /// Returns `(softmax - smoothed target) / samples`, times the gradient of the loss.
    fn gradient<T: WithDType>(
        &self,
        logits: &Tensor,
        targets: &Tensor,
        of_loss: &Tensor,
    ) -> Result<Vec<T>> {
        let of_loss = of_loss.to_scalar::<T>()?.to_f64();
        let gradient = |logits: &[T], targets: &[u32]| {
            let scale = of_loss / targets.len() as f64;
            let mut gradient = Vec::with_capacity(logits.len());
            for (row, target) in logits.chunks_exact(self.classes).zip(targets) {
                let (largest, sum) = exponentials(row);
                for (class, x) in row.iter().enumerate() {
                    let at_target = f64::from(class == *target as usize);
                    let at_target =
                        at_target * (1.0 - self.smoothing) + self.smoothing / self.classes as f64;
                    let probability = (x.to_f64() - largest).exp() / sum;
                    gradient.push(T::from_f64((probability - at_target) * scale));
                }
            }
            gradient
        };
        with_slices(logits, targets, gradient)
    }
}

/// Returns the largest value of a row, and the sum of `exp(x - largest)` over the row.
fn exponentials<T: WithDType>(row: &[T]) -> (f64, f64) {
    let numbers = || row.iter().map(|x| x.to_f64());
    let largest = numbers().fold(f64::NEG_INFINITY, f64::max);
    (largest, numbers().map(|x| (x - largest).exp()).sum())
}

impl CustomOp2 for CrossEntropy {
    fn name(&self) -> &'static str {
        "cross-entropy"
    }

    fn cpu_fwd(
        &self,
        logits: &CpuStorage,
        logits_layout: &Layout,
        targets: &CpuStorage,
        targets_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let targets = slice(targets, targets_layout)?;
        with_type!(logits.dtype(), T => {
            let loss = self.loss::<T>(slice(logits, logits_layout)?, targets)?;
            Ok((T::to_cpu_storage_owned(vec![loss]), ().into()))
        })
    }

    fn bwd(
        &self,
        logits: &Tensor,
        targets: &Tensor,
        loss: &Tensor,
        of_loss: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let of_logits = with_type!(logits.dtype(), T => {
            keep_values(loss, logits, || self.gradient::<T>(logits, targets, of_loss))
        })?;
        Ok((of_logits, None))
    }
}

/// Returns the mean of `-t log σ(x) - (1 - t) log(1 - σ(x))` over all elements, a scalar: logits `x` and targets `t` of
/// the same shape and type.
///
/// # Errors
/// If the shapes or types differ, if the numbers are integers, or candle's.
pub fn binary_cross_entropy(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    Kind::BinaryCrossEntropy.apply(logits, targets)
}

/// Returns `-t log σ(x) - (1 - t) log(1 - σ(x))` of each element, for logits `x` and targets `t` of the same shape and
/// type. It is computed as `max(x, 0) - x t + log(1 + exp(-|x|))`, which does not overflow.
///
/// # Errors
/// candle's, among them those of shapes or types that differ.
pub fn binary_cross_entropy_of_each(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    let small = (logits.abs()?.neg()?.exp()? + 1.0)?.log()?;
    (logits.relu()? - (logits * targets)?)? + small
}

/// Returns the mean of `(x - t)²` over all elements, a scalar.
///
/// # Errors
/// If the shapes or types differ, if the numbers are integers, or candle's.
pub fn mean_squared_error(outputs: &Tensor, targets: &Tensor) -> Result<Tensor> {
    Kind::Squared.apply(outputs, targets)
}

/// Returns the mean of `|x - t|` over all elements, a scalar. Where both are equal the gradient is 0.
///
/// # Errors
/// If the shapes or types differ, if the numbers are integers, or candle's.
pub fn mean_absolute_error(outputs: &Tensor, targets: &Tensor) -> Result<Tensor> {
    Kind::Absolute.apply(outputs, targets)
}

/// A loss that is the mean of a function of each output and its target.
#[derive(Clone, Copy)]
enum Kind {
    BinaryCrossEntropy,
    Squared,
    Absolute,
}

impl Kind {
    fn apply(self, outputs: &Tensor, targets: &Tensor) -> Result<Tensor> {
        check_float(outputs)?;
        if outputs.dims() != targets.dims()
            || outputs.dtype() != targets.dtype()
            || outputs.elem_count() == 0
        {
            bail!(
                "targets of shape {:?} and type {:?} do not fit outputs of shape {:?} and type {:?}; \
                 both have the same shape and type, and at least one element",
                targets.shape(),
                targets.dtype(),
                outputs.shape(),
                outputs.dtype()
            );
        }
        if computed_here(&[outputs, targets]) {
            return outputs
                .contiguous()?
                .apply_op2(&targets.contiguous()?, self);
        }
        let of_each = match self {
            Self::Squared => (outputs - targets)?.sqr()?,
            // Not `abs`: its gradient in candle is 1 where both are equal, and that of `sign` is 0.
            Self::Absolute => {
                let apart = (outputs - targets)?;
                (&apart * apart.sign()?)?
            }
            Self::BinaryCrossEntropy => binary_cross_entropy_of_each(outputs, targets)?,
        };
        of_each.mean_all()
    }

    fn value(self, x: f64, t: f64) -> f64 {
        match self {
            Self::BinaryCrossEntropy => x.max(0.0) - x * t + (-x.abs()).exp().ln_1p(),
            Self::Squared => (x - t) * (x - t),
            Self::Absolute => (x - t).abs(),
        }
    }

    /// Returns the derivatives with respect to the output and to the target.
    fn slopes(self, x: f64, t: f64) -> (f64, f64) {
        match self {
            Self::BinaryCrossEntropy => (1.0 / (1.0 + (-x).exp()) - t, -x),
            Self::Squared => (2.0 * (x - t), 2.0 * (t - x)),
            Self::Absolute if x == t => (0.0, 0.0),
            Self::Absolute => ((x - t).signum(), (t - x).signum()),
        }
    }
}

impl CustomOp2 for Kind {
    fn name(&self) -> &'static str {
        "mean-loss"
    }

    fn cpu_fwd(
        &self,
        outputs: &CpuStorage,
        outputs_layout: &Layout,
        targets: &CpuStorage,
        targets_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        with_type!(outputs.dtype(), T => {
            let outputs = slice::<T>(outputs, outputs_layout)?;
            let targets = slice::<T>(targets, targets_layout)?;
            let pairs = outputs.iter().zip(targets);
            let sum: f64 = pairs.map(|(x, t)| self.value(x.to_f64(), t.to_f64())).sum();
            let mean = T::from_f64(sum / outputs.len() as f64);
            Ok((T::to_cpu_storage_owned(vec![mean]), ().into()))
        })
    }

    fn bwd(
        &self,
        outputs: &Tensor,
        targets: &Tensor,
        loss: &Tensor,
        of_loss: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        with_type!(outputs.dtype(), T => {
            let scale = of_loss.to_scalar::<T>()?.to_f64() / outputs.elem_count() as f64;
            let gradient = |of: fn((f64, f64)) -> f64| {
                with_slices(outputs, targets, |outputs: &[T], targets: &[T]| {
                    let pairs = outputs.iter().zip(targets);
                    let slopes = pairs.map(|(x, t)| self.slopes(x.to_f64(), t.to_f64()));
                    slopes.map(|slopes| T::from_f64(of(slopes) * scale)).collect::<Vec<T>>()
                })
            };
            Ok((
                keep_values(loss, outputs, || gradient(|slopes| slopes.0))?,
                keep_values(loss, targets, || gradient(|slopes| slopes.1))?,
            ))
        })
    }
}
