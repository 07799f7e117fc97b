//! Models: their interface, and the built-in models.
//!
//! - [`Model`], [`Setup`], [`Pass`]: the interface; [`Objective`], [`Loss`], [`Metrics`]: what a model is trained for
//! - [`input`]: conversion of the samples of the crate `data` to batches
//! - [`tables`]: embedding tables in a model
//! - [`models`]: the built-in models; [`registry`]: the models that a job can name
//! - [`candle_error`]: the text of candle's errors
//!
//! A model of your own is a struct with candle layers and an implementation of [`Model`]: `new` takes its variables
//! from a [`VarBuilder`], `forward` computes outputs. Flambeau does the rest: the loss, metrics, initial values,
//! gradients, pulling and pushing.
//!
//! ```
//! use candle_core::{DType, Device, Result, Tensor};
//! use candle_nn::{Linear, Module, VarBuilder, VarMap};
//! use flambeau_model::input::{Field, Signature};
//! use flambeau_model::{Batch, Model, Objective, Pass, Setup};
//! use flambeau_model::registry::Registry;
//! use flambeau_model::tables::Tables;
//!
//! struct Straight(Linear);
//!
//! impl Model for Straight {
//!     fn new(setup: &Setup, vars: VarBuilder) -> Result<Self> {
//!         // Its variables: "line.weight" and "line.bias".
//!         let (features, outputs) = (setup.features()?, setup.outputs());
//!         Ok(Self(candle_nn::linear(features, outputs, vars.pp("line"))?))
//!     }
//!
//!     fn forward(&self, batch: &Batch, _: &Pass) -> Result<Tensor> {
//!         self.0.forward(&batch.input()?.flatten_from(1)?)
//!     }
//! }
//!
//! # fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
//! let registry = Registry::builtin().model::<Straight>("straight");
//!
//! let settings = shared_proto::job::Model::default();
//! let data = Signature {
//!     inputs: vec![Field::numbers("image", vec![2, 2])],
//!     targets: vec![Field::category("label", 3)],
//! };
//! let objective = Objective::new(&Default::default(), &data)?;
//! let tables = Tables::default();
//! let setup = Setup { settings: &settings, data: &data, objective: &objective, tables: &tables, stages: &Default::default() };
//! let variables = VarMap::new();
//! let vars = VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu);
//! let model = registry.build("straight", &setup, vars)?;
//!
//! let inputs = Tensor::new(&[[[0.1f32, 0.2], [0.3, 0.4]], [[1.0, 0.0], [0.0, 1.0]]], &Device::Cpu)?;
//! let labels = Tensor::new(&[0u32, 2], &Device::Cpu)?;
//! let batch = Batch::new(2).with_input("image", inputs).with_target("label", labels);
//! let pass = Pass::training(&objective, 1, 0, 0);
//! let loss = model.loss(&model.forward(&batch, &pass)?, &batch, &pass)?;
//! let gradients = loss.backward()?;
//! assert!(variables.all_vars().iter().all(|variable| gradients.get(variable).is_some()));
//! # Ok(())
//! # }
//! ```

mod blocks;
pub mod candle_error;
pub mod input;
mod loss;
mod metric;
mod metrics;
pub mod models;
mod objective;
mod pairs;
mod pass;
pub mod registry;
mod scores;
pub mod tables;

use candle_core::{Error, Result, Tensor, bail};
use candle_nn::VarBuilder;
use shared_proto::job::Job;
use shared_proto::step::Want;

use crate::candle_error::plain;
use crate::input::Signature;
use crate::tables::{Embeddings, Table, Tables};

pub use crate::input::{Batch, Feature, Ragged};
pub use blocks::{Stages, forward_blocks};
pub use loss::Loss;
pub use metric::Metric;
pub use metrics::{Metrics, Name as MetricName};
pub use objective::Objective;
pub use pass::Pass;

/// The settings with which a model is built.
#[derive(Clone, Copy, Debug)]
pub struct Setup<'a> {
    /// The job's `[model]` table. Settings of the model's own are in its `options`.
    pub settings: &'a shared_proto::job::Model,
    /// The fields of each sample.
    pub data: &'a Signature,
    /// The loss and the metrics of the job.
    pub objective: &'a Objective,
    /// The tables that the model asks for.
    pub tables: &'a Tables,
    /// The stages that the model's blocks are cut into.
    pub stages: &'a Stages,
}

