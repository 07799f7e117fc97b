//! Convolutions over pictures.

mod geometry;
mod kernel;
mod lines;
mod pass;

use std::ops::Range;

use candle_core::backend::BackendStorage;
use candle_core::utils::get_num_threads;
use candle_core::{CpuStorage, CustomOp2, CustomOp3, Layout, Result, Shape, Tensor, bail};
use candle_nn::{Conv2dConfig, VarBuilder};
use pulp::Arch;
use rayon::iter::{IntoParallelIterator, ParallelIterator};

use crate::activation::{Activation, before};
use crate::backward::keep;
use crate::simd::{Element, Sum};
use crate::storage::{computed_here, elements, slice, with_type};
use geometry::{Axis, Geometry};
use pass::{Backward, Forward};

/// A convolution over pictures: a weight of shape `[outputs, inputs / groups, rows, columns]` and, if it has one, a bias
/// of shape `[outputs]`.
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
    /// Those of `vars`.
    pub fn new(
        inputs: usize,
        outputs: usize,
        kernel: usize,
        config: Conv2dConfig,
        vars: VarBuilder,
    ) -> Result<Self> {
        let layer = candle_nn::conv2d(inputs, outputs, kernel, config, vars)?;
        Ok(Self {
            weight: layer.weight().clone(),
            bias: layer.bias().cloned(),
            config,
        })
    }

    /// Asks `vars` for `weight`, with the initial values of [`candle_nn::conv2d_no_bias()`].
    ///
    /// # Errors
    /// Those of `vars`.
    pub fn no_bias(
        inputs: usize,
        outputs: usize,
        kernel: usize,
        config: Conv2dConfig,
        vars: VarBuilder,
    ) -> Result<Self> {
        let layer = candle_nn::conv2d_no_bias(inputs, outputs, kernel, config, vars)?;
        Ok(Self {
            weight: layer.weight().clone(),
            bias: None,
            config,
        })
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
/// # Errors
/// If the shapes do not fit, or candle's.
pub fn conv2d(
    inputs: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    config: &Conv2dConfig,
) -> Result<Tensor> {
    apply(inputs, weight, bias, config, Activation::Identity)
}

/// Returns the ReLU of [`conv2d`]. On the CPU, in `f32` and `f64`, it behaves as PyTorch's: where the result is 0
/// its gradient is 0 (candle's own is 1), and NaN stays NaN (candle makes it 0).
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
    let geometry = geometry(inputs, weight, bias, config)?;
    let tensors = [Some(inputs), Some(weight), bias];
    let tensors: Vec<&Tensor> = tensors.into_iter().flatten().collect();
    let empty = tensors.iter().any(|tensor| tensor.elem_count() == 0);
    if empty || !computed_here(&tensors) {
        let c = config;
        let sum = inputs.conv2d(weight, c.padding, c.stride, c.dilation, c.groups)?;
        let sum = match bias {
            Some(bias) => sum.broadcast_add(&bias.reshape((1, (), 1, 1))?)?,
            None => sum,
        };
        return activation.elsewhere(&sum);
    }
    let op = Convolution {
        geometry,
        activation,
    };
    let (inputs, weight) = (inputs.contiguous()?, weight.contiguous()?);
    match bias {
        Some(bias) => inputs.apply_op3(&weight, &bias.contiguous()?, op),
        None => inputs.apply_op2(&weight, op),
    }
}

fn geometry(
    inputs: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    config: &Conv2dConfig,
) -> Result<Geometry> {
    let (samples, channels, height, width) = inputs.dims4()?;
    let (outputs, of_group, kernel_rows, kernel_columns) = weight.dims4()?;
    let groups = config.groups;
    let fits = groups > 0
        && outputs % groups == 0
        && of_group * groups == channels
        && bias.is_none_or(|bias| bias.dims() == [outputs]);
    if !fits {
        bail!(
            "inputs of shape {:?}, a weight of {:?} and a bias of {:?} do not fit {groups} groups; inputs [samples, channels, rows, columns] and a bias [outputs] fit a weight [outputs, channels / groups, rows, columns]",
            inputs.shape(),
            weight.shape(),
            bias.map(|bias| bias.shape()),
        );
    }
    let axis = |input: usize, kernel: usize| {
        let span = (kernel.max(1) - 1) * config.dilation + 1;
        let padded = input + 2 * config.padding;
        if config.stride == 0 || config.dilation == 0 || kernel == 0 || padded < span {
            bail!(
                "a kernel of {kernel} with dilation {} and stride {} does not fit {input} pixels with padding {}",
                config.dilation,
                config.stride,
                config.padding
            );
        }
        Ok(Axis {
            input,
            output: (padded - span) / config.stride + 1,
            kernel,
            stride: config.stride,
            padding: config.padding,
            dilation: config.dilation,
        })
    };
    Ok(Geometry {
        samples,
        groups,
        inputs: of_group,
        outputs: outputs / groups,
        rows: axis(height, kernel_rows)?,
        columns: axis(width, kernel_columns)?,
    })
}

