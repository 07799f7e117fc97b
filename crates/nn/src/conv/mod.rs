//! Convolutions over pictures.

mod axis;
mod elsewhere;
mod geometry;
mod kernel;
mod lines;
mod pass;

use std::ops::Range;

use candle_core::utils::get_num_threads;
use candle_core::{DType, Result, Shape, Tensor, bail};
use candle_nn::{Conv2dConfig, VarBuilder};
use pulp::Arch;
use rayon::iter::{IntoParallelIterator, ParallelIterator};

use crate::activation::{Activation, activate, before};
use crate::autocast::{autocast, operand_type};
use crate::operation::{Gradients, Layer, Pass, apply_layer};
use crate::simd::{Element, Sum};
use crate::storage::computed_here;
use geometry::{Geometry, check_groups};
use pass::{Backward, Forward};

/// A convolution over pictures: a weight of shape `[outputs, inputs / groups, rows, columns]` and, if it has one, a
/// bias of shape `[outputs]`.
#[derive(Clone, Debug)]
pub struct Conv2d {
    weight: Tensor,
    bias: Option<Tensor>,
    config: Conv2dConfig,
}

impl Conv2d {
    /// Asks `vars` for `weight` and `bias`, with the initial values of [`candle_nn::conv2d()`].
    ///
    /// # Errors
    /// If the groups do not divide the channels, or those of `vars`.
    pub fn new(
        inputs: usize,
        outputs: usize,
        kernel: usize,
        config: Conv2dConfig,
        vars: VarBuilder,
    ) -> Result<Self> {
        check_groups(inputs, outputs, config.groups)?;
        let layer = candle_nn::conv2d(inputs, outputs, kernel, config, vars)?;
        Ok(Self::with_variables_of(&layer))
    }

    /// Asks `vars` for `weight`, with the initial values of [`candle_nn::conv2d_no_bias()`].
    ///
    /// # Errors
    /// If the groups do not divide the channels, or those of `vars`.
    pub fn no_bias(
        inputs: usize,
        outputs: usize,
        kernel: usize,
        config: Conv2dConfig,
        vars: VarBuilder,
    ) -> Result<Self> {
        check_groups(inputs, outputs, config.groups)?;
        let layer = candle_nn::conv2d_no_bias(inputs, outputs, kernel, config, vars)?;
        Ok(Self::with_variables_of(&layer))
    }

    fn with_variables_of(layer: &candle_nn::Conv2d) -> Self {
        Self {
            weight: layer.weight().clone(),
            bias: layer.bias().cloned(),
            config: *layer.config(),
        }
    }

    /// Returns [`conv2d`] of the inputs with this layer's weight and bias.
    ///
    /// # Errors
    /// Those of [`conv2d`].
    pub fn forward(&self, inputs: &Tensor) -> Result<Tensor> {
        conv2d(inputs, &self.weight, self.bias.as_ref(), &self.config)
    }

    /// Returns [`conv2d_relu`] of the inputs with this layer's weight and bias.
    ///
    /// # Errors
    /// Those of [`conv2d`].
    pub fn forward_relu(&self, inputs: &Tensor) -> Result<Tensor> {
        conv2d_relu(inputs, &self.weight, self.bias.as_ref(), &self.config)
    }
}

/// Returns the convolution of inputs of shape `[samples, channels, rows, columns]` with a weight of shape
/// `[outputs, channels / groups, rows, columns]`, plus a bias of shape `[outputs]`.
///
/// This crate computes it if all tensors are on the CPU and have the same type: `f32`, `f64`, `bf16` or `f16`. It
/// converts the last two to `f32`, and the result back. Otherwise candle's operations compute it, with the algorithm
/// that the configuration names for cuDNN. With several groups of more than one channel, candle's gradient fails for
/// some pictures that are not square, if the stride is not 1. If the inputs or the weight have no elements, the result
/// is the bias, and only the bias has a gradient.
///
/// # Errors
/// If the shapes do not fit, if the sizes are larger than the address range, or candle's.
pub fn conv2d(
    inputs: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    config: &Conv2dConfig,
) -> Result<Tensor> {
    apply(inputs, weight, bias, config, Activation::Identity)
}

/// Returns the [`relu`](crate::relu) of [`conv2d`]. Where this crate computes it, the gradient is 0 where the result is
/// 0, and NaN stays NaN. Where candle does, the gradient is 1 where the sum is exactly 0, and NaN may become 0.
///
/// # Errors
/// Those of [`conv2d`].
pub fn conv2d_relu(
    inputs: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    config: &Conv2dConfig,
) -> Result<Tensor> {
    apply(inputs, weight, bias, config, Activation::Relu)
}

