//! Flambeau trains [candle](candle_core) models on many machines: sharded parameter servers hold
//! the variables, workers compute gradients, a coordinator knows which processes are live.
//!
//! This crate is the command line and the library interface. A program with its own model is also its own worker
//! daemon, with the whole command line:
//!
//! ```no_run
//! use flambeau::{App, Batch, Model, Pass, Setup};
//! use flambeau::candle_core::{Result, Tensor};
//! use flambeau::candle_nn::{self, Linear, Module, VarBuilder};
//!
//! struct Straight(Linear);
//!
//! impl Model for Straight {
//!     fn new(setup: &Setup, vars: VarBuilder) -> Result<Self> {
//!         let (features, outputs) = (setup.features()?, setup.outputs());
//!         Ok(Self(candle_nn::linear(features, outputs, vars.pp("line"))?))
//!     }
//!
//!     fn forward(&self, batch: &Batch, _: &Pass) -> Result<Tensor> {
//!         self.0.forward(&batch.input()?.flatten_from(1)?)
//!     }
//! }
//!
//! fn main() -> std::process::ExitCode {
//!     App::new().model::<Straight>("straight").main()
//! }
//! ```

// The command line:
// - `app`: the subcommands, and the module that runs each; `command`: the parts that several of them have
// - `train`: a whole cluster on this machine; `cluster`: its processes; `progress`: its progress bars
// - `fit`: training from a program
// - `jobs`: the jobs of a long-lived cluster
// - `status`, `devices`, `table`, `checkpoint`, `certs`, `job`: for operators
// - `evaluator`: evaluates checkpoints beside the training
// - `eval`, `plot`, `report`, `metrics`: a run's model, curves, report and records after its end
// - `scorer`: a trained model for online inference
// - `bench`: measurements
// - `tf_task`: the process that `TF_CONFIG` describes
// - `error`: the errors of commands

mod app;
mod bench;
mod certs;
mod checkpoint;
mod cluster;
mod command;
mod devices;
mod error;
mod eval;
mod evaluator;
mod fit;
mod job;
mod jobs;
mod metrics;
mod plot;
mod predict;
mod progress;
mod report;
mod scorer;
mod status;
mod table;
mod tf_task;
mod train;

pub use app::App;
pub use candle_core;
pub use candle_nn;
pub use error::CommandError as Error;
pub use fit::{Callback, Control, Epoch, History, Progress, Trainer, on_evaluation};
pub use nn;
pub use ps_client::lookup::{FoundRows, Lookup, LookupError};
pub use scorer::{Scorer, Scoring};
pub use shared_proto::job::Job;
pub use shared_proto::security::{Security, SecurityFiles};
pub use shared_proto::step::Want;
pub use shared_proto::table::{
    Admission, Age, Capacity, Eviction, EvictionOrder, Initializer, RowOptimizer, Storage,
};
pub use worker::input::{
    Column, DataSetup, Dataset, Field, Fitted, InMemory, InputError, Order, Purpose, Samples,
    Signature, Source, Values,
};
pub use worker::loops::{Distributed, LoopError, OptimizerId, Reduce, Replica, Strategy};
pub use worker::model::{
    Batch, Feature, Loss, Metric, Metrics, Model, Objective, Pass, Ragged, Setup, Stages,
    forward_blocks,
};
pub use worker::tables::{Embeddings, Pool, Table};

/// The settings of a [`Job`], as its file has them.
pub mod settings {
    pub use shared_proto::job::*;
}

/// The README's programs, compiled by the tests.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;

/// The programs of the page on tables, compiled by the tests.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/tables.md")]
struct TablesPage;