/// The operation, with an activation.
struct Convolution {
    geometry: Geometry,
    activation: Activation,
}

impl Convolution {
    /// Calls `work` for the samples of each of candle's threads, and returns the results in the order of the samples.
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

    fn forward<T: Element>(
        &self,
        (inputs, inputs_layout): (&CpuStorage, &Layout),
        (weight, weight_layout): (&CpuStorage, &Layout),
        bias: Option<(&CpuStorage, &Layout)>,
    ) -> Result<(CpuStorage, Shape)> {
        let bias = bias.map(|(bias, layout)| slice(bias, layout));
        let (inputs, weight) = (slice(inputs, inputs_layout)?, slice(weight, weight_layout)?);
        let (bias, limits) = (bias.transpose()?, self.activation.limits());
        let results = self.in_parts(|geometry, part| {
            Arch::new().dispatch(Forward::<T> {
                geometry,
                inputs: &inputs[of_samples(&part, geometry.sample_inputs())],
                weight,
                bias,
                limits,
            })
        });
        let g = &self.geometry;
        let shape = (
            g.samples,
            g.groups * g.outputs,
            g.rows.output,
            g.columns.output,
        );
        let result = joined(results);
        Ok((T::to_cpu_storage_owned(result), shape.into()))
    }

    /// Returns the gradients of the inputs, of the weight and of the bias, each if it is tracked.
    fn backward<T: Element>(
        &self,
        (inputs, weight, bias): (&Tensor, &Tensor, Option<&Tensor>),
        result: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let g = &self.geometry;
        let gradient = gradient.contiguous()?;
        let gradient = elements(&gradient);
        let mut gradient = gradient.slice::<T>()?;
        let masked;
        if self.activation != Activation::Identity {
            masked = before(self.activation, elements(result).slice()?, gradient);
            gradient = &masked;
        }
        let (all_inputs, weights) = (elements(inputs), elements(weight));
        let (all_inputs, weights) = (all_inputs.slice()?, weights.slice()?);
        let parts = self.in_parts(|geometry, part| {
            Arch::new().dispatch(Backward::<T> {
                geometry,
                inputs: &all_inputs[of_samples(&part, geometry.sample_inputs())],
                weight: weights,
                gradient: &gradient[of_samples(&part, geometry.sample_outputs())],
                of_inputs: inputs.track_op(),
                of_weight: weight.track_op(),
            })
        });
        let (of_inputs, of_weights): (Vec<_>, Vec<_>) = parts
            .into_iter()
            .map(|part| (part.of_inputs, part.of_weight))
            .unzip();
        let (of_inputs, of_weight) = (joined(of_inputs), summed(of_weights));
        let tensor = |values, like: &Tensor| Tensor::from_vec(values, like.shape(), like.device());
        let of_inputs = keep(inputs, || tensor(of_inputs, inputs))?;
        let of_weight = keep(weight, || tensor(of_weight, weight))?;
        let of_bias = match bias {
            Some(bias) => keep(bias, || {
                tensor(sums(gradient, g.groups * g.outputs, g.output_size()), bias)
            })?,
            None => None,
        };
        Ok((of_inputs, of_weight, of_bias))
    }
}

/// Returns the elements of samples.
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

/// Returns the sum of each channel.
fn sums<T: Element>(values: &[T], channels: usize, size: usize) -> Vec<T> {
    let mut sums = vec![T::zero(); channels];
    for sample in values.chunks_exact(channels * size) {
        for (sum, channel) in sums.iter_mut().zip(sample.chunks_exact(size)) {
            *sum += Arch::new().dispatch(Sum(channel));
        }
    }
    sums
}

impl CustomOp2 for Convolution {
    fn name(&self) -> &'static str {
        "conv2d"
    }

    fn cpu_fwd(
        &self,
        inputs: &CpuStorage,
        inputs_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (inputs, weight) = ((inputs, inputs_layout), (weight, weight_layout));
        with_type!(inputs.0.dtype(), T => self.forward::<T>(inputs, weight, None))
    }

    fn bwd(
        &self,
        inputs: &Tensor,
        weight: &Tensor,
        result: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let arguments = (inputs, weight, None);
        let (of_inputs, of_weight, _) =
            with_type!(result.dtype(), T => self.backward::<T>(arguments, result, gradient))?;
        Ok((of_inputs, of_weight))
    }
}

impl CustomOp3 for Convolution {
    fn name(&self) -> &'static str {
        "conv2d"
    }

    fn cpu_fwd(
        &self,
        inputs: &CpuStorage,
        inputs_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
        bias: &CpuStorage,
        bias_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (inputs, weight) = ((inputs, inputs_layout), (weight, weight_layout));
        let bias = Some((bias, bias_layout));
        with_type!(inputs.0.dtype(), T => self.forward::<T>(inputs, weight, bias))
    }

    fn bwd(
        &self,
        inputs: &Tensor,
        weight: &Tensor,
        bias: &Tensor,
        result: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let arguments = (inputs, weight, Some(bias));
        with_type!(result.dtype(), T => self.backward::<T>(arguments, result, gradient))
    }
}
