//! Flambeau trains [candle](candle_core) models on many machines: sharded parameter servers hold
//! the variables, workers compute gradients, a coordinator knows which processes are live.
//!
//! This crate is the command line and the library interface. A program with its own model is also its own worker
//! daemon, with the whole command line:
//!
//! ```no_run
//! use flambeau::{App, Batch, Model, Setup};
//! use flambeau::candle_core::{Result, Tensor};
//! use flambeau::candle_nn::{self, Linear, Module, VarBuilder};
//!
//! struct Straight(Linear);
//!
//! impl Model for Straight {
//!     fn new(setup: &Setup, vars: VarBuilder) -> Result<Self> {
//!         let features = setup.sample_shape.iter().product();
//!         Ok(Self(candle_nn::linear(features, setup.classes, vars.pp("line"))?))
//!     }
//!
//!     fn loss(&self, batch: &Batch) -> Result<Tensor> {
//!         let logits = self.0.forward(&batch.inputs.flatten_from(1)?)?;
//!         candle_nn::loss::cross_entropy(&logits, &batch.targets)
//!     }
//! }
//!
//! fn main() -> std::process::ExitCode {
//!     App::new().model::<Straight>("straight").main()
//! }
//! ```

mod app;
mod bench;
mod certs;
mod checkpoint;
mod cluster;
mod error;
mod eval;
mod metrics;
mod plot;
mod progress;
mod status;
mod train;

pub use app::App;
pub use candle_core;
pub use candle_nn;
pub use worker::input::{DataSetup, Dataset, InMemory, InputError, Pass, Samples, Source};
pub use worker::model::{Batch, Metrics, Model, Setup, classification_metrics};

/// The README's programs, compiled by the tests.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
