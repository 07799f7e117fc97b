use candle_core::{Result, Tensor};
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
        let mut width = inputs;
        let mut layers = Vec::with_capacity(hidden.len());
        for (i, next) in hidden.iter().enumerate() {
            layers.push(Linear::new(width, *next, vars.pp("hidden").pp(i))?);
            width = *next;
        }
        Ok(Self {
            hidden: layers,
            output: Linear::new(width, classes, vars.pp("output"))?,
        })
    }
}

impl Module for Dense {
    fn forward(&self, inputs: &Tensor) -> Result<Tensor> {
        let mut x = inputs.reshape((inputs.dim(0)?, ()))?;
        for layer in &self.hidden {
            x = layer.forward_relu(&x)?;
        }
        self.output.forward(&x)
    }
}
