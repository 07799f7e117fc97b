use candle_core::{Result, Tensor, bail};
use candle_nn::{Conv2dConfig, VarBuilder};
use nn::{Conv2d, Pool2d, max_pool2d};

use super::dense::Dense;
use super::options::Options;
use crate::{Batch, Model, Pass, Setup, forward_blocks};

/// A convolutional network for samples of shape `[channels, height, width]`: for each number in
/// `model.channels` a 3x3 convolution that keeps the size, ReLU, and 2x2 max pooling that halves it
/// (`conv.0.weight`, `conv.0.bias`, ...; an odd last row or column is left out), then hidden layers
/// and the output as in [`Mlp`](crate::models::Mlp). Each convolution and each of these layers is a block.
pub struct Cnn {
    convolutions: Vec<Conv2d>,
    dense: Dense,
}

impl Model for Cnn {
    fn new(setup: &Setup, vars: VarBuilder) -> Result<Self> {
        Options::new(setup, &[])?;
        let shape = setup.sample_shape()?;
        let &[mut channels, mut height, mut width] = shape else {
            bail!(
                "it takes samples of shape [channels, height, width], but these have {shape:?}; use `mlp` or `softmax` for them"
            );
        };
        let config = Conv2dConfig {
            padding: 1,
            ..Conv2dConfig::default()
        };
        let (channels_of, hidden) = (&setup.settings.channels, &setup.settings.hidden);
        let count = channels_of.len() + hidden.len() + 1;
        let block = |block| setup.block(block, count, &vars);
        let mut convolutions = Vec::new();
        for (i, next) in channels_of.iter().enumerate() {
            if height < 2 || width < 2 {
                bail!(
                    "samples of shape {shape:?} are {height}x{width} before convolution {i}, too small for 2x2 pooling; give `model.channels` at most {i} numbers"
                );
            }
            let vars = block(i)?.pp("conv").pp(i);
            convolutions.push(Conv2d::new(channels, *next, 3, config, vars)?);
            (channels, height, width) = (*next, height / 2, width / 2);
        }
        let features = channels * height * width;
        let of_layer = |layer| block(channels_of.len() + layer);
        let dense = Dense::in_blocks(features, hidden, setup.outputs(), of_layer)?;
        Ok(Self {
            convolutions,
            dense,
        })
    }

    fn forward(&self, batch: &Batch, pass: &Pass) -> Result<Tensor> {
        forward_blocks(self, batch, pass)
    }

    fn blocks(&self) -> usize {
        self.convolutions.len() + self.dense.layers()
    }

    fn forward_block(
        &self,
        block: usize,
        x: Option<&Tensor>,
        batch: &Batch,
        _: &Pass,
    ) -> Result<Tensor> {
        let x = x.map_or_else(|| batch.input(), Ok)?;
        match self.convolutions.get(block) {
            Some(convolution) => max_pool2d(&convolution.forward_relu(x)?, &Pool2d::new(2)),
            None => self.dense.layer(block - self.convolutions.len(), x),
        }
    }
}
