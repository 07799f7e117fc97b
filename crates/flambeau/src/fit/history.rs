//! The measurements of a training.

use std::collections::BTreeMap;
use std::path::PathBuf;

use coordinator::Summary;

use crate::metrics::Line;

/// The metrics of an evaluation, which is made after each pass over the data.
#[derive(Clone, Debug, PartialEq)]
pub struct Epoch {
    /// The number of the pass, from 1.
    pub number: u32,
    /// The loss and the other metrics on the held-out samples, by name.
    pub metrics: BTreeMap<String, f64>,
    /// The number of steps that were finished before the result, summed over workers.
    pub steps: u64,
    /// The seconds from the beginning of training to the result.
    pub seconds: f64,
}

/// The progress of a training, which is recorded every `log_every` steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Progress {
    /// The number of passes over the data so far, with the fraction of the current pass.
    pub epochs: f64,
    /// The number of steps so far, summed over workers.
    pub steps: u64,
    /// The mean loss of the steps since the previous record.
    pub loss: f64,
    /// The mean number of samples trained on in a second, since the beginning of training.
    pub samples_per_second: f64,
    /// The seconds since the beginning of training.
    pub seconds: f64,
}

/// A fall of the learning rate on a plateau.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LearningRate {
    /// The epoch after which the learning rate fell, counted from 1.
    pub epoch: u32,
    /// The number of steps before the fall, summed over workers.
    pub steps: u64,
    /// The new learning rate as a fraction of the job's.
    pub factor: f64,
}

/// The measurements of a training, from its beginning to its end.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct History {
    /// The evaluations, in the order of their passes. The last evaluation is of the final weights; if the training was
    /// stopped, its pass may be incomplete.
    pub epochs: Vec<Epoch>,
    /// The training loss and the pace, every `log_every` steps.
    pub progress: Vec<Progress>,
    /// Each fall of the learning rate on a plateau.
    pub learning_rates: Vec<LearningRate>,
    /// The number of steps, summed over workers; in sync mode, the number of committed steps.
    pub steps: u64,
    /// The number of samples trained on.
    pub samples: u64,
    /// The seconds from the beginning of training to the end of the job.
    pub seconds: f64,
    /// The reason why the training ended before it had used all of its data; `None` if it used all.
    pub stopped: Option<String>,
    /// The number of updates that were acknowledged and then lost with a server. An update is one step of one block.
    pub lost_updates: u64,
    /// The folder with the model, the checkpoints and all records.
    pub run_dir: PathBuf,
}

impl History {
    pub(super) fn new(lines: Vec<Line>, summary: &Summary, run_dir: PathBuf) -> Self {
        let mut epochs: BTreeMap<u32, Epoch> = BTreeMap::new();
        let (mut progress, mut learning_rates) = (Vec::new(), Vec::new());
        for line in lines {
            if let Line::LearningRate {
                epoch,
                steps,
                factor,
            } = line
            {
                learning_rates.push(LearningRate {
                    epoch,
                    steps,
                    factor,
                });
            }
            match line.into_entry() {
                // A job that goes back to a checkpoint evaluates a pass again.
                Some(Entry::Epoch(epoch)) => drop(epochs.insert(epoch.number, epoch)),
                Some(Entry::Progress(more)) => progress.push(more),
                None => {}
            }
        }
        let stopped_early = Some(&summary.stopped_early).filter(|why| !why.is_empty());
        let stopped = summary.stopped.then(|| "it was told to stop".to_owned());
        Self {
            epochs: epochs.into_values().collect(),
            progress,
            learning_rates,
            steps: summary.steps,
            samples: summary.samples,
            seconds: summary.seconds,
            stopped: stopped_early.cloned().or(stopped),
            lost_updates: summary.lost_updates,
            run_dir,
        }
    }

    /// Returns the values of a metric, one for each evaluation that has it.
    pub fn values(&self, metric: &str) -> Vec<f64> {
        let values = self.epochs.iter();
        values
            .filter_map(|epoch| epoch.metrics.get(metric).copied())
            .collect()
    }

    /// Returns the value of a metric in the last evaluation, which is of the final weights; `None` if the evaluation
    /// lacks it.
    pub fn last(&self, metric: &str) -> Option<f64> {
        self.epochs.last()?.metrics.get(metric).copied()
    }
}

/// A record that becomes a part of a history.
pub(super) enum Entry {
    Epoch(Epoch),
    Progress(Progress),
}

impl Line {
    /// Returns the line as a part of a history; `None` if the line is another record.
    pub(super) fn into_entry(self) -> Option<Entry> {
        match self {
            Self::Evaluation {
                epoch,
                metrics,
                steps,
                seconds,
            } => Some(Entry::Epoch(Epoch {
                number: epoch,
                metrics: metrics
                    .into_iter()
                    .map(|(name, value)| (name, value.0))
                    .collect(),
                steps,
                seconds,
            })),
            Self::Steps {
                epoch,
                loss,
                steps,
                seconds,
                samples_per_second,
            } => Some(Entry::Progress(Progress {
                epochs: epoch,
                steps,
                loss,
                samples_per_second,
                seconds,
            })),
            Self::LearningRate { .. } | Self::Other => None,
        }
    }
}
