//! The models that come with Flambeau. Their outputs are what the job's loss takes: logits, or numbers.

mod cnn;
mod dense;
mod factorization;
mod inputs;
mod logistic;
mod mlp;
mod mobilenet;
mod normalized;
mod options;
mod resnet;
mod softmax;
mod transformer;

pub use cnn::Cnn;
pub use factorization::FactorizationMachine;
pub use logistic::Logistic;
pub use mlp::Mlp;
pub use mobilenet::MobileNetV2;
pub use resnet::ResNet;
pub use softmax::Softmax;
pub use transformer::Transformer;