impl<'a> Setup<'a> {
    /// Builds a model of a job outside of a training, for a training loop of your own. Calls `build` with the setup for
    /// data with these fields.
    ///
    /// # Errors
    /// Those of `build`. A model with embedding tables is refused, because the rows are on the servers of a training.
    pub fn with<M>(
        job: &Job,
        data: &Signature,
        build: impl FnOnce(&Setup) -> Result<M>,
    ) -> Result<M> {
        let objective = Objective::new(&job.objective, data);
        let objective = objective.map_err(|error| Error::msg(error.to_string()))?;
        let (tables, stages) = (Tables::new(job), Stages::default());
        let model = build(&Setup {
            settings: &job.model,
            data,
            objective: &objective,
            tables: &tables,
            stages: &stages,
        })?;
        match tables.into_model().specs().first() {
            None => Ok(model),
            Some(table) => Err(Error::msg(format!(
                "the model has the table {:?}, whose rows the servers of a training keep; use a Trainer, or nn::Embedding in place of the table",
                table.name
            ))),
        }
    }

    /// Returns the shape of one sample of the only input, without the batch dimension.
    ///
    /// # Errors
    /// If there is not exactly one input, or if it is ragged.
    pub fn sample_shape(&self) -> Result<&'a [usize]> {
        let input = self
            .data
            .input()
            .map_err(|error| Error::msg(error.to_string()))?;
        match input.ragged {
            false => Ok(&input.shape),
            true => Err(Error::msg(format!(
                "input {:?} has any number of values in each sample; this model takes a dense input",
                input.name
            ))),
        }
    }

    /// Returns the number of values in one sample of the only input.
    ///
    /// # Errors
    /// As [`Self::sample_shape`].
    pub fn features(&self) -> Result<usize> {
        Ok(self.sample_shape()?.iter().product())
    }

    /// Asks for an embedding table. The rows of the table are on the servers; a step receives the rows of its samples.
    ///
    /// # Errors
    /// If the settings are not possible, if the data lacks a column of the table, or if the model already has a table
    /// of this name.
    pub fn table(&self, name: &str, table: Table) -> Result<Embeddings> {
        self.tables.add(name, &table, self.data)
    }

    /// Returns the variables for block `block`, counted from 0, of `of` blocks: those of `vars`, on the device of the
    /// block's stage. A chain of blocks asks for all of its variables with this method.
    ///
    /// # Errors
    /// If there is no such block, if the model has asked with a different number of blocks before, or if there are
    /// fewer blocks than stages.
    pub fn block<'v>(
        &self,
        block: usize,
        of: usize,
        vars: &VarBuilder<'v>,
    ) -> Result<VarBuilder<'v>> {
        self.stages.block(block, of, vars)
    }

    /// Returns the number of outputs that the loss wants for each sample: one logit for each class, or one number.
    pub fn outputs(&self) -> usize {
        self.objective.outputs
    }
}

