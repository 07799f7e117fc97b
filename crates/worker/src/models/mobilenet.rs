use candle_core::{Result, Tensor};
use candle_nn::VarBuilder;
use nn::{Activation, Linear, global_avg_pool2d};

use super::normalized::{Normalized, Shape, channels};
use crate::model::{Batch, Model, Pass, Setup};

/// MobileNetV2 (Sandler et al., "MobileNetV2: Inverted Residuals and Linear Bottlenecks", CVPR 2018, table 2). For
/// pictures below 64 x 64 the first two strides are 1.
pub struct MobileNetV2 {
    first: Normalized,
    blocks: Vec<Block>,
    last: Normalized,
    output: Linear,
}

/// Expansion, channels, blocks, and the stride of the first block of each stage.
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
        let relu = Activation::Relu6;
        let colours = channels(setup)?;
        let small = setup.sample_shape()?[1..].iter().any(|side| *side < 64);
        let point = |channels, stride, kernel| Shape {
            channels,
            kernel,
            stride,
            groups: 1,
        };
        let mut blocks = Vec::new();
        let mut inputs = 32;
        for (stage, (expansion, outputs, count, stride)) in STAGES.into_iter().enumerate() {
            for block in 0..count {
                let vars = vars.pp(format!("stage.{stage}.{block}"));
                let stride = match block {
                    0 if !(small && stage == 1) => stride,
                    _ => 1,
                };
                blocks.push(Block::new((inputs, outputs), expansion, stride, &vars)?);
                inputs = outputs;
            }
        }
        let first = point((colours, 32), if small { 1 } else { 2 }, 3);
        Ok(Self {
            first: Normalized::new(first, relu, vars.pp("first"))?,
            blocks,
            last: Normalized::new(point((inputs, 1280), 1, 1), relu, vars.pp("last"))?,
            output: Linear::new(1280, setup.outputs(), vars.pp("output"))?,
        })
    }

    fn forward(&self, batch: &Batch, pass: &Pass) -> Result<Tensor> {
        let mut x = self.first.forward(batch.input()?, pass)?;
        for block in &self.blocks {
            x = block.forward(&x, pass)?;
        }
        x = self.last.forward(&x, pass)?;
        self.output.forward(&global_avg_pool2d(&x)?)
    }
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
        let point = |channels| Shape {
            channels,
            kernel: 1,
            stride: 1,
            groups: 1,
        };
        let depth = Shape {
            channels: (inner, inner),
            kernel: 3,
            stride,
            groups: inner,
        };
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
