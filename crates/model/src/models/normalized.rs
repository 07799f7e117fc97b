use candle_core::{Result, Tensor, bail};
use candle_nn::{Conv2dConfig, VarBuilder};
use nn::{Activation, BatchNorm, BatchNormConfig, Conv2d};

use crate::{Pass, Setup};

/// A convolution without bias, batch normalisation, and an activation: `conv.weight`, `norm.weight`, `norm.bias`,
/// `norm.running_mean`, `norm.running_var`. The height and width of the outputs are those of the inputs, divided by the
/// stride.
pub(super) struct Normalized {
    convolution: Conv2d,
    norm: BatchNorm,
}

/// The shape of a convolution.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    pub(super) channels: (usize, usize),
    kernel: usize,
    pub(super) stride: usize,
    groups: usize,
}

impl Shape {
    /// Returns the shape of a convolution over all channels.
    pub(super) fn new(channels: (usize, usize), kernel: usize, stride: usize) -> Self {
        Self {
            channels,
            kernel,
            stride,
            groups: 1,
        }
    }

    /// Returns the shape of a 3x3 convolution of each channel by itself.
    pub(super) fn depthwise(channels: usize, stride: usize) -> Self {
        Self {
            groups: channels,
            ..Self::new((channels, channels), 3, stride)
        }
    }
}

impl Normalized {
    pub(super) fn new(shape: Shape, activation: Activation, vars: VarBuilder) -> Result<Self> {
        let config = Conv2dConfig {
            padding: shape.kernel / 2,
            stride: shape.stride,
            groups: shape.groups,
            ..Conv2dConfig::default()
        };
        let norm = BatchNormConfig {
            activation,
            ..BatchNormConfig::default()
        };
        let (inputs, outputs) = shape.channels;
        Ok(Self {
            convolution: Conv2d::no_bias(inputs, outputs, shape.kernel, config, vars.pp("conv"))?,
            norm: BatchNorm::new(outputs, norm, vars.pp("norm"))?,
        })
    }

    pub(super) fn forward(&self, inputs: &Tensor, pass: &Pass) -> Result<Tensor> {
        let inputs = self.convolution.forward(inputs)?;
        self.norm.forward(&inputs, pass.training)
    }
}

/// Returns the number of channels of the samples. Refuses samples that are not pictures of at least 8 x 8.
pub(super) fn channels(setup: &Setup) -> Result<usize> {
    match setup.sample_shape()? {
        &[channels, height, width] if height >= 8 && width >= 8 => Ok(channels),
        shape => bail!(
            "it takes samples of shape [channels, height, width], at least 8 x 8, but these have {shape:?}; use `mlp` or `logistic` for them"
        ),
    }
}

/// Returns whether a side of the pictures is below 64. Such pictures are too small for the first strides of the
/// networks.
pub(super) fn is_small(setup: &Setup) -> Result<bool> {
    let sides = setup.sample_shape()?.iter().skip(1);
    Ok(sides.copied().any(|side| side < 64))
}