/// A model that can be trained: a struct with candle layers. `new` takes its variables from a [`VarBuilder`], and
/// `forward` computes outputs. Flambeau adds the loss, metrics, initial values, gradients and updates. While one thread
/// computes with the model, another calls [`Model::wants`] for the next batches.
///
/// ```
/// # // The names that authors of models know, which come from a crate above this one.
/// # mod flambeau { pub use {candle_core, candle_nn, nn, flambeau_model::*}; }
/// use flambeau::candle_core::{Result, Tensor};
/// use flambeau::candle_nn::VarBuilder;
/// use flambeau::nn::Linear;
/// use flambeau::{Batch, Model, Pass, Setup};
///
/// struct TwoLayers {
///     hidden: Linear,
///     output: Linear,
/// }
///
/// impl Model for TwoLayers {
///     fn new(setup: &Setup, vars: VarBuilder) -> Result<Self> {
///         Ok(Self {
///             hidden: Linear::new(setup.features()?, 64, vars.pp("hidden"))?,
///             output: Linear::new(64, setup.outputs(), vars.pp("output"))?,
///         })
///     }
///
///     fn forward(&self, batch: &Batch, _: &Pass) -> Result<Tensor> {
///         let inputs = batch.input()?.flatten_from(1)?;
///         self.output.forward(&self.hidden.forward_relu(&inputs)?)
///     }
/// }
/// # fn main() {}
/// ```
///
/// A model can be a *chain of blocks*, in which each block takes the outputs of the block before. Such a model can be
/// cut into stages on several devices (`strategy.name = "model-parallel"`). It returns its number of blocks, asks for
/// the variables of each block with [`Setup::block`], and computes one block at a time:
///
/// ```
/// # mod flambeau { pub use {candle_core, candle_nn, nn, flambeau_model::*}; }
/// use flambeau::candle_core::{Result, Tensor};
/// use flambeau::candle_nn::VarBuilder;
/// use flambeau::nn::Linear;
/// use flambeau::{Batch, Model, Pass, Setup, forward_blocks};
///
/// const BLOCKS: usize = 3;
///
/// struct Chain(Vec<Linear>);
///
/// impl Model for Chain {
///     fn new(setup: &Setup, vars: VarBuilder) -> Result<Self> {
///         let mut width = setup.features()?;
///         let mut layers = Vec::new();
///         for block in 0..BLOCKS {
///             let vars = setup.block(block, BLOCKS, &vars)?;
///             let next = if block + 1 < BLOCKS { 32 } else { setup.outputs() };
///             layers.push(Linear::new(width, next, vars.pp("layer").pp(block))?);
///             width = next;
///         }
///         Ok(Self(layers))
///     }
///
///     fn forward(&self, batch: &Batch, pass: &Pass) -> Result<Tensor> {
///         forward_blocks(self, batch, pass)
///     }
///
///     fn blocks(&self) -> usize {
///         BLOCKS
///     }
///
///     fn forward_block(&self, block: usize, x: Option<&Tensor>, batch: &Batch, _: &Pass) -> Result<Tensor> {
///         let x = match x {
///             Some(x) => x.clone(),
///             None => batch.input()?.flatten_from(1)?,
///         };
///         match block + 1 == BLOCKS {
///             true => self.0[block].forward(&x),
///             false => self.0[block].forward_relu(&x),
///         }
///     }
/// }
/// # fn main() {}
/// ```
pub trait Model: Send + Sync + 'static {
    /// Builds the model with variables that it takes from `vars`. The variables are `f32`. Their names and shapes must
    /// depend on `setup` alone, because all workers share the variables.
    ///
    /// A variable is averaged if its name begins with `running_` after the last dot: the model sets it while it
    /// computes, as candle's batch normalisation does, and the mean of the workers' values becomes its value.
    ///
    /// # Errors
    /// If the model cannot be built, for example for samples of a wrong shape.
    fn new(setup: &Setup, vars: VarBuilder) -> Result<Self>
    where
        Self: Sized;

    /// Returns the outputs for a batch: of shape `[samples, classes]` for cross entropy, `[samples]` or `[samples, 1]`
    /// for a binary target or a number.
    ///
    /// # Errors
    /// candle's.
    fn forward(&self, batch: &Batch, pass: &Pass) -> Result<Tensor>;

    /// Returns the number of blocks in the model's chain of blocks. The default is 1: the model cannot be cut.
    fn blocks(&self) -> usize {
        1
    }

    /// Returns the outputs of a block. The first block computes them from the batch alone, and each other block from
    /// `x`, the outputs of the block before. The outputs of the last block are those of [`Self::forward`]. Blocks may
    /// be computed on different threads, and the batch may be a part of a larger one. A block must not use trained
    /// variables of another block, which may be on another device; [`Self::loss`] may use those of the last block
    /// alone. A model with several blocks implements this method, and calls [`forward_blocks`] in [`Self::forward`].
    ///
    /// # Errors
    /// candle's.
    fn forward_block(
        &self,
        _block: usize,
        _x: Option<&Tensor>,
        batch: &Batch,
        pass: &Pass,
    ) -> Result<Tensor> {
        if self.blocks() > 1 {
            bail!(
                "the model says that it has {} blocks, and does not implement `Model::forward_block`",
                self.blocks()
            );
        }
        self.forward(batch, pass)
    }

    /// Returns the loss of these outputs, a scalar: the mean over the samples of the batch. The gradient of the loss is
    /// pushed, so the loss must depend on each trained variable. The default is the job's loss.
    ///
    /// # Errors
    /// candle's.
    fn loss(&self, outputs: &Tensor, batch: &Batch, pass: &Pass) -> Result<Tensor> {
        pass.objective.loss.of(outputs, batch)
    }

    /// Returns the values that a batch needs before [`Self::forward`], in addition to the dense variables, which every
    /// batch receives. By default there are none.
    fn wants(&self, _batch: &Batch) -> Vec<Want> {
        Vec::new()
    }

    /// Returns this model's name for a variable that files of another program call `foreign`, so that `model.init_from`
    /// can read its values; `None` if there is no such variable. By default, no foreign name is known.
    fn name_of(&self, _foreign: &str) -> Option<String> {
        None
    }

    /// Returns accumulators of the model's own metrics, with their names, for one evaluation. By default there are
    /// none.
    fn metrics(&self) -> Vec<(String, Box<dyn Metric>)> {
        Vec::new()
    }
}

/// The error of a model that cannot be built.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// No model has this name.
    #[error(
        "there is no model {name:?}; `model.name` may be {known}, or a model of your own once it is in the registry"
    )]
    Unknown {
        /// The name.
        name: String,
        /// The names that exist.
        known: String,
    },
    /// The model could not be built.
    #[error("model {name:?} cannot be built: {}", plain(source))]
    Build {
        /// The model's name.
        name: String,
        /// candle's error.
        source: candle_core::Error,
    },
}
