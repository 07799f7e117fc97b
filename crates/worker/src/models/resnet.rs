use candle_core::{Result, Tensor};
use candle_nn::VarBuilder;
use nn::{Activation, Linear, add_relu, global_avg_pool2d};

use super::normalized::{Normalized, Shape, channels};
use crate::model::{Batch, Model, Pass, Setup};

/// ResNet-20 for small pictures (He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, section 4.2):
/// three stages of three blocks, of 16, 32 and 64 channels. Where the size changes, the shortcut is a 1x1 convolution
/// with batch normalisation (option B there).
pub struct ResNet20 {
    first: Normalized,
    blocks: Vec<Block>,
    output: Linear,
}

impl Model for ResNet20 {
    fn new(setup: &Setup, vars: VarBuilder) -> Result<Self> {
        let first = Shape {
            channels: (channels(setup)?, 16),
            kernel: 3,
            stride: 1,
            groups: 1,
        };
        let mut blocks = Vec::new();
        let mut inputs = 16;
        for (stage, outputs) in [16, 32, 64].into_iter().enumerate() {
            for block in 0..3 {
                let vars = vars.pp(format!("stage.{stage}.{block}"));
                let stride = if stage > 0 && block == 0 { 2 } else { 1 };
                blocks.push(Block::new((inputs, outputs), stride, &vars)?);
                inputs = outputs;
            }
        }
        Ok(Self {
            first: Normalized::new(first, Activation::Relu, vars.pp("first"))?,
            blocks,
            output: Linear::new(inputs, setup.outputs(), vars.pp("output"))?,
        })
    }

    fn forward(&self, batch: &Batch, pass: &Pass) -> Result<Tensor> {
        let mut x = self.first.forward(batch.input()?, pass)?;
        for block in &self.blocks {
            x = block.forward(&x, pass)?;
        }
        self.output.forward(&global_avg_pool2d(&x)?)
    }
}

/// Two convolutions, to which the inputs are added.
struct Block {
    first: Normalized,
    second: Normalized,
    shortcut: Option<Normalized>,
}

impl Block {
    fn new(channels: (usize, usize), stride: usize, vars: &VarBuilder) -> Result<Self> {
        let first = Shape {
            channels,
            kernel: 3,
            stride,
            groups: 1,
        };
        let second = Shape {
            channels: (channels.1, channels.1),
            stride: 1,
            ..first
        };
        let shortcut = Shape { kernel: 1, ..first };
        let (relu, identity) = (Activation::Relu, Activation::Identity);
        let changes = stride > 1 || channels.0 != channels.1;
        let shortcut = changes.then(|| Normalized::new(shortcut, identity, vars.pp("shortcut")));
        Ok(Self {
            first: Normalized::new(first, relu, vars.pp("first"))?,
            second: Normalized::new(second, identity, vars.pp("second"))?,
            shortcut: shortcut.transpose()?,
        })
    }

    fn forward(&self, x: &Tensor, pass: &Pass) -> Result<Tensor> {
        let y = self.second.forward(&self.first.forward(x, pass)?, pass)?;
        match &self.shortcut {
            Some(shortcut) => add_relu(&y, &shortcut.forward(x, pass)?),
            None => add_relu(&y, x),
        }
    }
}
