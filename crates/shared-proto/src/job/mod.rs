//! The job: one TOML file, the same for all roles. A setting that the file leaves out has its default. An unknown
//! key is an error that names it.

mod columns;
mod data;
mod error;
mod groups;
mod monitor;
mod objective;
mod optimizer;
mod read;
mod require;
mod settings;
mod strategy;
mod table;
mod tables;
mod template;
#[cfg(test)]
mod tests;
mod validate;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

pub use columns::{ColumnType, Missing, MissingRule, Transform};
pub use data::{Data, LabelTransform, MissingLabel, Pictures, TargetKind};
pub use error::JobError;
pub use groups::{Group, matches_pattern};
pub use monitor::{Best, EarlyStopping, Evaluations, Goal, Plateau};
pub use objective::{LossName, Objective};
pub use optimizer::*;
pub use strategy::{
    BatchNorm, Correction, CrossDevice, PipelineSchedule, StageGroups, Strategy, StrategyName,
};
pub use table::{
    Admission, Age, Capacity, Eviction, EvictionOrder, Initializer, RowOptimizer, Storage,
    TableSpec,
};
pub use tables::TableSettings;
pub use template::template;

use self::settings::settings;
use crate::wire::Dtype;

/// The maximum number of parameter servers of a job.
pub const MOST_SERVERS: usize = 1 << 16;

settings! {
    /// A job: what is trained, and how. It is the content of a TOML file. A setting that is absent has its default; `flambeau job init` writes
    /// a file with all settings.
    ///
    /// ```
    /// # // The names that authors of models know, which come from a crate above this one.
    /// # mod flambeau {
    /// #     pub use flambeau_shared_proto::job::Job;
    /// #     pub mod settings { pub use flambeau_shared_proto::job::*; }
    /// # }
    /// use flambeau::Job;
    /// use flambeau::settings::{Adam, JobError, Mode, Optimizer};
    ///
    /// # fn main() -> Result<(), JobError> {
    /// let mut job = Job::from_toml("epochs = 3\nbatch_size = 64")?;
    /// job.strategy.mode = Mode::Sync;
    /// job.optimizer = Optimizer::Adam(Adam { learning_rate: 0.01, ..Adam::default() });
    /// job.validate()?;
    ///
    /// let wrong = Job::from_toml("epoch = 3").unwrap_err();
    /// assert!(wrong.to_string().contains("unknown field `epoch`"));
    /// # Ok(())
    /// # }
    /// ```
    Job {
        /// The name; messages of another job are refused.
        name: String = "flambeau".to_owned(),
        /// The seed of initial values, of the order of samples, and of the choice of held-out samples.
        seed: u64 = 1,
        /// Passes over the training data.
        epochs: u32 = 20,
        /// The number of steps after which the job stops, even within an epoch, summed over workers (in sync mode:
        /// committed steps). Absent: no limit.
        #[serde(skip_serializing_if = "Option::is_none")]
        steps: Option<u64> = None,
        /// The number of samples that a worker computes together.
        batch_size: u32 = 32,
        /// The number of batches in a worker's step. The mean of their gradients equals the gradient of one batch that is
        /// larger by this factor, except in layers that compute with several samples at a time: batch normalisation takes
        /// mean and variance from each batch, or from the batches of all replicas that have the same place in the step.
        accumulate: u32 = 1,
        /// The action on gradients that are NaN or infinite.
        non_finite: NonFinite = NonFinite::Fail,
        /// The largest absolute value of an element of a step's gradient; larger elements are clipped to it. In sync mode
        /// with servers, the gradient of a step is the mean over all workers, otherwise that of one worker.
        #[serde(skip_serializing_if = "Option::is_none")]
        clip_value: Option<f32> = None,
        /// The largest global norm of a step's gradient, after `clip_value`; a gradient with a larger norm is scaled down
        /// to it.
        #[serde(skip_serializing_if = "Option::is_none")]
        clip_norm: Option<f32> = None,
        /// The share of the weights' exponential moving average that remains after an update. Servers keep the average beside
        /// the weights; evaluations measure it, and `model.safetensors` holds it. Absent: no average.
        #[serde(skip_serializing_if = "Option::is_none")]
        ema_decay: Option<f32> = None,
        /// The number of steps between two lines of `metrics.jsonl`, summed over workers.
        log_every: u64 = 10,
        /// The passes over the data after which a worker evaluates the model.
        evaluations: Evaluations = Evaluations::EachEpoch,
        /// The run directory.
        #[serde(skip_serializing_if = "Option::is_none")]
        run_dir: Option<PathBuf> = None,
        /// The data set and its settings.
        data: Data = Data::default(),
        /// The model and its settings.
        model: Model = Model::default(),
        /// The loss and the metrics.
        objective: Objective = Objective::default(),
        /// The optimizer and its settings.
        optimizer: Optimizer = Optimizer::default(),
        /// The schedule of the learning rate over the updates.
        schedule: Schedule = Schedule::default(),
        /// Variables with settings of their own.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        groups: Vec<Group> = Vec::new(),
        /// Tables with settings of their own.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        tables: Vec<TableSettings> = Vec::new(),
        /// The strategy: where variables live, and how far workers may lead.
        strategy: Strategy = Strategy::default(),
        /// The number of processes, and the time limits on them.
        cluster: Cluster = Cluster::default(),
        /// The settings of checkpoints.
        checkpoint: Checkpoint = Checkpoint::default(),
        /// When the job stops before its data ends.
        #[serde(skip_serializing_if = "Option::is_none")]
        early_stopping: Option<EarlyStopping> = None,
        /// When the learning rate falls because evaluations no longer improve.
        #[serde(skip_serializing_if = "Option::is_none")]
        plateau: Option<Plateau> = None,
        /// The metric by which the best model is kept, beside the last one.
        #[serde(skip_serializing_if = "Option::is_none")]
        best: Option<Best> = None,
    }
}

