//! Normalisation of each channel over the batch.

use candle_core::{DType, Result, Tensor, Var, bail};
use candle_nn::{Init, VarBuilder};
use pulp::{Arch, Simd};

use super::moments;
use crate::activation::{Activation, Limits};
use crate::operation::{Gradients, Layer, Pass, apply_layer};
use crate::simd::{BLOCK, Element, extend_with, extend_with_pairs};
use crate::storage::{check_float, computed_here, elements, with_type};

/// How a [`BatchNorm`] computes. The default is PyTorch's.
#[derive(Clone, Copy, Debug)]
pub struct BatchNormConfig {
    /// Added to the variance.
    pub eps: f64,
    /// The part of a batch in the new running statistics.
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

/// Batch normalisation of inputs of shape `[samples, channels, ...]`: of pictures (`BatchNorm2d` in PyTorch) as of
/// anything else (`BatchNorm1d`).
#[derive(Clone, Debug)]
pub struct BatchNorm {
    weight: Tensor,
    bias: Tensor,
    running: RunningStatistics,
    /// The variables of the mean and the variance, as the model was given them.
    variables: [Tensor; 2],
    config: BatchNormConfig,
}

/// The mean and the variance of each channel over many batches, by which a model is evaluated.
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
            variables,
            config,
        })
    }

    /// In training, returns [`Self::train`] of the inputs and sets the variables of the running statistics. Otherwise,
    /// returns [`Self::evaluate`].
    ///
    /// # Errors
    /// Those of [`Self::train`] and [`Self::evaluate`].
    pub fn forward(&self, inputs: &Tensor, training: bool) -> Result<Tensor> {
        if !training {
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

    /// Normalises by the statistics of the batch. Returns the result and the new running statistics. This layer does
    /// not store these: the caller sets `running_mean` and `running_var`.
    ///
    /// # Errors
    /// If the inputs do not have this layer's channels, if a channel has fewer than two elements, or candle's.
    pub fn train(&self, inputs: &Tensor) -> Result<(Tensor, RunningStatistics)> {
        let size = self.check(inputs)?;
        let count = inputs.dim(0)? * size;
        if self.channels() == 0 {
            return Ok((inputs.clone(), self.running.clone()));
        }
        if count < 2 {
            bail!(
                "a batch of shape {:?} has no variance; a channel needs at least two elements",
                inputs.shape()
            );
        }
        if !computed_here(&[inputs, &self.weight, &self.bias]) {
            return self.train_elsewhere(inputs, size);
        }
        let inputs = inputs.contiguous()?;
        let (mean, variance) = with_type!(inputs.dtype(), T => {
            statistics::<T>(elements(&inputs).slice()?, self.channels(), size)
        });
        let running = |old: &Tensor, new: &[f64], factor: f64| {
            let new = Tensor::from_slice(new, old.shape(), old.device())?;
            self.running(old, &new, factor)
        };
        let statistics = RunningStatistics {
            mean: running(&self.running.mean, &mean, 1.0)?,
            variance: running(&self.running.variance, &variance, unbiased(count))?,
        };
        let layer = self.normalize(size, mean, &variance, true);
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
        let layer = self.normalize(size, numbers(mean)?, &numbers(variance)?, false);
        apply_layer(layer, inputs, &self.weight, &self.bias)
    }

    fn normalize(
        &self,
        size: usize,
        mean: Vec<f64>,
        variance: &[f64],
        of_batch: bool,
    ) -> Normalize {
        let scale = |variance: &f64| 1.0 / (variance + self.config.eps).sqrt();
        Normalize {
            size,
            mean,
            scale: variance.iter().map(scale).collect(),
            of_batch,
            activation: self.config.activation,
        }
    }

    /// Returns a running statistic after a batch with the statistic `new`, times `factor`.
    fn running(&self, old: &Tensor, new: &Tensor, factor: f64) -> Result<Tensor> {
        let momentum = self.config.momentum;
        // In the statistics' type: that of the inputs may have fewer digits.
        let new = (new.detach().to_dtype(old.dtype())? * (momentum * factor))?;
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
        let mean = rows.mean((0, 2))?;
        let centered = rows.broadcast_sub(&mean.reshape((1, (), 1))?)?;
        let variance = centered.sqr()?.mean((0, 2))?;
        let statistics = RunningStatistics {
            mean: self.running(&self.running.mean, &mean, 1.0)?,
            variance: self.running(&self.running.variance, &variance, unbiased(count))?,
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
        let channel = |tensor: &Tensor| tensor.to_dtype(like.dtype())?.reshape((1, (), 1));
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

/// Returns the factor from the biased to the unbiased variance of a number of elements.
fn unbiased(count: usize) -> f64 {
    count as f64 / (count - 1) as f64
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

/// The normalisation of a channel: an element x becomes `x · factor + summand`, within limits.
#[derive(Clone, Copy)]
struct ChannelMap<T> {
    factor: T,
    summand: T,
    /// The mean of the channel.
    mean: T,
    limits: Limits<T>,
}

impl<T: Element> ChannelMap<T> {
    /// Returns the gradient of `x · factor + summand`, given the gradient of the result.
    #[inline(always)]
    fn gradient_of_sum(self, x: T, gradient: T) -> T {
        self.limits
            .gradient(x * self.factor + self.summand, gradient)
    }
}

/// Appends the normalised elements of a channel.
#[pulp::with_simd(extend_with_map = Arch::new())]
#[inline(always)]
fn extend_with_map_simd<S: Simd, T: Element>(
    _: S,
    result: &mut Vec<T>,
    values: &[T],
    map: ChannelMap<T>,
) {
    extend_with(result, values, |x| {
        map.limits.apply(x * map.factor + map.summand)
    });
}

/// Returns two sums over the elements of a channel: of the gradients of `x · factor + summand`, and of the products of these
/// gradients with `x - mean`.
#[pulp::with_simd(sums_of_gradients = Arch::new())]
#[inline(always)]
fn sums_of_gradients_simd<S: Simd, T: Element>(
    _: S,
    values: &[T],
    gradient: &[T],
    map: ChannelMap<T>,
) -> (f64, f64) {
    let (mut of_bias, mut of_weight) = ([T::zero(); BLOCK], [T::zero(); BLOCK]);
    let (chunks, rest) = values.as_chunks::<BLOCK>();
    let (of_chunks, of_rest) = gradient.as_chunks::<BLOCK>();
    for (x, g) in chunks.iter().zip(of_chunks) {
        for i in 0..BLOCK {
            let g = map.gradient_of_sum(x[i], g[i]);
            of_bias[i] += g;
            of_weight[i] += g * (x[i] - map.mean);
        }
    }
    for (i, (x, g)) in rest.iter().zip(of_rest).enumerate() {
        let g = map.gradient_of_sum(*x, *g);
        of_bias[i] += g;
        of_weight[i] += g * (*x - map.mean);
    }
    let total = |sums: [T; BLOCK]| sums.iter().fold(0.0, |sum, x| sum + x.to_f64());
    (total(of_bias), total(of_weight))
}

/// Appends the gradients of a channel's elements. With the statistics of the batch, `mean_gradient` is the mean of the
/// gradients of `x · factor + summand`, and `slope` is the mean of their products with `x - mean`, divided by the variance.
/// With running statistics, both are 0.
#[pulp::with_simd(extend_with_gradients = Arch::new())]
#[inline(always)]
fn extend_with_gradients_simd<S: Simd, T: Element>(
    _: S,
    result: &mut Vec<T>,
    values: &[T],
    gradient: &[T],
    map: ChannelMap<T>,
    mean_gradient: T,
    slope: T,
) {
    extend_with_pairs(result, values, gradient, |x, g| {
        map.factor * (map.gradient_of_sum(x, g) - mean_gradient - (x - map.mean) * slope)
    });
}

/// The operation: `(x - mean) · scale · weight + bias`, then the activation.
struct Normalize {
    size: usize,
    mean: Vec<f64>,
    /// 1 / the standard deviation.
    scale: Vec<f64>,
    /// True if the mean and the scale are those of the inputs, so that these have a part in the gradient.
    of_batch: bool,
    activation: Activation,
}

impl Normalize {
    /// Returns the map of each channel.
    fn maps<T: Element>(&self, weight: &[T], bias: &[T]) -> Vec<ChannelMap<T>> {
        let limits = self.activation.limits();
        let channels = self
            .mean
            .iter()
            .zip(&self.scale)
            .zip(weight.iter().zip(bias));
        let maps = channels.map(|((mean, scale), (weight, bias))| {
            let factor = scale * weight.to_f64();
            ChannelMap {
                factor: T::from_f64(factor),
                summand: T::from_f64(bias.to_f64() - mean * factor),
                mean: T::from_f64(*mean),
                limits,
            }
        });
        maps.collect()
    }
}

impl Layer for Normalize {
    const NAME: &'static str = "batch-norm";

    fn forward<T: Element>(&self, inputs: &[T], weight: &[T], bias: &[T]) -> Vec<T> {
        let maps = self.maps(weight, bias);
        let mut result = Vec::with_capacity(inputs.len());
        let channels = inputs.chunks_exact(self.size).zip(maps.iter().cycle());
        for (values, map) in channels {
            extend_with_map(&mut result, values, *map);
        }
        result
    }

    /// Computes the argument of the activation again, which is faster than reading the result.
    fn backward<T: Element>(&self, pass: &Pass<T>) -> Gradients<T> {
        let (inputs, gradient) = (pass.inputs, pass.gradient);
        let channels = self.mean.len();
        let maps = self.maps(pass.weight, pass.bias);
        let mut sums = vec![(0.0, 0.0); channels];
        let parts = inputs
            .chunks_exact(self.size)
            .zip(gradient.chunks_exact(self.size));
        for (i, (values, gradient)) in parts.enumerate() {
            let channel = i % channels;
            let (of_bias, of_weight) = sums_of_gradients(values, gradient, maps[channel]);
            sums[channel].0 += of_bias;
            sums[channel].1 += of_weight;
        }

        let count = (inputs.len() / channels) as f64;
        let mut result = Vec::with_capacity(if pass.of_inputs { inputs.len() } else { 0 });
        let parts = inputs
            .chunks_exact(self.size)
            .zip(gradient.chunks_exact(self.size));
        for (i, (values, gradient)) in parts.enumerate() {
            if !pass.of_inputs {
                break;
            }
            let channel = i % channels;
            let (mean, slope) = match self.of_batch {
                true => {
                    let (of_bias, of_weight) = sums[channel];
                    let scale = self.scale[channel];
                    (of_bias / count, of_weight * scale * scale / count)
                }
                false => (0.0, 0.0),
            };
            let (mean, slope) = (T::from_f64(mean), T::from_f64(slope));
            let map = maps[channel];
            extend_with_gradients(&mut result, values, gradient, map, mean, slope);
        }
        let scaled = sums.iter().zip(&self.scale);
        Gradients {
            of_inputs: result,
            of_weight: scaled
                .map(|(sums, scale)| T::from_f64(sums.1 * scale))
                .collect(),
            of_bias: sums.iter().map(|sums| T::from_f64(sums.0)).collect(),
        }
    }
}
