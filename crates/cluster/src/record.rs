//! The records of a job, and its summary.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use shared_proto::{number, wire};

/// A line of `metrics.jsonl`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Timed<T = Record> {
    /// The Unix time in seconds, also before training begins; `None` in files of earlier releases.
    #[serde(default)]
    pub time: Option<f64>,
    #[serde(flatten)]
    /// The record itself.
    pub record: T,
}

/// An event of a job. `seconds` is the time since the beginning of training, `steps` the number of steps done by then,
/// and `task` the name of a member.
#[allow(missing_docs)] // The line above, or its name, explains each field without a comment.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Record {
    /// A member has registered.
    Joined {
        #[serde(with = "number")]
        seconds: f64,
        task: String,
        generation: u64,
    },
    /// A member has left or was removed, for the reason `why`.
    Left {
        #[serde(with = "number")]
        seconds: f64,
        task: String,
        why: Cow<'static, str>,
    },
    /// A member cannot work. The job continues without it.
    CannotWork {
        #[serde(with = "number")]
        seconds: f64,
        task: String,
        /// `data`, `model`, `device`, `run_directory`, `memory`, `refused` or `checkpoints`.
        failure: String,
        reason: String,
    },
    /// The coordinator has restarted with a state that lacks `steps` steps that this worker had finished. Splits that
    /// the worker had not finished may be trained again.
    Forgotten {
        #[serde(with = "number")]
        seconds: f64,
        task: String,
        steps: u64,
    },
    /// A failed job is resumed.
    TakenUp {
        #[serde(with = "number")]
        seconds: f64,
        /// The error with which the job had failed.
        error: String,
    },
    /// A checkpoint is complete.
    Checkpoint {
        #[serde(with = "number")]
        seconds: f64,
        number: u64,
        steps: u64,
    },
    /// A shard went back to a checkpoint. Without `shard`: the whole training and all shards did.
    Restored {
        #[serde(with = "number")]
        seconds: f64,
        checkpoint: u64,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        shard: Option<usize>,
        /// The number of steps done at which training continues.
        steps: u64,
    },
    /// A shard has loaded its values. Updates of earlier epochs beyond these versions are lost.
    Loaded {
        #[serde(with = "number")]
        seconds: f64,
        shard: u32,
        epoch: u64,
        /// By range of blocks: the index of the variable, the first block, the last block, and their version.
        versions: Vec<[u64; 4]>,
    },
    /// Acknowledged updates of a worker are missing from the values to which a shard was restored.
    Lost {
        #[serde(with = "number")]
        seconds: f64,
        task: String,
        shard: u32,
        /// The number of lost updates. An update is a pair of a block and a step.
        updates: u64,
        /// The range of steps of the lost updates; `None` if the coordinator derived the loss, because the worker did
        /// not report it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        first_step: Option<u64>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        last_step: Option<u64>,
    },
    /// Training begins.
    Began {
        ps: usize,
        workers: usize,
        training_samples: u64,
    },
    /// The progress of the training. Recorded every `log_every` steps.
    Steps {
        #[serde(with = "number")]
        seconds: f64,
        steps: u64,
        samples: u64,
        /// The number of passes over the data, with fraction.
        #[serde(with = "number")]
        epoch: f64,
        /// The mean loss of the steps since the previous such record.
        #[serde(with = "number")]
        loss: f64,
        #[serde(with = "number")]
        samples_per_second: f64,
    },
    /// A worker has evaluated the model.
    Evaluation {
        #[serde(with = "number")]
        seconds: f64,
        /// The pass over the data that the evaluation follows, counted from 1.
        epoch: u32,
        steps: u64,
        samples: u64,
        #[serde(with = "number::map")]
        metrics: BTreeMap<String, f64>,
    },
    /// The learning rate has fallen on a plateau.
    LearningRate {
        #[serde(with = "number")]
        seconds: f64,
        /// The pass over the data after which the rate fell, counted from 1.
        epoch: u32,
        steps: u64,
        /// The product of all factors by which the learning rate has fallen, 1 at most.
        #[serde(with = "number")]
        factor: f64,
        why: String,
    },
    /// The training loss has risen from `from` to `peak`, and is still high at `now`.
    LossRose {
        #[serde(with = "number")]
        seconds: f64,
        steps: u64,
        #[serde(with = "number")]
        from: f64,
        #[serde(with = "number")]
        peak: f64,
        #[serde(with = "number")]
        now: f64,
        /// The warning for people, with advice.
        warning: String,
    },
    /// The job has ended. `error` is empty if it succeeded.
    Ended {
        #[serde(with = "number")]
        seconds: f64,
        error: String,
    },
}

impl Timed {
    /// Parses a line of `metrics.jsonl`.
    ///
    /// # Errors
    /// If the line is not a record.
    pub fn of_line(line: &[u8]) -> Result<Self, serde_json::Error> {
        serde_json::from_slice(line)
    }
}