/// The limits on the gradient of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Clip {
    /// The largest absolute value of an element; larger elements are clipped to it. `None`: no limit.
    pub value: Option<f32>,
    /// The largest global norm; gradients with a larger norm are scaled down to it. `None`: no limit.
    pub norm: Option<f32>,
}

settings! {
    /// The model and its settings.
    Model {
        /// The name of a model that ships, such as `mlp` (`flambeau job init -` prints all), or of one of your own.
        name: String = "mlp".to_owned(),
        /// A safetensors or PyTorch file with initial values, which each worker can read. Variables that the file lacks
        /// have their usual initial values.
        #[serde(skip_serializing_if = "Option::is_none")]
        init_from: Option<PathBuf> = None,
        /// The prefix of names in `init_from` that the names of the model's variables do not have, such as `backbone.`.
        /// Absent: `module.`, `_orig_mod.` or `model.`, if all names have it.
        #[serde(skip_serializing_if = "Option::is_none")]
        init_strip: Option<String> = None,
        /// Patterns of the names of variables that have their usual initial values although `init_from` has others.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        init_except: Vec<String> = Vec::new(),
        /// Widths of the hidden layers (mlp, cnn).
        hidden: Vec<usize> = vec![256],
        /// Channels of the convolutions (cnn).
        channels: Vec<usize> = vec![16, 32],
        /// The number of elements of the vector of a category (mlp, factorization-machine, deepfm, wide-deep, dlrm,
        /// two-tower).
        embedding: usize = 16,
        /// True if the vectors of categories are rows of tables, so that a step needs only the rows of its samples
        /// (logistic, mlp, factorization-machine; deepfm, wide-deep, dlrm and two-tower always have tables).
        tables: bool = false,
        /// The type of numbers in matrix products and convolutions. Variables and all else are `f32`.
        precision: Precision = Precision::F32,
        /// Settings of the transformer, or of a model of your own.
        #[serde(skip_serializing_if = "toml::Table::is_empty")]
        options: toml::Table = toml::Table::new(),
    }
}

/// The type of numbers in matrix products and convolutions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Precision {
    /// 32 bits.
    F32,
    /// bfloat16, the upper half of a 32-bit number: the same range, two to three significant digits. For GPUs with
    /// units for it.
    Bf16,
}

