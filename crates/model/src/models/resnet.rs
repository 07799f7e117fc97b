use candle_core::{Result, Tensor, bail};
use candle_nn::VarBuilder;
use nn::{Activation, Linear, Pool2d, add_relu, global_avg_pool2d, max_pool2d};

use super::normalized::{Normalized, Shape, channels, is_small};
use super::options::Options;
use crate::{Batch, Model, Pass, Setup, forward_blocks};

/// A residual network of `LAYERS` layers (He et al., "Deep Residual Learning for Image Recognition", CVPR 2016): 20 and
/// 56 are the networks for small pictures (section 4.2), 18, 34 and 50 the networks of table 1. Where the size changes,
/// the shortcut is a 1x1 convolution with batch normalisation (option B there). In a bottleneck the 3x3 convolution has
/// the stride, as in PyTorch. For pictures below 64 x 64, 18, 34 and 50 begin with a 3x3 convolution and no pooling.
///
/// Variables: `first`, `stage.S.B.first`, `.second`, `.third`, `.shortcut`, each with `conv` and `norm`, and `output`.
/// Files with the names of torchvision's ResNets can be loaded. Each residual block is a block of the chain; the first
/// block also has the first convolution, and the last block also has the output.
pub struct ResNet<const LAYERS: usize> {
    first: Normalized,
    pool: bool,
    blocks: Vec<Block>,
    output: Linear,
}

/// The structure of a network.
struct Plan {
    /// The number of channels of the first stage. Each later stage has twice as many as the stage before.
    channels: usize,
    /// The number of blocks of each stage.
    blocks: &'static [usize],
    /// True if blocks are bottlenecks: 1x1, 3x3 and 1x1 convolutions with four times as many channels at the end.
    bottleneck: bool,
}

impl Plan {
    fn new(layers: usize) -> Result<Self> {
        let plan = |channels, blocks, bottleneck| Self {
            channels,
            blocks,
            bottleneck,
        };
        Ok(match layers {
            20 => plan(16, &[3; 3], false),
            56 => plan(16, &[9; 3], false),
            18 => plan(64, &[2; 4], false),
            34 => plan(64, &[3, 4, 6, 3], false),
            50 => plan(64, &[3, 4, 6, 3], true),
            other => bail!("there is no ResNet of {other} layers; there are 18, 20, 34, 50 and 56"),
        })
    }

    /// Returns whether the network is one for small pictures alone.
    fn is_for_small(&self) -> bool {
        self.blocks.len() == 3
    }
}

impl<const LAYERS: usize> Model for ResNet<LAYERS> {
    fn new(setup: &Setup, vars: VarBuilder) -> Result<Self> {
        Options::new(setup, &[])?;
        let plan = Plan::new(LAYERS)?;
        let colours = channels(setup)?;
        let whole = !plan.is_for_small() && !is_small(setup)?;
        let (kernel, stride) = if whole { (7, 2) } else { (3, 1) };
        let first = Shape::new((colours, plan.channels), kernel, stride);
        let count: usize = plan.blocks.iter().sum();
        let vars_of = |block| setup.block(block, count, &vars);
        let mut blocks = Vec::new();
        let mut inputs = plan.channels;
        for (stage, count) in plan.blocks.iter().enumerate() {
            let inner = plan.channels << stage;
            for block in 0..*count {
                let vars = vars_of(blocks.len())?.pp(format!("stage.{stage}.{block}"));
                let stride = if stage > 0 && block == 0 { 2 } else { 1 };
                let block = match plan.bottleneck {
                    true => Block::bottleneck(inputs, inner, stride, &vars)?,
                    false => Block::basic(inputs, inner, stride, &vars)?,
                };
                inputs = if plan.bottleneck { 4 * inner } else { inner };
                blocks.push(block);
            }
        }
        Ok(Self {
            first: Normalized::new(first, Activation::Relu, vars_of(0)?.pp("first"))?,
            pool: whole,
            blocks,
            output: Linear::new(inputs, setup.outputs(), vars_of(count - 1)?.pp("output"))?,
        })
    }

    fn forward(&self, batch: &Batch, pass: &Pass) -> Result<Tensor> {
        forward_blocks(self, batch, pass)
    }

    fn blocks(&self) -> usize {
        self.blocks.len()
    }

    fn forward_block(
        &self,
        block: usize,
        x: Option<&Tensor>,
        batch: &Batch,
        pass: &Pass,
    ) -> Result<Tensor> {
        let x = match x {
            Some(x) => x.clone(),
            None => self.first(batch, pass)?,
        };
        let y = self.blocks[block].forward(&x, pass)?;
        match block + 1 == self.blocks.len() {
            true => self.output.forward(&global_avg_pool2d(&y)?),
            false => Ok(y),
        }
    }

    fn name_of(&self, foreign: &str) -> Option<String> {
        torchvision(foreign)
    }
}

