//! The models that come with Flambeau. All are classifiers: logits, cross entropy.

mod cnn;
mod dense;
pub mod layers;
mod mlp;
mod softmax;

pub use cnn::Cnn;
pub use mlp::Mlp;
pub use softmax::Softmax;