impl Model {
    /// Returns whether a variable takes its initial values from [`init_from`](Self::init_from), if the file has them.
    pub fn is_initial_from_file(&self, variable: &str) -> bool {
        let matches = |pattern: &String| matches_pattern(pattern, variable);
        !self.init_except.iter().any(matches)
    }
}

/// The type of numbers in which weights and gradients travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Wire {
    /// 32 bits: the numbers that are computed, unchanged.
    F32,
    /// bfloat16: half the bytes, two to three significant digits, the same range.
    Bf16,
    /// Half precision: half the bytes, four significant digits, nothing above 65504.
    F16,
}

impl Wire {
    /// Returns the name in job files.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
        }
    }
}

impl From<Wire> for Dtype {
    fn from(wire: Wire) -> Self {
        match wire {
            Wire::F32 => Self::F32,
            Wire::Bf16 => Self::Bf16,
            Wire::F16 => Self::F16,
        }
    }
}

/// The training mode, which decides when gradients become updates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// Gradients are applied once a step, as the mean of all workers' gradients.
    Sync,
    /// Gradients are applied when they arrive. No worker leads by more than the staleness bound.
    Bounded,
    /// Gradients are applied when they arrive.
    Async,
}

impl Mode {
    /// Returns the name in job files.
    pub fn name(self) -> &'static str {
        match self {
            Mode::Sync => "sync",
            Mode::Bounded => "bounded",
            Mode::Async => "async",
        }
    }
}

settings! {
    /// The number of processes, and the time limits on them.
    Cluster {
        /// The number of parameter servers among which variables are spread; servers that join later are spares. Absent:
        /// all servers that are there once none has joined for three seconds.
        #[serde(skip_serializing_if = "Option::is_none")]
        ps: Option<u32> = None,
        /// The number of workers that must be there before training begins; more may join at any time. Absent: one, or
        /// `strategy.stage_workers`.
        #[serde(skip_serializing_if = "Option::is_none")]
        workers: Option<u32> = None,
        /// The seconds without a heartbeat after which a process counts as dead.
        lease_seconds: f64 = 10.0,
        /// The longest standstill in seconds. A worker that sends heartbeats, but finishes no step for this long, is
        /// evicted. A checkpoint that makes no progress for this long is given up; the last checkpoint of a job is given up
        /// once it has failed for this long. A job fails if no worker can work for this long, or if it waits this long for
        /// members before its training begins. A job that was submitted to a long-lived cluster also fails if it waits this
        /// long for members later.
        stall_seconds: f64 = 600.0,
    }
}

settings! {
    /// The settings of checkpoints.
    Checkpoint {
        /// True to write checkpoints. Without them, the death of a server ends the job.
        enabled: bool = true,
        /// A folder, or a URL as in `s3://bucket/folder`, to which the coordinator and all servers have access. Absent: a
        /// folder in the run directory.
        #[serde(skip_serializing_if = "Option::is_none")]
        location: Option<String> = None,
        /// The time between two checkpoints, in seconds.
        every_seconds: f64 = 30.0,
        /// The number of steps between two checkpoints, summed over workers (in sync mode: committed steps), if these are
        /// done before `every_seconds` have passed. Absent: only the time counts.
        #[serde(skip_serializing_if = "Option::is_none")]
        every_steps: Option<u64> = None,
        /// The number of checkpoints that are kept. Older ones are deleted, unless a kept one builds on them.
        keep: u32 = 3,
        /// Sync mode: the size in MiB of the part of its shard that a server may copy, so that steps continue while a
        /// checkpoint is written. If more than this is still to be written, steps wait.
        #[serde(alias = "aside_mebibytes")]
        snapshot_mebibytes: u64 = 64,
        /// The maximum number of incremental checkpoints in a row, which have only the changed rows of tables. The
        /// checkpoint after them has all rows.
        increments: u32 = 8,
        /// The action when there is no room for a checkpoint.
        on_full_disk: OnFullDisk = OnFullDisk::Wait,
    }
}

/// The action when the store of checkpoints is full.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnFullDisk {
    /// Training continues, and checkpoints wait for room. The end of the job waits too, because it needs the last
    /// checkpoint.
    #[default]
    Wait,
    /// The job ends with an error.
    Stop,
}