fn apply(
    inputs: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    config: &Conv2dConfig,
    activation: Activation,
) -> Result<Tensor> {
    let geometry = Geometry::new(inputs, weight, config)?;
    let (_, outputs, _, _) = geometry.result();
    if let Some(bias) = bias
        && bias.dims() != [outputs]
    {
        bail!(
            "a bias of shape {:?} does not fit a weight of {:?}; a bias [outputs] fits a weight [outputs, ...]",
            bias.shape(),
            weight.shape()
        );
    }
    if let Some(dtype) = operand_type(inputs) {
        let (pictures, kernels) = (inputs.to_dtype(dtype)?, weight.to_dtype(dtype)?);
        // On the CPU this function computes it in f32, which must not be converted again.
        let sum = autocast(DType::F32, || {
            apply(&pictures, &kernels, None, config, Activation::Identity)
        })?;
        return finish(sum.to_dtype(inputs.dtype())?, bias, activation);
    }
    let empty = inputs.elem_count() == 0 || weight.elem_count() == 0;
    let all = [inputs, weight, bias.unwrap_or(weight)];
    if !empty && computed_here(&all) {
        let convolution = Convolution {
            geometry,
            activation,
        };
        return match bias {
            Some(bias) => apply_layer(convolution, inputs, weight, bias),
            None => {
                let bias = Tensor::zeros(outputs, weight.dtype(), weight.device())?;
                apply_layer(convolution, inputs, weight, &bias)
            }
        };
    }
    let dtype = inputs.dtype();
    let narrow = matches!(dtype, DType::BF16 | DType::F16);
    if !empty
        && narrow
        && all
            .iter()
            .all(|x| x.device().is_cpu() && x.dtype() == dtype)
    {
        let wide = |tensor: &Tensor| tensor.to_dtype(DType::F32);
        let bias = bias.map(wide).transpose()?;
        let result = apply(
            &wide(inputs)?,
            &wide(weight)?,
            bias.as_ref(),
            config,
            activation,
        )?;
        return result.to_dtype(dtype);
    }
    let sum = match empty {
        true => Tensor::zeros(geometry.result(), inputs.dtype(), inputs.device())?,
        false if elsewhere::computes(inputs, &geometry) => {
            elsewhere::conv2d(inputs, weight, config)?
        }
        false => inputs.conv2d_with_algo(
            weight,
            config.padding,
            config.stride,
            config.dilation,
            config.groups,
            config.cudnn_fwd_algo,
        )?,
    };
    finish(sum, bias, activation)
}

/// Adds the bias to a convolution, and returns the activation of the result.
fn finish(sum: Tensor, bias: Option<&Tensor>, activation: Activation) -> Result<Tensor> {
    let sum = match bias {
        Some(bias) => {
            // In two steps: candle computes each sum in one block of threads, so one step would use few of them.
            let (samples, channels, _, _) = sum.dims4()?;
            let bias = bias.reshape((1, channels, 1, 1))?;
            sum.broadcast_add(&bias.broadcast_as((samples, channels, 1, 1))?)?
        }
        None => sum,
    };
    activate(&sum, activation)
}

/// A convolution, and the activation of its result.
struct Convolution {
    geometry: Geometry,
    activation: Activation,
}

impl Convolution {
    /// Divides the samples among candle's threads, and calls `work` for each part. The results are in the order of the
    /// samples.
    fn in_parts<R: Send>(&self, work: impl Fn(Geometry, Range<usize>) -> R + Sync) -> Vec<R> {
        let samples = self.geometry.samples;
        let part = samples.div_ceil(get_num_threads().max(1));
        let work = |start| {
            let part = start..samples.min(start + part);
            let geometry = Geometry {
                samples: part.len(),
                ..self.geometry
            };
            work(geometry, part)
        };
        if part == samples {
            return vec![work(0)];
        }
        let starts: Vec<usize> = (0..samples).step_by(part).collect();
        starts.into_par_iter().map(work).collect()
    }
}

impl Layer for Convolution {
    const NAME: &'static str = "conv2d";

    fn shape(&self, _: &Shape) -> Result<Shape> {
        Ok(self.geometry.result().into())
    }

    fn forward<T: Element>(&self, inputs: &[T], weight: &[T], bias: &[T]) -> Vec<T> {
        let limits = self.activation.limits();
        joined(self.in_parts(|geometry, part| {
            Arch::new().dispatch(Forward::<T> {
                geometry,
                inputs: &inputs[of_samples(&part, geometry.sample_inputs())],
                weight,
                bias,
                limits,
            })
        }))
    }

    fn backward<T: Element>(&self, pass: &Pass<T>) -> Result<Gradients<T>> {
        let g = &self.geometry;
        let masked;
        let gradient = match self.activation {
            Activation::Identity => pass.gradient,
            activation => {
                masked = before(activation, pass.result, pass.gradient);
                &masked
            }
        };
        let parts = self.in_parts(|geometry, part| {
            Arch::new().dispatch(Backward::<T> {
                geometry,
                inputs: &pass.inputs[of_samples(&part, geometry.sample_inputs())],
                weight: pass.weight,
                gradient: &gradient[of_samples(&part, geometry.sample_outputs())],
                of_inputs: pass.of_inputs,
                of_weight: pass.of_weight,
            })
        });
        let (of_inputs, of_weights): (Vec<_>, Vec<_>) = parts.into_iter().unzip();
        Ok(Gradients {
            of_inputs: joined(of_inputs),
            of_weight: summed(of_weights),
            of_bias: match pass.of_bias {
                true => sums(gradient, g.groups * g.outputs, g.output_size()),
                false => Vec::new(),
            },
        })
    }
}

/// Returns the range of elements of these samples, with `size` elements each.
fn of_samples(samples: &Range<usize>, size: usize) -> Range<usize> {
    samples.start * size..samples.end * size
}

fn joined<T: Element>(mut parts: Vec<Vec<T>>) -> Vec<T> {
    match parts.len() {
        1 => parts.remove(0),
        _ => parts.concat(),
    }
}

/// Returns the sum of vectors, always in the same order.
fn summed<T: Element>(parts: Vec<Vec<T>>) -> Vec<T> {
    let mut parts = parts.into_iter();
    let mut sum = parts.next().unwrap_or_default();
    for part in parts {
        sum.iter_mut().zip(part).for_each(|(sum, x)| *sum += x);
    }
    sum
}

/// Returns the sum of each channel over all samples.
fn sums<T: Element>(values: &[T], channels: usize, size: usize) -> Vec<T> {
    let mut sums = vec![T::zero(); channels];
    for sample in values.chunks_exact(channels * size) {
        for (sum, channel) in sums.iter_mut().zip(sample.chunks_exact(size)) {
            *sum += Arch::new().dispatch(Sum(channel));
        }
    }
    sums
}
