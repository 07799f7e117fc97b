use candle_core::{DType, Result, Tensor, bail};
use candle_nn::{Init, VarBuilder};
use nn::{Attention, DropoutStream, Embedding, LayerNorm, Linear, dropout};

use super::options::Options;
use crate::{Batch, Model, Pass, Setup, forward_blocks};

/// The number added to the variance in normalisations.
const EPSILON: f64 = 1e-5;

/// The largest width of a layer, and the most layers.
const WIDEST: usize = 1 << 16;
const DEEPEST: usize = 1024;

/// The standard deviation of the initial values of ids' vectors and of positions.
const SPREAD: f64 = 0.02;

/// A transformer encoder (Vaswani et al., "Attention Is All You Need", NeurIPS 2017, section 3) for sequences of one
/// fixed length: vectors of shape `[length, features]`, or ids of shape `[length]`. Each layer normalises its inputs
/// (Xiong et al., "On Layer Normalization in the Transformer Architecture", ICML 2020). The output is computed from the
/// mean over the positions.
///
/// Settings in `model.options`: `size` (128), `heads` (4), `layers` (2), `feed_forward` (4 times the size), `dropout`
/// (0). Variables: `input` (a linear layer, or a table of ids), `position`, `layer.L.attention_norm`, `.attention`,
/// `.feed_norm`, `.expand`, `.project`, `norm` and `output`. Each layer is a block of the chain; the first block also
/// has `input` and `position`, and the last block also has `norm` and `output`.
pub struct Transformer {
    input: Input,
    position: Tensor,
    layers: Vec<Layer>,
    norm: LayerNorm,
    output: Linear,
    dropout: f64,
}

/// The first layer.
enum Input {
    Vectors(Linear),
    Ids(Embedding),
}

impl Model for Transformer {
    fn new(setup: &Setup, vars: VarBuilder) -> Result<Self> {
        let options = Options::new(
            setup,
            &["size", "heads", "layers", "feed_forward", "dropout"],
        )?;
        let size = options.count("size", 128, WIDEST)?;
        let heads = options.count("heads", 4, WIDEST)?;
        let inner = options.count("feed_forward", 4 * size, 4 * WIDEST)?;
        let spread = Init::Randn {
            mean: 0.0,
            stdev: SPREAD,
        };
        let count = options.count("layers", 2, DEEPEST)?;
        let vars_of = |block| setup.block(block, count, &vars);
        let (begin, end) = (vars_of(0)?, vars_of(count - 1)?);
        let shape = setup.sample_shape()?;
        let categories = setup.data.inputs[0].categories;
        let (length, input) = match (shape, categories) {
            (&[length], Some(categories)) => {
                let (rows, vars) = (categories as usize, begin.pp("input"));
                let table = Embedding::with_init(rows, size, spread, vars)?;
                (length, Input::Ids(table))
            }
            (&[length, features], None) => {
                let linear = Linear::new(features, size, begin.pp("input"))?;
                (length, Input::Vectors(linear))
            }
            _ => bail!(
                "it takes samples of vectors, of shape [length, features], or of ids, of shape [length], but these are {}",
                setup.data.inputs[0]
            ),
        };
        let layers = (0..count).map(|layer| {
            let vars = vars_of(layer)?.pp("layer").pp(layer);
            Layer::new(size, heads, inner, vars)
        });
        Ok(Self {
            input,
            position: begin.get_with_hints((length, size), "position", spread)?,
            layers: layers.collect::<Result<_>>()?,
            norm: LayerNorm::new(size, EPSILON, end.pp("norm"))?,
            output: Linear::new(size, setup.outputs(), end.pp("output"))?,
            dropout: options.share("dropout", 0.0)?,
        })
    }

    fn forward(&self, batch: &Batch, pass: &Pass) -> Result<Tensor> {
        forward_blocks(self, batch, pass)
    }

    fn blocks(&self) -> usize {
        self.layers.len()
    }

    fn forward_block(
        &self,
        block: usize,
        x: Option<&Tensor>,
        batch: &Batch,
        pass: &Pass,
    ) -> Result<Tensor> {
        let mut stream = pass.training.then(|| DropoutStream::from(pass.random()));
        let mut drop = |x: Tensor| dropout(&x, self.dropout, stream.as_mut());
        let x = match x {
            Some(x) => x.clone(),
            None => drop(self.embed(batch.input()?)?)?,
        };
        let y = self.layers[block].forward(&x, &mut drop)?;
        match block + 1 == self.layers.len() {
            true => self.output.forward(&self.norm.forward(&y)?.mean(1)?),
            false => Ok(y),
        }
    }
}

impl Transformer {
    /// Returns the inputs of the first layer.
    fn embed(&self, input: &Tensor) -> Result<Tensor> {
        let x = match &self.input {
            Input::Vectors(linear) => linear.forward(input)?,
            Input::Ids(table) => table.forward(&input.to_dtype(DType::U32)?)?,
        };
        x.broadcast_add(&self.position)
    }
}

/// Attention, and two linear layers with GELU between them; the inputs of each are added to its outputs.
struct Layer {
    attention_norm: LayerNorm,
    attention: Attention,
    feed_norm: LayerNorm,
    expand: Linear,
    project: Linear,
}

impl Layer {
    fn new(size: usize, heads: usize, inner: usize, vars: VarBuilder) -> Result<Self> {
        Ok(Self {
            attention_norm: LayerNorm::new(size, EPSILON, vars.pp("attention_norm"))?,
            attention: Attention::new(size, heads, vars.pp("attention"))?,
            feed_norm: LayerNorm::new(size, EPSILON, vars.pp("feed_norm"))?,
            expand: Linear::new(size, inner, vars.pp("expand"))?,
            project: Linear::new(inner, size, vars.pp("project"))?,
        })
    }

    fn forward(
        &self,
        x: &Tensor,
        drop: &mut impl FnMut(Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let taken = self
            .attention
            .forward(&self.attention_norm.forward(x)?, None)?;
        let x = (x + drop(taken)?)?;
        let inner = self.expand.forward_gelu(&self.feed_norm.forward(&x)?)?;
        &x + drop(self.project.forward(&inner)?)?
    }
}
