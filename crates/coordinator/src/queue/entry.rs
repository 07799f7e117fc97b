//! One job of the queue.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use cluster::Summary;
use serde::{Deserialize, Serialize};
use shared_proto::number;
use shared_proto::wire;

/// A job of the queue, as it is persisted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Entry {
    pub(crate) id: u64,
    /// The number of the submission, by which a repeated call is recognized; 0 for the job that the coordinator was
    /// started with.
    pub(crate) submission: u64,
    pub(crate) name: String,
    /// The settings, without the run directory.
    pub(crate) job_toml: String,
    /// The checkpoint to begin with; empty: none.
    pub(crate) restore: String,
    /// The run directory, relative to the coordinator's folder; empty for that folder itself.
    pub(crate) folder: String,
    /// The id of the job's run. It stays the same if the coordinator dies while it begins the job.
    pub(crate) run: String,
    pub(crate) state: JobState,
    /// True if the job is to be cancelled.
    pub(crate) cancelling: bool,
    /// True if the job is to be cancelled without a last checkpoint.
    #[serde(default)]
    pub(crate) at_once: bool,
    /// The error with which the job ended; empty if there is none.
    pub(crate) error: String,
    /// The time of the submission. This, `began` and `ended` are in seconds since 1970; 0: not yet.
    pub(crate) submitted: u64,
    pub(crate) began: u64,
    pub(crate) ended: u64,
    /// The outcome of a job that has begun and ended; otherwise `None`.
    pub(crate) outcome: Option<Outcome>,
}

/// The state of a job of the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum JobState {
    Queued,
    Running,
    Done,
    Failed,
    Cancelled,
}

impl JobState {
    /// Returns the state as a metric label.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::Running => "running",
            Self::Done => "done",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }
}

/// The figures of a job that has ended.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Outcome {
    pub(crate) samples: u64,
    pub(crate) total_samples: u64,
    pub(crate) steps: u64,
    #[serde(with = "number")]
    pub(crate) seconds: f64,
    #[serde(with = "number::map")]
    pub(crate) metrics: BTreeMap<String, f64>,
    pub(crate) lost_updates: u64,
    pub(crate) model_sha256: String,
}

impl Outcome {
    pub(crate) fn new(summary: &Summary, total_samples: u64) -> Self {
        Self {
            samples: summary.samples,
            total_samples,
            steps: summary.steps,
            seconds: summary.seconds,
            metrics: summary.metrics.clone(),
            lost_updates: summary.lost_updates,
            model_sha256: summary.model_sha256.clone(),
        }
    }
}

impl Entry {
    pub(crate) fn has_ended(&self) -> bool {
        match self.state {
            JobState::Queued | JobState::Running => false,
            JobState::Done | JobState::Failed | JobState::Cancelled => true,
        }
    }

    /// Returns the run directory, below the coordinator's folder or that folder itself.
    pub(crate) fn run_dir(&self, folder: &Path) -> PathBuf {
        match self.folder.as_str() {
            "" => folder.to_owned(),
            below => folder.join(below),
        }
    }

    /// Returns the job as users see it, with the persisted outcome.
    pub(crate) fn shown(&self, folder: &Path) -> wire::QueuedJob {
        let state = match self.state {
            JobState::Queued => wire::JobState::Queued,
            JobState::Running => wire::JobState::Running,
            JobState::Done => wire::JobState::Done,
            JobState::Failed => wire::JobState::Failed,
            JobState::Cancelled => wire::JobState::Cancelled,
        };
        let outcome = self.outcome.clone().unwrap_or_default();
        wire::QueuedJob {
            id: self.id,
            name: self.name.clone(),
            state: state.into(),
            error: self.error.clone(),
            run_dir: self.run_dir(folder).display().to_string(),
            submitted: self.submitted,
            began: self.began,
            ended: self.ended,
            samples: outcome.samples,
            total_samples: outcome.total_samples,
            steps: outcome.steps,
            seconds: outcome.seconds,
            metrics: outcome.metrics.into_iter().collect(),
            lost_updates: outcome.lost_updates,
            model_sha256: outcome.model_sha256,
            waiting_for: String::new(),
            cancelling: self.cancelling && !self.has_ended(),
        }
    }
}
