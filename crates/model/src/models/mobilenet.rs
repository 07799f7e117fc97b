use candle_core::{Result, Tensor};
use candle_nn::VarBuilder;
use nn::{Activation, Linear, global_avg_pool2d};

use super::normalized::{Normalized, Shape, channels, is_small};
use super::options::Options;
use crate::{Batch, Model, Pass, Setup, forward_blocks};

/// MobileNetV2 (Sandler et al., "MobileNetV2: Inverted Residuals and Linear Bottlenecks", CVPR 2018, table 2). For
/// pictures below 64 x 64 the first two strides are 1.
///
/// Variables: `first`, `stage.S.B.expand`, `.depth`, `.project`, `last`, each with `conv` and `norm`, and `output`.
/// Files with the names of torchvision's MobileNetV2 can be loaded. Each inverted residual is a block of the chain; the
/// first block also has `first`, and the last block also has `last` and `output`.
pub struct MobileNetV2 {
    first: Normalized,
    blocks: Vec<Block>,
    last: Normalized,
    output: Linear,
}

/// The expansion, the output channels, the number of blocks, and the stride of the first block, for each stage.
const STAGES: [(usize, usize, usize, usize); 7] = [
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
];

impl Model for MobileNetV2 {
    fn new(setup: &Setup, vars: VarBuilder) -> Result<Self> {
        Options::new(setup, &[])?;
        let relu = Activation::Relu6;
        let colours = channels(setup)?;
        let small = is_small(setup)?;
        let count: usize = STAGES.iter().map(|(_, _, count, _)| count).sum();
        let vars_of = |block| setup.block(block, count, &vars);
        let mut blocks = Vec::new();
        let mut inputs = 32;
        for (stage, (expansion, outputs, count, stride)) in STAGES.into_iter().enumerate() {
            for block in 0..count {
                let vars = vars_of(blocks.len())?.pp(format!("stage.{stage}.{block}"));
                let stride = match block {
                    0 if !(small && stage == 1) => stride,
                    _ => 1,
                };
                blocks.push(Block::new((inputs, outputs), expansion, stride, &vars)?);
                inputs = outputs;
            }
        }
        let first = Shape::new((colours, 32), 3, if small { 1 } else { 2 });
        let (begin, end) = (vars_of(0)?, vars_of(count - 1)?);
        Ok(Self {
            first: Normalized::new(first, relu, begin.pp("first"))?,
            blocks,
            last: Normalized::new(Shape::new((inputs, 1280), 1, 1), relu, end.pp("last"))?,
            output: Linear::new(1280, setup.outputs(), end.pp("output"))?,
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
            None => self.first.forward(batch.input()?, pass)?,
        };
        let y = self.blocks[block].forward(&x, pass)?;
        if block + 1 < self.blocks.len() {
            return Ok(y);
        }
        let y = self.last.forward(&y, pass)?;
        self.output.forward(&global_avg_pool2d(&y)?)
    }

    fn name_of(&self, foreign: &str) -> Option<String> {
        torchvision(foreign)
    }
}

/// Returns this model's name for a variable that torchvision calls `foreign`, as in `features.2.conv.0.1.running_mean`.
/// In torchvision, `features` are the first convolution, the blocks one after another, and the last convolution.
fn torchvision(foreign: &str) -> Option<String> {
    let (layer, field) = foreign.rsplit_once('.')?;
    if layer == "classifier.1" {
        return Some(format!("output.{field}"));
    }
    let (feature, part) = layer.strip_prefix("features.")?.split_once('.')?;
    let of_normalized = |part: &str| match part {
        "0" => Some("conv"),
        "1" => Some("norm"),
        _ => None,
    };
    let (layer, part) = match feature.parse::<usize>().ok()? {
        0 => ("first".to_owned(), of_normalized(part)?),
        LAST_FEATURE => ("last".to_owned(), of_normalized(part)?),
        feature => {
            let (stage, block) = block_of(feature - 1)?;
            // The blocks of the first stage do not expand.
            let (layer, part) = match (stage, part.strip_prefix("conv.")?) {
                (0, "1") => ("project", "conv"),
                (0, "2") => ("project", "norm"),
                (1.., "2") => ("project", "conv"),
                (1.., "3") => ("project", "norm"),
                (stage, part) => {
                    let (layer, part) = part.split_once('.')?;
                    let layer = match (stage, layer) {
                        (1.., "0") => "expand",
                        (0, "0") | (1.., "1") => "depth",
                        _ => return None,
                    };
                    (layer, of_normalized(part)?)
                }
            };
            (format!("stage.{stage}.{block}.{layer}"), part)
        }
    };
    Some(format!("{layer}.{part}.{field}"))
}

/// The index of the last convolution among torchvision's features.
const LAST_FEATURE: usize = 18;

/// Returns the stage of a block, and the index of the block in this stage.
fn block_of(mut block: usize) -> Option<(usize, usize)> {
    for (stage, (_, _, count, _)) in STAGES.into_iter().enumerate() {
        if block < count {
            return Some((stage, block));
        }
        block -= count;
    }
    None
}

/// An inverted residual: it expands the channels, filters each by itself, and projects to few channels again.
struct Block {
    layers: Vec<Normalized>,
    residual: bool,
}

impl Block {
    fn new(
        (inputs, outputs): (usize, usize),
        expansion: usize,
        stride: usize,
        vars: &VarBuilder,
    ) -> Result<Self> {
        let inner = inputs * expansion;
        let relu = Activation::Relu6;
        let point = |channels| Shape::new(channels, 1, 1);
        let depth = Shape::depthwise(inner, stride);
        let mut layers = Vec::new();
        if expansion > 1 {
            layers.push(Normalized::new(
                point((inputs, inner)),
                relu,
                vars.pp("expand"),
            )?);
        }
        layers.push(Normalized::new(depth, relu, vars.pp("depth"))?);
        let project = point((inner, outputs));
        layers.push(Normalized::new(
            project,
            Activation::Identity,
            vars.pp("project"),
        )?);
        Ok(Self {
            layers,
            residual: stride == 1 && inputs == outputs,
        })
    }

    fn forward(&self, x: &Tensor, pass: &Pass) -> Result<Tensor> {
        let mut y = x.clone();
        for layer in &self.layers {
            y = layer.forward(&y, pass)?;
        }
        if self.residual { x + y } else { Ok(y) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_torchvision_are_known() {
        for (foreign, ours) in [
            ("features.0.0.weight", "first.conv.weight"),
            ("features.0.1.running_var", "first.norm.running_var"),
            ("features.1.conv.0.0.weight", "stage.0.0.depth.conv.weight"),
            ("features.1.conv.1.weight", "stage.0.0.project.conv.weight"),
            ("features.1.conv.2.bias", "stage.0.0.project.norm.bias"),
            ("features.2.conv.0.1.bias", "stage.1.0.expand.norm.bias"),
            ("features.17.conv.1.0.weight", "stage.6.0.depth.conv.weight"),
            ("features.16.conv.3.weight", "stage.5.2.project.norm.weight"),
            ("features.18.0.weight", "last.conv.weight"),
            ("classifier.1.bias", "output.bias"),
        ] {
            assert_eq!(torchvision(foreign).as_deref(), Some(ours));
        }
        for unknown in [
            "features.19.0.weight",
            "features.1.conv.3.weight",
            "features.2.conv.2.0.weight",
            "features.0.2.weight",
            "classifier.0.weight",
        ] {
            assert_eq!(torchvision(unknown), None, "{unknown}");
        }
    }
}
