use candle_core::{Result, Tensor, bail};
use candle_nn::{Conv2d, Conv2dConfig, Module, VarBuilder, conv2d};

use super::{dense::Dense, layers::cross_entropy};
use crate::model::{Batch, Metrics, Model, Setup, classification_metrics};

/// A convolutional network for samples of shape `[channels, height, width]`: for each number in
/// `model.channels` a 3x3 convolution that keeps the size, ReLU, and 2x2 max pooling that halves it
/// (`conv.0.weight`, `conv.0.bias`, ...; an odd last row or column is left out), then hidden layers
/// and the output as in [`Mlp`](crate::models::Mlp).
pub struct Cnn {
    convolutions: Vec<Conv2d>,
    dense: Dense,
}

impl Cnn {
    fn forward(&self, inputs: &Tensor) -> Result<Tensor> {
        let mut x = inputs.clone();
        for convolution in &self.convolutions {
            // The same as ReLU first, for a quarter of its work.
            x = max_pool_2x2(&convolution.forward(&x)?)?.relu()?;
        }
        self.dense.forward(&x)
    }
}

impl Model for Cnn {
    fn new(setup: &Setup, vars: VarBuilder) -> Result<Self> {
        let shape = setup.sample_shape;
        let &[mut channels, mut height, mut width] = shape else {
            bail!(
                "it takes samples of shape [channels, height, width], but these have {shape:?}; use `mlp` or `softmax` for them"
            );
        };
        let config = Conv2dConfig {
            padding: 1,
            ..Conv2dConfig::default()
        };
        let mut convolutions = Vec::new();
        for (i, next) in setup.settings.channels.iter().enumerate() {
            if height < 2 || width < 2 {
                bail!(
                    "samples of shape {shape:?} are {height}x{width} before convolution {i}, too small for 2x2 pooling; give `model.channels` at most {i} numbers"
                );
            }
            let vars = vars.pp("conv").pp(i);
            convolutions.push(conv2d(channels, *next, 3, config, vars)?);
            (channels, height, width) = (*next, height / 2, width / 2);
        }
        let features = channels * height * width;
        let dense = Dense::new(features, &setup.settings.hidden, setup.classes, &vars)?;
        Ok(Self {
            convolutions,
            dense,
        })
    }

    fn loss(&self, batch: &Batch) -> Result<Tensor> {
        cross_entropy(&self.forward(&batch.inputs)?, &batch.targets)
    }

    fn metrics(&self, batch: &Batch) -> Result<Metrics> {
        classification_metrics(&self.forward(&batch.inputs)?, &batch.targets)
    }
}

/// Max pooling with a correct gradient. candle's `max_pool2d` scales it wrongly, and its
/// `max` gives each of several equal maxima all of it, up to four times too much where a picture is
/// blank and a whole window equal; `maximum` shares it between the two.
fn max_pool_2x2(x: &Tensor) -> Result<Tensor> {
    let (samples, channels, height, width) = x.dims4()?;
    let (rows, columns) = (height / 2, width / 2);
    let windows = x
        .narrow(2, 0, rows * 2)?
        .narrow(3, 0, columns * 2)?
        .reshape((samples, channels, rows, 2, columns, 2))?;
    let of_rows = windows
        .narrow(3, 0, 1)?
        .maximum(&windows.narrow(3, 1, 1)?)?;
    of_rows
        .narrow(5, 0, 1)?
        .maximum(&of_rows.narrow(5, 1, 1)?)?
        .reshape((samples, channels, rows, columns))
}
