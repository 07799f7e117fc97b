//! The models that are measured.

use candle_core::{Result, Tensor};
use candle_nn::{Conv2dConfig, VarBuilder};
use nn::{
    Activation, Attention, BatchNorm, BatchNormConfig, Conv2d, LayerNorm, Linear, Pool2d, add_relu,
    gelu, global_avg_pool2d, max_pool2d,
};

/// Makes logits of pictures.
pub(crate) trait Network {
    fn forward(&self, inputs: &Tensor) -> Result<Tensor>;
}

/// The model `cnn` of Flambeau for pictures of 28x28.
pub(crate) struct Cnn {
    convolutions: [Conv2d; 2],
    hidden: Linear,
    output: Linear,
}

impl Cnn {
    pub(crate) fn new(vars: VarBuilder) -> Result<Self> {
        let config = Conv2dConfig {
            padding: 1,
            ..Conv2dConfig::default()
        };
        Ok(Self {
            convolutions: [
                Conv2d::new(1, 16, 3, config, vars.pp("conv.0"))?,
                Conv2d::new(16, 32, 3, config, vars.pp("conv.1"))?,
            ],
            hidden: Linear::new(32 * 7 * 7, 128, vars.pp("hidden.0"))?,
            output: Linear::new(128, 10, vars.pp("output"))?,
        })
    }
}

impl Network for Cnn {
    fn forward(&self, inputs: &Tensor) -> Result<Tensor> {
        let mut x = inputs.clone();
        for convolution in &self.convolutions {
            x = max_pool2d(&convolution.forward_relu(&x)?, &Pool2d::new(2))?;
        }
        let hidden = self.hidden.forward_relu(&x.flatten_from(1)?)?;
        self.output.forward(&hidden)
    }
}

/// A convolution without bias, batch normalisation, and an activation.
struct Normalized {
    convolution: Conv2d,
    norm: BatchNorm,
}

impl Normalized {
    fn new(
        (inputs, outputs): (usize, usize),
        kernel: usize,
        (stride, groups): (usize, usize),
        activation: Activation,
        vars: VarBuilder,
    ) -> Result<Self> {
        let config = Conv2dConfig {
            padding: kernel / 2,
            stride,
            groups,
            ..Conv2dConfig::default()
        };
        let norm = BatchNormConfig {
            activation,
            ..BatchNormConfig::default()
        };
        Ok(Self {
            convolution: Conv2d::no_bias(inputs, outputs, kernel, config, vars.pp("conv"))?,
            norm: BatchNorm::new(outputs, norm, vars.pp("norm"))?,
        })
    }

    fn forward(&self, inputs: &Tensor) -> Result<Tensor> {
        Ok(self.norm.train(&self.convolution.forward(inputs)?)?.0)
    }
}

/// ResNet-20 for pictures of 32x32 (He and others, 2015, section 4.2), with 1x1 convolutions where the size changes.
pub(crate) struct ResNet20 {
    first: Normalized,
    blocks: Vec<(Normalized, Normalized, Option<Normalized>)>,
    output: Linear,
}

impl ResNet20 {
    pub(crate) fn new(vars: VarBuilder) -> Result<Self> {
        let relu = Activation::Relu;
        let mut blocks = Vec::new();
        let mut channels = 16;
        for (stage, width) in [16, 32, 64].into_iter().enumerate() {
            for block in 0..3 {
                let vars = vars.pp(format!("stage.{stage}.{block}"));
                let stride = if stage > 0 && block == 0 { 2 } else { 1 };
                let sizes = (channels, width);
                let first = Normalized::new(sizes, 3, (stride, 1), relu, vars.pp("first"))?;
                let identity = Activation::Identity;
                let second =
                    Normalized::new((width, width), 3, (1, 1), identity, vars.pp("second"))?;
                let shortcut = match stride {
                    1 => None,
                    _ => Some(Normalized::new(
                        sizes,
                        1,
                        (2, 1),
                        identity,
                        vars.pp("shortcut"),
                    )?),
                };
                blocks.push((first, second, shortcut));
                channels = width;
            }
        }
        Ok(Self {
            first: Normalized::new((3, 16), 3, (1, 1), relu, vars.pp("first"))?,
            blocks,
            output: Linear::new(64, 10, vars.pp("output"))?,
        })
    }
}

impl Network for ResNet20 {
    fn forward(&self, inputs: &Tensor) -> Result<Tensor> {
        let mut x = self.first.forward(inputs)?;
        for (first, second, shortcut) in &self.blocks {
            let y = second.forward(&first.forward(&x)?)?;
            x = match shortcut {
                Some(shortcut) => add_relu(&y, &shortcut.forward(&x)?)?,
                None => add_relu(&y, &x)?,
            };
        }
        self.output.forward(&global_avg_pool2d(&x)?)
    }
}

