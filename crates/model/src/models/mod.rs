//! The built-in models. Their outputs are what the job's loss takes: logits, or numbers.

mod cnn;
mod deepfm;
mod dense;
mod dlrm;
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
mod two_tower;
mod wide_deep;

pub use cnn::Cnn;
pub use deepfm::DeepFm;
pub use dlrm::Dlrm;
pub use factorization::FactorizationMachine;
pub use logistic::Logistic;
pub use mlp::Mlp;
pub use mobilenet::MobileNetV2;
pub use resnet::ResNet;
pub use softmax::Softmax;
pub use transformer::Transformer;
pub use two_tower::TwoTower;
pub use wide_deep::WideDeep;
