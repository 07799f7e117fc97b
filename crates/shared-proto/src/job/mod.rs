//! The job: one TOML file, the same for all roles. A setting that the file leaves out has its default. An unknown
//! key is an error that names it.

mod optimizer;
mod template;
#[cfg(test)]
mod tests;
mod validate;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

pub use optimizer::{
    Adagrad, Adam, AdamW, Ftrl, Momentum, Optimizer, RmsProp, Schedule, ScheduleKind, Sgd,
};
pub use template::TEMPLATE;

use crate::staleness::StalenessBound;
use crate::wire::Dtype;

/// A job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Job {
    /// The name; messages of another job are refused.
    pub name: String,
    /// The seed of initial values, of the order of samples, and of the choice of held-out samples.
    pub seed: u64,
    /// Passes over the training data.
    pub epochs: u32,
    /// Stop after so many steps, summed over workers (in sync mode: committed steps), even within
    /// an epoch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub steps: Option<u64>,
    /// Samples in a worker's step.
    pub batch_size: u32,
    /// The action on gradients that are NaN or infinite.
    pub non_finite: NonFinite,
    /// Largest global norm of a worker's gradients; longer ones are scaled down to it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clip_norm: Option<f32>,
    /// Steps between two lines of `metrics.jsonl`, summed over workers.
    pub log_every: u64,
    /// The run directory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run_dir: Option<PathBuf>,
    /// The data set and its settings.
    pub data: Data,
    /// The model and its settings.
    pub model: Model,
    /// The optimizer and its settings.
    pub optimizer: Optimizer,
    /// The schedule of the learning rate over the updates.
    pub schedule: Schedule,
    /// The strategy: where variables live, and how far workers may lead.
    pub strategy: Strategy,
    /// The number of processes, and the time limits on them.
    pub cluster: Cluster,
    /// The settings of checkpoints.
    pub checkpoint: Checkpoint,
}

impl Default for Job {
    fn default() -> Self {
        Self {
            name: "flambeau".to_owned(),
            seed: 1,
            epochs: 20,
            steps: None,
            batch_size: 32,
            non_finite: NonFinite::Fail,
            clip_norm: None,
            log_every: 10,
            run_dir: None,
            data: Data::default(),
            model: Model::default(),
            optimizer: Optimizer::default(),
            schedule: Schedule::default(),
            strategy: Strategy::default(),
            cluster: Cluster::default(),
            checkpoint: Checkpoint::default(),
        }
    }
}

/// The data set and its settings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Data {
    /// `digits`, `mnist`, `fashion-mnist`, `csv`, `random`, or the name of a source of your own.
    pub kind: String,
    /// The folder or file of the data; each worker may override it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dir: Option<PathBuf>,
    /// CSV: the name of the column with the label.
    pub label: String,
    /// CSV: the share of the samples held out for evaluation if there is no `test.csv`.
    pub held_out: f64,
    /// Batches that a worker prepares ahead of the one that it computes.
    pub prefetch: u32,
    /// Settings of a source of your own.
    #[serde(skip_serializing_if = "toml::Table::is_empty")]
    pub options: toml::Table,
}

impl Default for Data {
    fn default() -> Self {
        Self {
            kind: "digits".to_owned(),
            dir: None,
            label: "label".to_owned(),
            held_out: 0.2,
            prefetch: 1,
            options: toml::Table::new(),
        }
    }
}

/// The model and its settings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Model {
    /// `softmax`, `mlp`, `cnn`, or the name of a model of your own.
    pub name: String,
    /// Widths of the hidden layers (mlp, cnn).
    pub hidden: Vec<usize>,
    /// Channels of the convolutions (cnn).
    pub channels: Vec<usize>,
    /// Settings of a model of your own.
    #[serde(skip_serializing_if = "toml::Table::is_empty")]
    pub options: toml::Table,
}

