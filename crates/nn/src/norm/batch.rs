//! Normalisation of each channel over the batch.

use candle_core::{DType, Result, Tensor, Var, bail};
use candle_nn::{Init, VarBuilder};
use pulp::{Arch, Simd};

use super::joint::{Joint, JointStatistics};
use super::moments;
use super::normalize::{Normalize, Origin};
use crate::activation::Activation;
use crate::operation::apply_layer;
use crate::replicas::share;
use crate::simd::Element;
use crate::storage::{check_float, computed_here, elements, with_type};

/// If the `VarBuilder` of a [`BatchNorm`] has a tensor with this name, the layer never changes its running statistics.
pub const FROZEN_STATISTICS: &str = "frozen_statistics";

/// The settings of a [`BatchNorm`]. The default is PyTorch's.
#[derive(Clone, Copy, Debug)]
pub struct BatchNormConfig {
    /// Added to the variance.
    pub eps: f64,
    /// The weight of a batch's statistics in the new running statistics.
    pub momentum: f64,
    /// Applied to the result, in the same operation.
    pub activation: Activation,
}

impl Default for BatchNormConfig {
    fn default() -> Self {
        Self {
            eps: 1e-5,
            momentum: 0.1,
            activation: Activation::Identity,
        }
    }
}

/// Batch normalisation of inputs of shape `[samples, channels, ...]`: of pictures (`BatchNorm2d` in PyTorch), or of any
/// others (`BatchNorm1d`).
#[derive(Clone, Debug)]
pub struct BatchNorm {
    weight: Tensor,
    bias: Tensor,
    running: RunningStatistics,
    /// The running mean and variance, as the `VarBuilder` returned them.
    variables: [Tensor; 2],
    /// True if the running statistics stay as they are.
    is_frozen: bool,
    config: BatchNormConfig,
}

/// The mean and the variance of each channel over many batches, for evaluation.
#[derive(Clone, Debug)]
pub struct RunningStatistics {
    /// Of shape `[channels]`.
    pub mean: Tensor,
    /// Of shape `[channels]`, unbiased.
    pub variance: Tensor,
}

impl BatchNorm {
    /// Asks `vars` for `weight`, `bias`, `running_mean` and `running_var`, initially 1, 0, 0 and 1.
    ///
    /// The running statistics stay as they are if `vars` has [`FROZEN_STATISTICS`], or returns tensors that are not
    /// variables.
    ///
    /// # Errors
    /// Those of `vars`.
    pub fn new(channels: usize, config: BatchNormConfig, vars: VarBuilder) -> Result<Self> {
        let var = |name, value| vars.get_with_hints(channels, name, Init::Const(value));
        let variables = [var("running_mean", 0.0)?, var("running_var", 1.0)?];
        Ok(Self {
            weight: var("weight", 1.0)?,
            bias: var("bias", 0.0)?,
            running: RunningStatistics {
                mean: variables[0].detach(),
                variance: variables[1].detach(),
            },
            is_frozen: vars.contains_tensor(FROZEN_STATISTICS)
                || !variables.iter().any(Tensor::is_variable),
            variables,
            config,
        })
    }

    /// In training, returns [`Self::train`] of the inputs, and sets the variables of the running statistics. Otherwise,
    /// returns [`Self::evaluate`]. There are two cases in which it returns [`Self::evaluate`] in training too. If the
    /// running statistics are frozen, it does so as Keras does: the layers behind this one are trained with the same
    /// inputs that they get in evaluation. A batch with one element for each channel has no variance.
    ///
    /// # Errors
    /// Those of [`Self::train`] and [`Self::evaluate`].
    pub fn forward(&self, inputs: &Tensor, training: bool) -> Result<Tensor> {
        let size = self.check(inputs)?;
        let has_no_variance = inputs.dim(0)? * size == 1 && share().is_none();
        if !training || self.is_frozen || has_no_variance {
            return self.evaluate(inputs);
        }
        let (normal, statistics) = self.train(inputs)?;
        let values = [statistics.mean, statistics.variance];
        for (variable, value) in self.variables.iter().zip(values) {
            if variable.is_variable() {
                Var::from_tensor(variable)?.set(&value)?;
            }
        }
        Ok(normal)
    }