impl<const LAYERS: usize> ResNet<LAYERS> {
    /// Returns the inputs of the first residual block.
    fn first(&self, batch: &Batch, pass: &Pass) -> Result<Tensor> {
        let x = self.first.forward(batch.input()?, pass)?;
        let windows = Pool2d {
            kernel: 3,
            stride: 2,
            padding: 1,
        };
        match self.pool {
            true => max_pool2d(&x, &windows),
            false => Ok(x),
        }
    }
}

/// Returns this model's name for a variable that torchvision calls `foreign`, as in
/// `layer2.0.downsample.1.running_mean`.
fn torchvision(foreign: &str) -> Option<String> {
    let (layer, field) = foreign.rsplit_once('.')?;
    let named = |within: &str, part: &str| Some(format!("{within}{part}.{field}"));
    if layer == "fc" {
        return named("", "output");
    }
    let Some(rest) = layer.strip_prefix("layer") else {
        return named("", of_block(layer)?);
    };
    let mut parts = rest.splitn(3, '.');
    let stage = parts.next()?.parse::<usize>().ok()?.checked_sub(1)?;
    let block = parts.next()?;
    named(&format!("stage.{stage}.{block}."), of_block(parts.next()?)?)
}

/// Returns this model's name for a layer of a block that torchvision calls `foreign`.
fn of_block(foreign: &str) -> Option<&'static str> {
    Some(match foreign {
        "conv1" => "first.conv",
        "bn1" => "first.norm",
        "conv2" => "second.conv",
        "bn2" => "second.norm",
        "conv3" => "third.conv",
        "bn3" => "third.norm",
        "downsample.0" => "shortcut.conv",
        "downsample.1" => "shortcut.norm",
        _ => return None,
    })
}

/// Convolutions, to whose outputs the inputs are added.
struct Block {
    convolutions: Vec<Normalized>,
    shortcut: Option<Normalized>,
}

impl Block {
    /// Two 3x3 convolutions.
    fn basic(inputs: usize, outputs: usize, stride: usize, vars: &VarBuilder) -> Result<Self> {
        let shapes = [
            Shape::new((inputs, outputs), 3, stride),
            Shape::new((outputs, outputs), 3, 1),
        ];
        Self::new(&shapes, vars)
    }

    /// A 1x1 convolution to `inner` channels, a 3x3 convolution, and a 1x1 convolution to four times as many channels.
    fn bottleneck(inputs: usize, inner: usize, stride: usize, vars: &VarBuilder) -> Result<Self> {
        let shapes = [
            Shape::new((inputs, inner), 1, 1),
            Shape::new((inner, inner), 3, stride),
            Shape::new((inner, 4 * inner), 1, 1),
        ];
        Self::new(&shapes, vars)
    }

    fn new(shapes: &[Shape], vars: &VarBuilder) -> Result<Self> {
        let last = shapes.len() - 1;
        let names = ["first", "second", "third"];
        let convolutions = shapes.iter().zip(names).enumerate();
        let convolutions = convolutions.map(|(i, (shape, name))| {
            let activation = match i == last {
                true => Activation::Identity,
                false => Activation::Relu,
            };
            Normalized::new(*shape, activation, vars.pp(name))
        });
        let convolutions = convolutions.collect::<Result<_>>()?;
        let stride = shapes.iter().map(|shape| shape.stride).product();
        let (inputs, outputs) = (shapes[0].channels.0, shapes[last].channels.1);
        let shortcut = Shape::new((inputs, outputs), 1, stride);
        let shortcut = (stride > 1 || inputs != outputs)
            .then(|| Normalized::new(shortcut, Activation::Identity, vars.pp("shortcut")));
        Ok(Self {
            convolutions,
            shortcut: shortcut.transpose()?,
        })
    }

    fn forward(&self, x: &Tensor, pass: &Pass) -> Result<Tensor> {
        let mut y = x.clone();
        for convolution in &self.convolutions {
            y = convolution.forward(&y, pass)?;
        }
        match &self.shortcut {
            Some(shortcut) => add_relu(&y, &shortcut.forward(x, pass)?),
            None => add_relu(&y, x),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_torchvision_are_known() {
        for (foreign, ours) in [
            ("conv1.weight", "first.conv.weight"),
            ("bn1.running_var", "first.norm.running_var"),
            ("layer1.0.conv2.weight", "stage.0.0.second.conv.weight"),
            ("layer4.2.downsample.1.bias", "stage.3.2.shortcut.norm.bias"),
            ("fc.bias", "output.bias"),
        ] {
            assert_eq!(torchvision(foreign).as_deref(), Some(ours));
        }
        for unknown in ["layer0.0.conv1.weight", "layer1.conv1", "head.weight"] {
            assert_eq!(torchvision(unknown), None, "{unknown}");
        }
    }
}
