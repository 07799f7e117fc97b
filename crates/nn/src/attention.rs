//! Attention.

use candle_core::{D, Result, Tensor, bail};
use candle_nn::VarBuilder;

use crate::autocast::matmul;
use crate::linear::Linear;
use crate::softmax::softmax;

/// Multi-head attention of a sequence to itself: `projection`, which makes queries, keys and values of the inputs (in
/// this order, as PyTorch's `in_proj`), and `output`.
#[derive(Clone, Debug)]
pub struct Attention {
    projection: Linear,
    output: Linear,
    heads: usize,
}

impl Attention {
    /// Asks `vars` for the variables of `projection` and `output`, with the initial values of [`Linear`].
    ///
    /// # Errors
    /// If the heads do not divide the size, or those of `vars`.
    pub fn new(size: usize, heads: usize, vars: VarBuilder) -> Result<Self> {
        if heads == 0 || !size.is_multiple_of(heads) {
            bail!("{heads} heads do not divide a size of {size}");
        }
        Ok(Self {
            projection: Linear::new(size, 3 * size, vars.pp("projection"))?,
            output: Linear::new(size, size, vars.pp("output"))?,
            heads,
        })
    }

    /// Returns what each position of inputs of shape `[samples, length, size]` takes from the others. The mask, which
    /// broadcasts to `[samples, heads, length, length]`, is added before the softmax: `-inf` hides a key from a query.
    ///
    /// # Errors
    /// If the shapes do not fit, or candle's.
    pub fn forward(&self, inputs: &Tensor, mask: Option<&Tensor>) -> Result<Tensor> {
        let (samples, length, size) = inputs.dims3()?;
        let of_head = size / self.heads;
        let projected = self.projection.forward(inputs)?;
        let projected = projected.reshape((samples, length, 3, self.heads, of_head))?;
        // [3, samples, heads, length, size of a head]
        let projected = projected.permute((2, 0, 3, 1, 4))?.contiguous()?;
        let (queries, keys, values) = (projected.get(0)?, projected.get(1)?, projected.get(2)?);
        let queries = (queries * (of_head as f64).powf(-0.5))?;
        let mut scores = matmul(&queries, &keys.t()?)?;
        if let Some(mask) = mask {
            scores = (&scores + mask.broadcast_as(scores.shape())?)?;
        }
        let taken = matmul(&softmax(&scores)?, &values)?;
        let taken = taken.transpose(1, 2)?.flatten_from(D::Minus2)?;
        self.output.forward(&taken)
    }
}
