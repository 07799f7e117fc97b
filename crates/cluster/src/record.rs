//! The records of a job, and its summary.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use shared_proto::{number, wire};

/// A line of `metrics.jsonl`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Timed<T = Record> {
    /// Seconds since 1970, also before training begins; none in files of earlier releases.
    #[serde(default)]
    pub time: Option<f64>,
    #[serde(flatten)]
    /// The record itself.
    pub record: T,
}

/// An event of a job. `seconds` count from the beginning of training, `steps` are the steps done until then, and `task` names a member.
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
    /// A member has left, or is gone.
    Left {
        #[serde(with = "number")]
        seconds: f64,
        task: String,
        why: Cow<'static, str>,
    },
    /// A worker cannot work; the job continues without it.
    CannotWork {
        #[serde(with = "number")]
        seconds: f64,
        task: String,
        /// `data`, `model`, `device`, `run_directory`, `memory` or `refused`.
        failure: String,
        reason: String,
    },
    /// The coordinator has started again with a state that lacks steps which this worker had finished. Splits that it had not
    /// finished may be trained again.
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
    /// A checkpoint is whole.
    Checkpoint {
        #[serde(with = "number")]
        seconds: f64,
        number: u64,
        steps: u64,
    },
    /// A shard, or in sync mode all of them and the training, went back to a checkpoint.
    Restored {
        #[serde(with = "number")]
        seconds: f64,
        checkpoint: u64,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        shard: Option<usize>,
        /// The steps at which the training continues.
        steps: u64,
    },
    /// A shard has loaded its values: updates beyond these versions, in earlier epochs, are lost.
    Loaded {
        #[serde(with = "number")]
        seconds: f64,
        shard: u32,
        epoch: u64,
        /// Variable, first block, last block, version.
        versions: Vec<[u64; 4]>,
    },
    /// Updates of a worker that were acknowledged are not in the values that a shard was restored
    /// to.
    Lost {
        #[serde(with = "number")]
        seconds: f64,
        task: String,
        shard: u32,
        /// Pairs of a block and a step.
        updates: u64,
        /// Absent where the worker could not report the loss itself.
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
    /// Steps were made.
    Steps {
        #[serde(with = "number")]
        seconds: f64,
        steps: u64,
        samples: u64,
        /// Passes over the data, with fraction.
        #[serde(with = "number")]
        epoch: f64,
        /// Mean over the steps since the last such line.
        #[serde(with = "number")]
        loss: f64,
        #[serde(with = "number")]
        samples_per_second: f64,
    },
    /// A worker has evaluated the model.
    Evaluation {
        #[serde(with = "number")]
        seconds: f64,
        /// The pass over the data, from 1.
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
        /// The pass over the data after which the rate fell, from 1.
        epoch: u32,
        steps: u64,
        /// The part of the learning rate that is left.
        #[serde(with = "number")]
        factor: f64,
        why: String,
    },
    /// The training loss has risen, and stays high.
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
        /// For people, with what to do.
        warning: String,
    },
    /// The job has ended; `error` is empty if it was done.
    Ended {
        #[serde(with = "number")]
        seconds: f64,
        error: String,
    },
}

impl Timed {
    /// Reads a line.
    ///
    /// # Errors
    /// If it is no record.
    pub fn of_line(line: &[u8]) -> Result<Self, serde_json::Error> {
        serde_json::from_slice(line)
    }
}

impl Record {
    /// Returns the line of `metrics.jsonl` for this record, with its newline. `time` is in seconds since 1970.
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
    /// The bound, in steps; absent without one.
    pub staleness: Option<u64>,
    /// The number of steps that workers computed ahead of the acknowledgement of their gradients: 0 or 1.
    #[serde(default)]
    pub pipeline: u32,
    /// Servers that held a shard.
    pub ps: usize,
    /// Workers that finished a step.
    pub workers: usize,
    /// Passes over the data that were begun.
    pub epochs: u32,
    /// Passes over the data that the job asks for.
    #[serde(default)]
    pub job_epochs: u32,
    /// Steps, summed over workers; in sync mode, committed steps.
    pub steps: u64,
    /// Samples trained on.
    pub samples: u64,
    /// Seconds from the beginning of training to the end of the job.
    #[serde(with = "number")]
    pub seconds: f64,
    /// Samples divided by the seconds from the beginning of training to the last step.
    #[serde(with = "number")]
    pub samples_per_second: f64,
    /// The accuracy of the last evaluation, if the model has one.
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
    /// Updates (pairs of a block and a step) that were acknowledged and lost with a server.
    #[serde(default)]
    pub lost_updates: u64,
    /// For each shard that has lost updates, how many steps of workers that is, if each step changes all of its blocks.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub lost_steps: BTreeMap<u32, u64>,
    /// Steps that were left out because their gradients were NaN or infinite.
    #[serde(default)]
    pub skipped_steps: u64,
    /// Steps of workers that were left out because their gradients were late (`strategy.backup_workers`).
    #[serde(default)]
    pub late_steps: u64,
    /// The largest lead of any pull that a shard answered, in steps.
    pub max_clock_lead: u64,
    /// Mean number of updates that a block took between a pull and the push made with it.
    #[serde(with = "number")]
    pub mean_gradient_staleness: f64,
    /// Mean factor of the steps of dense blocks that servers corrected, because other updates came between pull and push; none without such steps.
    #[serde(default, with = "number::option")]
    pub mean_step_factor: Option<f64>,
    /// How many times as long as in sync mode these steps were, in the mean.
    #[serde(default, with = "number::option")]
    pub mean_synchronous_ratio: Option<f64>,
    /// Shares of the workers' time: `share_pull`, `share_compute`, `share_push`, `share_wait`.
    #[serde(flatten, with = "number::map")]
    pub times: BTreeMap<String, f64>,
    /// A rise of the training loss, and what to change; empty if there was none since the coordinator started.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub loss_warning: String,
    /// True if it was told to end before its data did.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stopped: bool,
    /// The reason why `early_stopping` has ended the job before its data did; empty if it has not.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub stopped_early: String,
    /// The reason why the last checkpoint could not be written; empty if it was.
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
