//! Flambeau trains [candle](candle_core) models on many machines: sharded parameter servers hold the variables, workers
//! compute gradients, and a coordinator tracks which processes are live.
//!
//! The book in `docs/book` is for authors of models. This page lists the interfaces.
//!
//! # A model and its data
//!
//! A [`Model`] creates its variables in `new` and computes outputs in `forward`. Data is a list of [`Column`]s in
//! memory ([`InMemory`]), one of the sources that a [`Job`] names, or a [`Source`] of your own. The loss and the
//! metrics follow from the data's target, unless the job's `[objective]` or the model defines others. [`nn`] has layers
//! and losses with checked gradients. [`Setup::table`] adds an embedding table.
//!
//! A program trains a model by one of three interfaces.
//!
//! # `fit`, `evaluate`, `predict`
//!
//! A [`Trainer`] trains a job within the process, also in a test, and returns the measurements as a [`History`].
//! [`Callback`]s receive each evaluation and may stop the training.
//!
//! ```
//! use flambeau::{Error, Job, Trainer};
//!
//! # fn main() -> Result<(), Error> {
//! let mut trainer = Trainer::new(Job::from_toml("epochs = 3")?);
//! let history = trainer.fit()?;
//! assert_eq!(history.values("accuracy").len(), 3);
//! assert_eq!(trainer.evaluate()?["accuracy"], history.last("accuracy").unwrap());
//! # Ok(())
//! # }
//! ```
//!
//! # A loop of your own
//!
//! A [`Strategy`] runs training steps that you write, on a replica of the model for each device. A model may have
//! several optimizers. The gradients are those of the mean loss over the samples of all replicas.
//!
//! ```
//! use flambeau::candle_core::{Device, Tensor};
//! use flambeau::candle_nn::{self, Module};
//! use flambeau::settings::Optimizer;
//! use flambeau::{LoopError, Reduce, Strategy};
//!
//! # fn main() -> Result<(), LoopError> {
//! let strategy = Strategy::mirrored("cpu,cpu")?;
//! let mut model = strategy.scope(1, |vars| candle_nn::linear(1, 1, vars))?;
//! let adam = model.optimizer("*", Optimizer::default())?;
//! let losses = model.run(|replica| {
//!     let x = Tensor::new(&[[1.0f32], [2.0]], replica.device())?;
//!     let loss = (replica.model().forward(&x)? - (&x * 3.0)?)?.sqr()?.mean_all()?;
//!     replica.minimize(adam, &loss, 2)?;
//!     loss.to_scalar::<f32>().map(f64::from)
//! })?;
//! println!("{}", strategy.reduce(Reduce::Mean, &losses)?);
//! # Ok(())
//! # }
//! ```
//!
//! # A program of all roles
//!
//! An [`App`] is Flambeau's command line with models and data sources of your own. The same program trains on one
//! machine (`my-program train`) and runs each daemon of a cluster (`my-program coordinator`, `ps-server`, `worker`).
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
//!
//! # A trained model
//!
//! [`Trainer::predict`] and `flambeau predict` compute outputs with a run's weights, a safetensors file that candle
//! reads too. A [`Scorer`] scores single requests, with the rows of tables on running servers. [`Lookup`] only reads
//! rows.

// The command line:
// - `app`: the subcommands, and the module that runs each; `command`: the parts that several of them have
// - `train`: a whole cluster on this machine; `cluster`: its processes; `progress`: its progress bars
// - `fit`: training from a program
// - `jobs`: the jobs of a long-lived cluster
// - `status`, `devices`, `table`, `checkpoint`, `certs`, `job`: for operators
// - `evaluator`: evaluates checkpoints beside the training; `find_learning_rate`: tries learning rates before it; `plot`: draws them
// - `eval`, `report`, `metrics`: a run's model, report and records after its end
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
mod describe;
mod devices;
mod error;
mod eval;
mod evaluator;
mod find_learning_rate;
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
pub use fit::{
    Callback, Control, Epoch, History, LearningRate, Progress, RunningCluster, TrainedModel,
    Trainer, on_evaluation,
};
#[doc(inline)]
pub use model::input::{
    Cell, CellWriter, Column, DataSetup, Dataset, Field, Fitted, InMemory, InputError, Order,
    OwnCell, Purpose, RowBatch, Samples, Scale, Signature, Source, TableRows, ValueType, Values,
    open_batches,
};
#[doc(inline)]
pub use model::tables::{Embeddings, Pool, Table};
#[doc(inline)]
pub use model::{
    Batch, Feature, Loss, Metric, Metrics, Model, Objective, Pass, Ragged, Setup, Stages,
    forward_blocks,
};
#[doc(inline)]
pub use network::security::{Security, SecurityFiles};
#[doc(inline)]
pub use nn;
#[doc(inline)]
pub use ps_client::lookup::{FoundRows, Lookup, LookupError};
pub use scorer::{Scorer, Scoring};
#[doc(inline)]
pub use shared_proto::job::Job;
#[doc(inline)]
pub use shared_proto::step::Want;
#[doc(inline)]
pub use shared_proto::table::{
    Admission, Age, Capacity, Eviction, EvictionOrder, Initializer, RowOptimizer, Storage,
};
#[doc(inline)]
pub use worker::alone::finder::{LearningRateCurve, RangeError, RatePoint, RateRange};
#[doc(inline)]
pub use worker::loops::{
    Distributed, HostError, Hosts, LoopError, OptimizerId, Reduce, Replica, Strategy,
};
#[doc(inline)]
pub use worker::tf_config::TfConfigError;

/// The settings of a [`Job`], as its file has them.
pub mod settings {
    #[doc(inline)]
    pub use shared_proto::job::*;
}
