//! The models that come with Flambeau. All are classifiers: logits, cross entropy.

mod cnn;
mod mlp;
mod softmax;

use candle_core::{Result, Tensor};
use candle_nn::{Linear, Module, VarBuilder, linear};

pub use cnn::Cnn;
pub use mlp::Mlp;
pub use softmax::Softmax;

/// Fully connected layers with ReLU between them: `hidden.0`, `hidden.1`, ..., `output`. Takes
/// samples of any shape and flattens them.
struct Dense {
    hidden: Vec<Linear>,
    output: Linear,
}

impl Dense {
    fn new(inputs: usize, hidden: &[usize], classes: usize, vars: &VarBuilder) -> Result<Self> {
        let mut width = inputs;
        let mut layers = Vec::with_capacity(hidden.len());
        for (i, next) in hidden.iter().enumerate() {
            layers.push(linear(width, *next, vars.pp("hidden").pp(i))?);
            width = *next;
        }
        Ok(Self {
            hidden: layers,
            output: linear(width, classes, vars.pp("output"))?,
        })
    }
}

impl Module for Dense {
    fn forward(&self, inputs: &Tensor) -> Result<Tensor> {
        let mut x = inputs.flatten_from(1)?;
        for layer in &self.hidden {
            x = layer.forward(&x)?.relu()?;
        }
        self.output.forward(&x)
    }
}