    /// Normalises by the statistics of the batch, or, within [`synchronised`](crate::synchronised), by those of the
    /// batches of all replicas. Returns the result and the new running statistics. This layer does not store the new
    /// statistics: the caller sets `running_mean` and `running_var`.
    ///
    /// # Errors
    /// If the inputs do not have this layer's channels, if a channel has fewer than two elements (on all replicas
    /// together, within [`synchronised`](crate::synchronised)), candle's, or those of the replicas.
    pub fn train(&self, inputs: &Tensor) -> Result<(Tensor, RunningStatistics)> {
        let size = self.check(inputs)?;
        if self.channels() == 0 {
            return Ok((inputs.clone(), self.running.clone()));
        }
        let count = inputs.dim(0)? * size;
        if count < 1 || (count < 2 && share().is_none()) {
            bail!(
                "a batch of shape {:?} has no variance; a channel needs at least two elements",
                inputs.shape()
            );
        }
        if !computed_here(&[inputs, &self.weight, &self.bias]) {
            return self.train_elsewhere(inputs, size);
        }
        let inputs = inputs.contiguous()?;
        let (mut mean, mut variance) = with_type!(inputs.dtype(), T => {
            statistics::<T>(elements(&inputs).slice()?, self.channels(), size)
        });
        let (mut elements, mut origin) = (count as f64, Origin::Batch);
        if let Some(share) = share() {
            let joint;
            JointStatistics {
                mean,
                variance,
                joint,
            } = Joint::statistics(share, &mean, &variance, count)?;
            elements = joint.elements();
            origin = Origin::Replicas(joint);
        }
        let running = |old: &Tensor, new: &[f64], factor: f64| {
            let new = Tensor::from_slice(new, old.shape(), old.device())?;
            self.running(old, &new, factor)
        };
        let statistics = RunningStatistics {
            mean: running(&self.running.mean, &mean, 1.0)?,
            variance: running(&self.running.variance, &variance, unbiased(elements))?,
        };
        let layer = self.normalize(size, (mean, &variance), origin);
        let result = apply_layer(layer, &inputs, &self.weight, &self.bias)?;
        Ok((result, statistics))
    }

    /// Normalises by the running statistics.
    ///
    /// # Errors
    /// If the inputs do not have this layer's channels, or candle's.
    pub fn evaluate(&self, inputs: &Tensor) -> Result<Tensor> {
        let size = self.check(inputs)?;
        if inputs.elem_count() == 0 {
            return Ok(inputs.clone());
        }
        let RunningStatistics { mean, variance } = &self.running;
        if !computed_here(&[inputs, &self.weight, &self.bias]) {
            let rows = inputs.reshape(((), self.channels(), size))?;
            return self.elsewhere(&rows, mean, variance, inputs);
        }
        let numbers = |tensor: &Tensor| tensor.to_dtype(DType::F64)?.to_vec1::<f64>();
        let statistics = (numbers(mean)?, &*numbers(variance)?);
        let layer = self.normalize(size, statistics, Origin::Earlier);
        apply_layer(layer, inputs, &self.weight, &self.bias)
    }

    fn normalize(&self, size: usize, statistics: (Vec<f64>, &[f64]), origin: Origin) -> Normalize {
        let BatchNormConfig {
            eps, activation, ..
        } = self.config;
        Normalize::new(size, statistics, eps, origin, activation)
    }

    /// Returns a running statistic after a batch with the statistic `new · factor`.
    fn running(&self, old: &Tensor, new: &Tensor, factor: f64) -> Result<Tensor> {
        let momentum = self.config.momentum;
        // In the statistics' type: that of the inputs may have fewer digits.
        let new = new
            .detach()
            .to_dtype(old.dtype())?
            .to_device(old.device())?;
        let new = (new * (momentum * factor))?;
        (old.detach() * (1.0 - momentum))? + new
    }

    fn channels(&self) -> usize {
        self.weight.elem_count()
    }