impl Default for Model {
    fn default() -> Self {
        Self {
            name: "mlp".to_owned(),
            hidden: vec![256],
            channels: vec![16, 32],
            options: toml::Table::new(),
        }
    }
}

/// The strategy: where variables live, and how far workers may lead.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Strategy {
    /// The place where variables live.
    pub name: StrategyName,
    /// The training mode, which decides when gradients become updates.
    pub mode: Mode,
    /// The largest lead of a worker over the slowest, in steps; used in bounded mode.
    pub staleness: u64,
    /// The type of numbers in which weights and gradients travel. Servers keep and compute `f32`.
    pub wire: Wire,
}

impl Default for Strategy {
    fn default() -> Self {
        Self {
            name: StrategyName::ParameterServer,
            mode: Mode::Bounded,
            staleness: 4,
            wire: Wire::F32,
        }
    }
}

impl Strategy {
    /// Returns the largest lead of a worker.
    pub fn bound(&self) -> StalenessBound {
        match self.mode {
            Mode::Sync => StalenessBound::Steps(0),
            Mode::Bounded => StalenessBound::Steps(self.staleness),
            Mode::Async => StalenessBound::Unbounded,
        }
    }
}

/// The place where variables live.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StrategyName {
    /// On sharded parameter servers.
    ParameterServer,
}

/// The type of numbers in which weights and gradients travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Wire {
    /// 32 bits: the numbers that are computed, unchanged.
    F32,
    /// The upper half of each: half the bytes, three significant digits, the same range.
    Bf16,
    /// Half precision: half the bytes, four significant digits, nothing above 65504.
    F16,
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

/// The number of processes, and the time limits on them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Cluster {
    /// Parameter servers among which variables are spread; later ones are spares. Absent: as many
    /// as there are when none has joined for three seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ps: Option<u32>,
    /// Workers that must be there before training begins; more may join at any time. Absent: one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub workers: Option<u32>,
    /// The seconds without a heartbeat after which a process counts as dead.
    pub lease_seconds: f64,
    /// A worker that sends heartbeats, but finishes no step for this long, is evicted. A checkpoint that
    /// makes no progress for this long is given up; the last one, once it has failed for this long. A job
    /// in which no worker can work for this long fails.
    pub stall_seconds: f64,
}

impl Default for Cluster {
    fn default() -> Self {
        Self {
            ps: None,
            workers: None,
            lease_seconds: 10.0,
            stall_seconds: 600.0,
        }
    }
}

/// The settings of checkpoints.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Checkpoint {
    /// True to write checkpoints. Without them, the death of a server ends the job.
    pub enabled: bool,
    /// A folder, or an URL as in `s3://bucket/folder`, that the coordinator and all servers see.
    /// Absent: a folder in the run directory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub location: Option<String>,
    /// Seconds between two checkpoints.
    pub every_seconds: f64,
    /// Steps between two checkpoints, summed over workers (in sync mode: committed steps), if these pass before
    /// the seconds do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub every_steps: Option<u64>,
    /// The number of checkpoints that are kept; older ones are deleted.
    pub keep: u32,
    /// Sync mode: MiB of its shard that a server may copy, so that steps continue while a checkpoint is written. If
    /// more than that is still to be written, steps wait.
    #[serde(alias = "aside_mebibytes")]
    pub snapshot_mebibytes: u64,
}

impl Default for Checkpoint {
    fn default() -> Self {
        Self {
            enabled: true,
            location: None,
            every_seconds: 30.0,
            every_steps: None,
            keep: 3,
            snapshot_mebibytes: 64,
        }
    }
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
    /// The folder of checkpoints, unless the job gives another location.
    pub const CHECKPOINTS: &str = "checkpoints";
    /// The state from which a restarted coordinator resumes.
    pub const STATE: &str = "coordinator.redb";
    /// The curves of loss and accuracy as a picture.
    pub const CURVES: &str = "curves.svg";
}

