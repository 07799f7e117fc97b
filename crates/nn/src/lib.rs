//! Layers and losses for candle models, with correct gradients and fast on the CPU. Your own models may use them beside
//! candle's.
//!
//! Some of candle's own layers have a wrong gradient (`max_pool2d`) or none (`LayerNorm`, `softmax_last_dim`). Others
//! read and write an activation once for the bias and again for ReLU, compute the gradient of each weight transposed,
//! rearrange pictures for a convolution, and add each gradient to zeros. On the CPU, this costs as much time as the
//! arithmetic, or several times as much. The layers here have their own forward and backward passes on the CPU, in
//! `f32` and `f64`, and [`backward()`] stores the gradients of variables as the layers compute them. Elsewhere (on a
//! GPU, in other types) the same functions call candle's operations, and avoid those with wrong gradients. Convolutions
//! of `bf16` and `f16` on the CPU are computed here too, in `f32`.
//!
//! Gradients are checked against finite differences and against PyTorch. With the same number of threads, a
//! computation gives the same bits in each run.
//!
//! ```
//! # // The names that authors of models know, which come from a crate above this one.
//! # mod flambeau { pub use {candle_core, flambeau_nn as nn}; }
//! use flambeau::candle_core::{DType, Device::Cpu, Tensor, Var};
//! use flambeau::nn::{backward, cross_entropy, linear_relu};
//!
//! # fn main() -> flambeau::candle_core::Result<()> {
//! let weight = Var::randn(0f32, 0.1, (2, 3), &Cpu)?;
//! let bias = Var::zeros(2, DType::F32, &Cpu)?;
//! let inputs = Tensor::randn(0f32, 1.0, (4, 3), &Cpu)?;
//! let targets = Tensor::new(&[0u32, 1, 1, 0], &Cpu)?;
//!
//! let loss = cross_entropy(&linear_relu(&inputs, &weight, &bias)?, &targets)?;
//! let gradients = backward(&loss)?;
//! assert_eq!(gradients.get(&weight).map(Tensor::dims), Some(&[2, 3][..]));
//! # Ok(())
//! # }
//! ```

mod activation;
mod attention;
mod autocast;
mod backward;
mod conv;
mod dropout;
mod embedding;
mod linear;
mod loss;
mod norm;
mod operation;
mod pairs;
mod pool;
mod replicas;
mod simd;
mod softmax;
mod storage;
mod windows;

pub use activation::{Activation, add_relu, gelu, relu, relu6};
pub use attention::Attention;
pub use autocast::{autocast, matmul};
pub use backward::{Watch, backward, backward_from, backward_watched};
pub use conv::{Conv2d, conv2d, conv2d_relu};
pub use dropout::{DropoutStream, dropout};
pub use embedding::{Embedding, lookup};
pub use linear::{Linear, linear, linear_gelu, linear_relu};
pub use loss::{
    binary_cross_entropy, binary_cross_entropy_of_each, cross_entropy, cross_entropy_smooth,
    mean_absolute_error, mean_squared_error,
};
pub use norm::{
    BatchNorm, BatchNormConfig, FROZEN_STATISTICS, GroupNorm, LayerNorm, RunningStatistics,
};
pub use pairs::{sum_of_pairs, sum_of_vectors};
pub use pool::{Pool2d, avg_pool2d, global_avg_pool2d, max_pool2d};
pub use replicas::{Replicas, synchronised};
pub use softmax::softmax;