impl Record {
    /// Returns the line of `metrics.jsonl` for this record, with its newline. `time` is the Unix time in seconds.
    ///
    /// # Errors
    /// If it cannot be written as JSON.
    pub fn to_line(&self, time: Option<f64>) -> Result<Vec<u8>, serde_json::Error> {
        let mut line = serde_json::to_vec(&Timed { time, record: self })?;
        line.push(b'\n');
        Ok(line)
    }

    /// Returns the record as JSON.
    ///
    /// # Errors
    /// If it cannot be written as JSON.
    pub fn to_value(&self) -> Result<serde_json::Value, serde_json::Error> {
        // By way of bytes: `to_value` would compile the writers of all types once more.
        serde_json::from_slice(&serde_json::to_vec(self)?)
    }

    pub(crate) fn loaded(seconds: f64, report: &wire::RestoreReport) -> Self {
        let versions = report.blocks.iter().map(|restored| {
            let range = restored.blocks.unwrap_or_default();
            let [variable, first, last] = [range.variable, range.first, range.last].map(u64::from);
            [variable, first, last, restored.version]
        });
        Self::Loaded {
            seconds,
            shard: report.shard,
            epoch: report.epoch,
            versions: versions.collect(),
        }
    }
}

/// The summary of a job: `summary.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// `sync`, `bounded` or `async`.
    pub mode: String,
    /// The staleness bound, in steps; `None` if there is no bound.
    pub staleness: Option<u64>,
    /// The number of steps that workers computed ahead of the acknowledgement of their gradients: 0 or 1.
    #[serde(default)]
    pub pipeline: u32,
    /// The number of servers with a shard.
    pub ps: usize,
    /// The number of workers that finished a step.
    pub workers: usize,
    /// The number of passes over the data that were begun.
    pub epochs: u32,
    /// The number of passes over the data that the job asks for.
    #[serde(default)]
    pub job_epochs: u32,
    /// The number of steps, summed over workers. A step that workers make together, in sync mode or in a ring, counts
    /// once.
    pub steps: u64,
    /// The number of samples trained on, including those before a checkpoint that the job began with.
    pub samples: u64,
    /// Seconds from the beginning of training to the end of the job.
    #[serde(with = "number")]
    pub seconds: f64,
    /// The number of samples of this run, divided by the seconds from the beginning of training to the last step.
    #[serde(with = "number")]
    pub samples_per_second: f64,
    /// The accuracy of the last evaluation, if it has this metric.
    #[serde(default, with = "number::option")]
    pub test_accuracy: Option<f64>,
    /// The loss of the last evaluation.
    #[serde(default, with = "number::option")]
    pub test_loss: Option<f64>,
    /// All metrics of the last evaluation, by name.
    #[serde(default, with = "number::map")]
    pub metrics: BTreeMap<String, f64>,
    /// SHA-256 of `model.safetensors`, in hexadecimal; empty if the job has ended without it.
    #[serde(default)]
    pub model_sha256: String,
    /// The number of updates (pairs of a block and a step) that were acknowledged and then lost with a server.
    #[serde(default)]
    pub lost_updates: u64,
    /// By shard: its lost updates, converted into steps of one worker that updates all of the shard's blocks, rounded
    /// up. Shards without losses are absent.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub lost_steps: BTreeMap<u32, u64>,
    /// The number of workers' steps that were left out because their gradients were NaN or infinite.
    #[serde(default)]
    pub skipped_steps: u64,
    /// The number of workers' steps that were left out because their gradients were late (`strategy.backup_workers`).
    #[serde(default)]
    pub late_steps: u64,
    /// The largest lead of any pull that a shard answered, in steps.
    pub max_clock_lead: u64,
    /// The mean number of updates that a block took between a pull and the push computed from it.
    #[serde(with = "number")]
    pub mean_gradient_staleness: f64,
    /// The mean factor of the steps of dense blocks that servers may shorten because other updates came between pull
    /// and push; `None` without such steps.
    #[serde(default, with = "number::option")]
    pub mean_step_factor: Option<f64>,
    /// The mean ratio of the length of these steps to their length in sync mode; `None` without such steps.
    #[serde(default, with = "number::option")]
    pub mean_synchronous_ratio: Option<f64>,
    /// Shares of the workers' time: `share_pull`, `share_compute`, `share_push`, `share_wait`.
    #[serde(flatten, with = "number::map")]
    pub times: BTreeMap<String, f64>,
    /// The warning about a rise of the training loss, with advice; empty if there was none since the coordinator
    /// started or values last went back to a checkpoint.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub loss_warning: String,
    /// True if the job was stopped on request before all its data was used.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stopped: bool,
    /// The reason why `early_stopping` ended the job before all its data was used; empty if it did not.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub stopped_early: String,
    /// The reason why the job ended without its last checkpoint; empty otherwise.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub unsaved: String,
    /// The error with which the job failed; empty if it did not.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub error: String,
}

impl Summary {
    /// Returns the text of `summary.json`.
    ///
    /// # Errors
    /// If it cannot be written as JSON.
    pub fn to_text(&self) -> Result<String, serde_json::Error> {
        Ok(serde_json::to_string_pretty(self)? + "\n")
    }
}