/// The action on numbers that are NaN or infinite. A gradient that has some is never applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NonFinite {
    /// The job ends with an error that names the variable. It also ends when an update makes a weight NaN or infinite:
    /// no checkpoint has such weights, and none that has them is restored.
    Fail,
    /// The step is left out and counted. Weights may become NaN or infinite, and checkpoints may have them.
    Skip,
}

/// Names of the files in a run directory.
pub mod run_dir {
    /// The job as it ran.
    pub const JOB: &str = "job.toml";
    /// The metrics, one JSON object a line: steps, evaluations, members that joined and left.
    pub const METRICS: &str = "metrics.jsonl";
    /// The outcome, one JSON object.
    pub const SUMMARY: &str = "summary.json";
    /// Final weights under the variables' own names.
    pub const MODEL: &str = "model.safetensors";
    /// The weights that the best evaluation measured, if the job names a metric for it.
    pub const BEST: &str = "best.safetensors";
    /// The record of `best.safetensors`, one JSON object: the metric of its evaluation, the value, the pass over the
    /// data and the run.
    pub const BEST_RECORD: &str = "best.json";
    /// The parameters of a table's columns, such as means and vocabularies, and the names of classes. The file is there
    /// for tables, and for data with a file or a folder for each class.
    pub const TRANSFORMS: &str = "transforms.json";
    /// The folder of checkpoints, unless the job gives another location.
    pub const CHECKPOINTS: &str = "checkpoints";
    /// The state from which a restarted coordinator resumes.
    pub const STATE: &str = "coordinator.state";
    /// The curves, the summary and the settings as a page for a browser.
    pub const REPORT: &str = "report.html";
    /// The beginning of the names of TensorBoard's event files.
    pub const EVENTS: &str = "events.out.tfevents.";
}

impl Job {
    /// Returns the number of parameter servers: `None` if the job does not give it, 0 for a strategy without servers.
    pub fn servers(&self) -> Option<u32> {
        match self.strategy.name.has_servers() {
            true => self.cluster.ps,
            false => Some(0),
        }
    }

    /// Returns the number of workers that must be there before training begins.
    pub fn workers(&self) -> u32 {
        match self.strategy.name.has_one_worker() {
            true => 1,
            false => {
                let needed = self.strategy.stage_groups().workers;
                self.cluster.workers.unwrap_or(needed)
            }
        }
    }

    /// Returns the limits on the gradient of a step.
    pub fn clip(&self) -> Clip {
        Clip {
            value: self.clip_value,
            norm: self.clip_norm,
        }
    }

    /// Returns whether the servers limit the mean gradient over all workers. Otherwise, each worker limits its own
    /// gradient.
    pub fn servers_clip(&self) -> bool {
        !self.strategy.name.has_ring()
            && self.strategy.mode == Mode::Sync
            && self.clip() != Clip::default()
    }

    /// Returns the limits that a worker applies.
    pub fn worker_clip(&self) -> Clip {
        match self.servers_clip() {
            true => Clip::default(),
            false => self.clip(),
        }
    }

    /// Returns the number of samples in a worker's step.
    pub fn samples_per_step(&self) -> u64 {
        u64::from(self.batch_size) * u64::from(self.accumulate)
    }

    /// Returns the number of updates that a block on servers takes in the whole job, if a pass has `samples` samples.
    /// By default, learning-rate schedules stretch over these updates. In sync mode, `workers` workers share each step.
    pub fn total_updates(&self, samples: u64, workers: u64) -> u64 {
        match self.strategy.mode {
            Mode::Sync => self.total_steps_together(samples, workers),
            Mode::Bounded | Mode::Async => self.total_steps_together(samples, 1),
        }
    }

    /// Returns the number of steps of the whole job, if a pass has `samples` samples and `workers` workers make each
    /// step together.
    pub fn total_steps_together(&self, samples: u64, workers: u64) -> u64 {
        let per_update = self.samples_per_step().saturating_mul(workers.max(1));
        let whole = samples
            .div_ceil(per_update)
            .saturating_mul(self.epochs.into());
        self.steps.map_or(whole, |steps| steps.min(whole)).max(1)
    }
}