/// MobileNetV2 (Sandler and others, 2018) for pictures of 32x32: the first two strides are 1.
pub(crate) struct MobileNetV2 {
    first: Normalized,
    blocks: Vec<(Vec<Normalized>, bool)>,
    last: Normalized,
    output: Linear,
}

impl MobileNetV2 {
    pub(crate) fn new(vars: VarBuilder) -> Result<Self> {
        let relu = Activation::Relu6;
        let mut blocks = Vec::new();
        let mut channels = 32;
        // Expansion, channels, blocks, stride.
        let stages = [
            (1, 16, 1, 1),
            (6, 24, 2, 1),
            (6, 32, 3, 2),
            (6, 64, 4, 2),
            (6, 96, 3, 1),
            (6, 160, 3, 2),
            (6, 320, 1, 1),
        ];
        for (stage, (expansion, width, count, stride)) in stages.into_iter().enumerate() {
            for block in 0..count {
                let vars = vars.pp(format!("stage.{stage}.{block}"));
                let stride = if block == 0 { stride } else { 1 };
                let inner = channels * expansion;
                let mut layers = Vec::new();
                if expansion > 1 {
                    layers.push(Normalized::new(
                        (channels, inner),
                        1,
                        (1, 1),
                        relu,
                        vars.pp("expand"),
                    )?);
                }
                layers.push(Normalized::new(
                    (inner, inner),
                    3,
                    (stride, inner),
                    relu,
                    vars.pp("depth"),
                )?);
                let identity = Activation::Identity;
                layers.push(Normalized::new(
                    (inner, width),
                    1,
                    (1, 1),
                    identity,
                    vars.pp("project"),
                )?);
                blocks.push((layers, stride == 1 && channels == width));
                channels = width;
            }
        }
        Ok(Self {
            first: Normalized::new((3, 32), 3, (1, 1), relu, vars.pp("first"))?,
            blocks,
            last: Normalized::new((320, 1280), 1, (1, 1), relu, vars.pp("last"))?,
            output: Linear::new(1280, 10, vars.pp("output"))?,
        })
    }
}

impl Network for MobileNetV2 {
    fn forward(&self, inputs: &Tensor) -> Result<Tensor> {
        let mut x = self.first.forward(inputs)?;
        for (layers, residual) in &self.blocks {
            let mut y = x.clone();
            for layer in layers {
                y = layer.forward(&y)?;
            }
            x = if *residual { (x + y)? } else { y };
        }
        x = self.last.forward(&x)?;
        self.output.forward(&global_avg_pool2d(&x)?)
    }
}

/// A transformer encoder with normalisation first. It classifies the mean of a sequence of vectors of 128 numbers.
pub(crate) struct Transformer {
    layers: Vec<EncoderLayer>,
    output: Linear,
}

struct EncoderLayer {
    norms: [LayerNorm; 2],
    attention: Attention,
    hidden: Linear,
    output: Linear,
}

impl Transformer {
    const SIZE: usize = 128;

    pub(crate) fn new(vars: VarBuilder) -> Result<Self> {
        let size = Self::SIZE;
        let layers = (0..2).map(|i| {
            let vars = vars.pp(format!("layer.{i}"));
            Ok(EncoderLayer {
                norms: [
                    LayerNorm::new(size, 1e-5, vars.pp("norm.0"))?,
                    LayerNorm::new(size, 1e-5, vars.pp("norm.1"))?,
                ],
                attention: Attention::new(size, 4, vars.pp("attention"))?,
                hidden: Linear::new(size, 4 * size, vars.pp("hidden"))?,
                output: Linear::new(4 * size, size, vars.pp("output"))?,
            })
        });
        Ok(Self {
            layers: layers.collect::<Result<_>>()?,
            output: Linear::new(size, 10, vars.pp("output"))?,
        })
    }
}

impl Network for Transformer {
    fn forward(&self, inputs: &Tensor) -> Result<Tensor> {
        let mut x = inputs.clone();
        for layer in &self.layers {
            let [first, second] = &layer.norms;
            x = (&x + layer.attention.forward(&first.forward(&x)?, None)?)?;
            let hidden = gelu(&layer.hidden.forward(&second.forward(&x)?)?)?;
            x = (&x + layer.output.forward(&hidden)?)?;
        }
        self.output.forward(&x.mean(1)?)
    }
}