/// The error of a job file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JobError {
    /// The text is no job file.
    #[error("the job file is not valid: {0}")]
    Syntax(#[from] toml::de::Error),
    /// A setting makes no sense.
    #[error("job setting `{field}` is {value}, but {expected}")]
    Setting {
        /// The setting's key, as in the file.
        field: &'static str,
        /// The setting's value.
        value: String,
        /// The expected value.
        expected: &'static str,
    },
    /// A setting is given that has no effect beside another.
    #[error(
        "job setting `{field}` is {value}, but it does not count with `{other}` {other_value}; {advice}"
    )]
    Unused {
        /// The setting's key, as in the file.
        field: &'static str,
        /// The value given.
        value: String,
        /// The other setting's name, as in the file.
        other: &'static str,
        /// The value of the other setting.
        other_value: String,
        /// Advice to the user.
        advice: &'static str,
    },
}

impl JobError {
    /// Returns the error for a staleness bound in a mode that does not use it.
    pub fn staleness_unused(strategy: &Strategy) -> Self {
        Self::Unused {
            field: "strategy.staleness",
            value: strategy.staleness.to_string(),
            other: "strategy.mode",
            other_value: format!("{:?}", strategy.mode.name()),
            advice: "leave it out, or set the mode to \"bounded\"",
        }
    }
}

impl Job {
    /// Reads a job file, and checks it.
    ///
    /// # Errors
    /// Names the line and key, or the setting and its value.
    pub fn from_toml(text: &str) -> Result<Self, JobError> {
        let job = Self::parse(text)?;
        job.validate()?;
        Ok(job)
    }

    /// Reads a job file without checking that its settings make sense.
    ///
    /// # Errors
    /// Names the line and key.
    pub fn parse(text: &str) -> Result<Self, JobError> {
        Ok(toml::from_str(text)?)
    }

    /// Returns the job with one setting changed, given as `key.of.it=value`.
    ///
    /// # Errors
    /// If there is no such setting, or it cannot have that value.
    pub fn with(&self, setting: &str) -> Result<Self, JobError> {
        let wrong = |expected| JobError::Setting {
            field: "--set",
            value: format!("{setting:?}"),
            expected,
        };
        let (key, value) = setting
            .split_once('=')
            .ok_or_else(|| wrong("must be KEY=VALUE, as in schedule.kind=cosine"))?;
        // A value that is no number, list or quoted text is read as text.
        let parsed: Result<toml::Table, _> = format!("v = {value}").parse();
        let value = match parsed {
            Ok(mut table) => table.remove("v"),
            Err(_) => None,
        }
        .unwrap_or_else(|| toml::Value::String(value.trim().to_owned()));
        let mut table: toml::Table = toml::from_str(&self.to_toml())?;
        let mut place = &mut table;
        let mut keys: Vec<&str> = key.trim().split('.').collect();
        let last = keys.pop().unwrap_or_default();
        for key in keys {
            place = place
                .entry(key)
                .or_insert_with(|| toml::Value::Table(toml::Table::new()))
                .as_table_mut()
                .ok_or_else(|| wrong("has a key below a setting that has none"))?;
        }
        place.insert(last.to_owned(), value);
        Self::parse(&toml::to_string(&table).unwrap_or_default())
    }

    /// Returns the text of the job file.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).unwrap_or_else(|error| unreachable!("a job is plain data: {error}"))
    }

    /// Returns the number of updates that a block takes over `samples` samples. Learning-rate schedules stretch
    /// over them by default. `workers` share each step in sync mode.
    pub fn total_updates(&self, samples: u64, workers: u64) -> u64 {
        let per_update = match self.strategy.mode {
            Mode::Sync => u64::from(self.batch_size).saturating_mul(workers.max(1)),
            Mode::Bounded | Mode::Async => u64::from(self.batch_size),
        };
        let whole = samples
            .div_ceil(per_update)
            .saturating_mul(self.epochs.into());
        self.steps.map_or(whole, |steps| steps.min(whole)).max(1)
    }
}
