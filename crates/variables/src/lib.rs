//! A model's variables: values, gradients and updates in candle's memory.
//!
//! - `set`: the variables by number, their values and how they are overwritten
//! - `initial`: initial values from a seed
//! - `gradients`: the gradients of a step; `buckets`: the vectors in which they are sent
//! - `optimizer`: updates by a worker that keeps all values itself; `slots`: the optimizer's slots of some elements;
//!   `update`: an update in candle's memory; `on_device`: gradients, slots and updates in the memory of a GPU
//! - `files`: safetensors files
//! - `pretrained`: initial values from files of other models and programs
//! - `error`: the errors of all of these
//! - `memory`: reads and writes of candle's memory; `gpu_copies`: reads and writes of a GPU's memory

mod buckets;
mod error;
mod files;
#[cfg(feature = "cuda")]
mod gpu_copies;
mod gradients;
mod initial;
mod memory;
mod on_device;
mod optimizer;
mod pretrained;
mod set;
mod slots;
mod update;

pub use buckets::{BucketPlan, BucketedGradients};
pub use error::VariablesError;
pub use files::{digest_of, read};
pub use gradients::{Measured, Trained, mean_gradients, sum_of_squares, sum_of_squares_times};
pub use memory::with_elements;
pub use on_device::{DeviceGradients, MeasuredOnDevice, UpdateGroups};
pub use optimizer::{HeldSlots, LocalOptimizer};
pub use set::Variables;
pub use slots::Places;
