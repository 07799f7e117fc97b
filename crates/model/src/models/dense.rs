use candle_core::{Result, Tensor, bail};
use candle_nn::{Module, VarBuilder};
use nn::Linear;

/// Fully connected layers with ReLU between them: `hidden.0`, `hidden.1`, ..., `output`. Takes
/// samples of any shape and flattens them.
pub(super) struct Dense {
    hidden: Vec<Linear>,
    output: Linear,
}

impl Dense {
    pub(super) fn new(
        inputs: usize,
        hidden: &[usize],
        classes: usize,
        vars: &VarBuilder,
    ) -> Result<Self> {
        Self::in_blocks(inputs, hidden, classes, |_| Ok(vars.clone()))
    }

    /// Builds each layer with the variables that `vars` returns for the layer's index.
    pub(super) fn in_blocks<'v>(
        inputs: usize,
        hidden: &[usize],
        classes: usize,
        vars: impl Fn(usize) -> Result<VarBuilder<'v>>,
    ) -> Result<Self> {
        let mut width = inputs;
        let mut layers = Vec::with_capacity(hidden.len());
        for (i, next) in hidden.iter().enumerate() {
            layers.push(Linear::new(width, *next, vars(i)?.pp("hidden").pp(i))?);
            width = *next;
        }
        Ok(Self {
            hidden: layers,
            output: Linear::new(width, classes, vars(hidden.len())?.pp("output"))?,
        })
    }

    /// Returns the number of layers.
    pub(super) fn layers(&self) -> usize {
        self.hidden.len() + 1
    }

    /// Returns the outputs of a layer. The first one flattens its inputs.
    pub(super) fn layer(&self, number: usize, inputs: &Tensor) -> Result<Tensor> {
        let flat;
        let inputs = match number {
            0 => {
                flat = inputs.reshape((inputs.dim(0)?, ()))?;
                &flat
            }
            _ => inputs,
        };
        match self.hidden.get(number) {
            Some(layer) => layer.forward_relu(inputs),
            None if number == self.hidden.len() => self.output.forward(inputs),
            None => bail!("there is no layer {number} of {}", self.layers()),
        }
    }
}

impl Module for Dense {
    fn forward(&self, inputs: &Tensor) -> Result<Tensor> {
        let mut x = self.layer(0, inputs)?;
        for number in 1..self.layers() {
            x = self.layer(number, &x)?;
        }
        Ok(x)
    }
}
