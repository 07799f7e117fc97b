//! The models that come with Flambeau. Their outputs are what the job's loss takes: logits, or numbers.

mod cnn;
mod dense;
mod logistic;
mod mlp;
mod mobilenet;
mod normalized;
mod resnet;
mod softmax;

pub use cnn::Cnn;
pub use logistic::Logistic;
pub use mlp::Mlp;
pub use mobilenet::MobileNetV2;
pub use resnet::ResNet20;
pub use softmax::Softmax;