    /// Returns the number of elements that a sample has for each channel.
    fn check(&self, inputs: &Tensor) -> Result<usize> {
        check_float(inputs)?;
        if inputs.rank() < 2 || inputs.dims()[1] != self.channels() {
            bail!(
                "inputs of shape {:?} do not fit {} channels; inputs are [samples, channels, ...]",
                inputs.shape(),
                self.channels()
            );
        }
        Ok(inputs.dims()[2..].iter().product())
    }

    /// The training pass with candle's own operations.
    fn train_elsewhere(&self, inputs: &Tensor, size: usize) -> Result<(Tensor, RunningStatistics)> {
        let rows = inputs.reshape(((), self.channels(), size))?;
        let count = rows.dim(0)? * size;
        // In two steps: candle computes each sum in one block of threads, so one step would use few of them.
        let mean = rows.mean(2)?.mean(0)?;
        let centered = rows.broadcast_sub(&of_channels(&mean, &rows)?)?;
        let variance = centered.sqr()?.mean(2)?.mean(0)?;
        let (mean, variance, elements) = match share() {
            Some(share) => Joint::differentiable(share, &mean, &variance, count)?,
            None => (mean, variance, count as f64),
        };
        let factor = unbiased(elements);
        let statistics = RunningStatistics {
            mean: self.running(&self.running.mean, &mean, 1.0)?,
            variance: self.running(&self.running.variance, &variance, factor)?,
        };
        Ok((self.elsewhere(&rows, &mean, &variance, inputs)?, statistics))
    }

    /// Normalises by the given statistics, with candle's own operations.
    fn elsewhere(
        &self,
        rows: &Tensor,
        mean: &Tensor,
        variance: &Tensor,
        like: &Tensor,
    ) -> Result<Tensor> {
        let channel = |tensor: &Tensor| {
            let there = tensor.to_dtype(like.dtype())?.to_device(like.device())?;
            of_channels(&there, rows)
        };
        let deviation = (channel(variance)? + self.config.eps)?.sqrt()?;
        let normal = rows
            .broadcast_sub(&channel(mean)?)?
            .broadcast_div(&deviation)?;
        let result = normal.broadcast_mul(&channel(&self.weight)?)?;
        let result = result.broadcast_add(&channel(&self.bias)?)?;
        self.config
            .activation
            .elsewhere(&result.reshape(like.shape())?)
    }
}

/// Returns one number for each channel, repeated for each sample of `rows`, in shape `[samples, channels, 1]`. The
/// backward pass then sums in two steps, which use more threads of a GPU than a single step.
fn of_channels(numbers: &Tensor, rows: &Tensor) -> Result<Tensor> {
    let (samples, channels, _) = rows.dims3()?;
    let numbers = numbers.reshape((1, channels, 1))?;
    numbers.broadcast_as((samples, channels, 1))
}

/// Returns the factor from the biased to the unbiased variance of a number of elements.
fn unbiased(count: f64) -> f64 {
    count / (count - 1.0)
}

/// Returns the [`moments`] of the values, computed with the instructions of this CPU.
#[pulp::with_simd(moments_of = Arch::new())]
#[inline(always)]
fn moments_of_simd<S: Simd, T: Element>(_: S, values: &[T]) -> (f64, f64) {
    moments(values)
}

/// Returns the mean and the biased variance of each channel.
fn statistics<T: Element>(inputs: &[T], channels: usize, size: usize) -> (Vec<f64>, Vec<f64>) {
    let mut means = vec![0.0; channels];
    let mut squares = vec![0.0; channels];
    let mut counts = 0.0;
    let part = size as f64;
    for sample in inputs.chunks_exact(channels * size) {
        let total = counts + part;
        let kept = means.iter_mut().zip(&mut squares);
        for (part_of_sample, (mean, square)) in sample.chunks_exact(size).zip(kept) {
            let (new, deviations) = moments_of(part_of_sample);
            // Joins the statistics of two sets (Chan, Golub and LeVeque, "Updating formulae", 1979).
            let apart = new - *mean;
            *mean += apart * part / total;
            *square += deviations + apart * apart * counts * part / total;
        }
        counts = total;
    }
    squares.iter_mut().for_each(|square| *square /= counts);
    (means, squares)
}
