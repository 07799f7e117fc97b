//! The worker: batch, pull, forward and backward in candle, push. candle lives here and only here.

pub mod input;
pub mod model;
pub mod models;
pub mod variables;
