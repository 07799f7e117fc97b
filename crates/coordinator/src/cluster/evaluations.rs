//! Evaluations: one worker's work, after each pass over the data.

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Serialize};
use shared_proto::ids::Task;
use shared_proto::wire;

/// How many of the newest results are kept, in the state, in manifests and for status. All of them are
/// in `metrics.jsonl`.
const KEPT: usize = 64;

/// Evaluations that are due, at work, or done.
#[derive(Debug, Default)]
pub(crate) struct Evaluations {
    pub(super) due: VecDeque<u32>,
    pub(super) at_work: Option<Evaluation>,
    pub(crate) done: Vec<wire::EvaluationReport>,
    /// Whose result came last, so that sending it again is no mistake.
    pub(super) reported: Option<(u32, Task)>,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Evaluation {
    pub(super) epoch: u32,
    pub(super) task: Task,
    /// Nothing is trained any more: the weights are the final ones.
    pub(super) last: bool,
}

impl Evaluations {
    /// Those of a job that goes on from where it was; what was at work is due.
    pub(super) fn restored(due: &[u32], done: &[SavedEvaluation]) -> Self {
        Self {
            due: due.iter().copied().collect(),
            done: newest(done).iter().cloned().map(Into::into).collect(),
            ..Self::default()
        }
    }

    /// Those of a coordinator that has started again.
    pub(super) fn resumed(
        due: VecDeque<u32>,
        at_work: Option<Evaluation>,
        reported: Option<(u32, Task)>,
        done: &[SavedEvaluation],
    ) -> Self {
        Self {
            due,
            at_work,
            reported,
            ..Self::restored(&[], done)
        }
    }

    /// What is due, at work, and was reported last.
    pub(super) fn parts(&self) -> (VecDeque<u32>, Option<Evaluation>, Option<(u32, Task)>) {
        (self.due.clone(), self.at_work, self.reported)
    }

    /// Epochs to be evaluated, those at work included.
    pub(super) fn all_due(&self) -> Vec<u32> {
        let at_work = self.at_work.map(|at_work| at_work.epoch);
        at_work
            .into_iter()
            .chain(self.due.iter().copied())
            .collect()
    }

    /// What has come of those that are done.
    pub(super) fn saved(&self) -> Vec<SavedEvaluation> {
        self.done.iter().cloned().map(Into::into).collect()
    }

    /// Keeps a result.
    pub(super) fn add(&mut self, report: wire::EvaluationReport) {
        self.done.push(report);
        let older = self.done.len().saturating_sub(KEPT);
        self.done.drain(..older);
    }

    pub(crate) fn holder(&self) -> Option<Task> {
        self.at_work.map(|at_work| at_work.task)
    }

    pub(crate) fn release(&mut self, task: Task) {
        if let Some(lost) = self.at_work.take_if(|at_work| at_work.task == task) {
            self.due.push_front(lost.epoch);
        }
    }

    pub(super) fn pending(&self) -> bool {
        self.at_work.is_some() || !self.due.is_empty()
    }

    /// The evaluation that `task` has or may have.
    pub(super) fn lease(&mut self, task: Task, exhausted: bool) -> Option<Evaluation> {
        if self.at_work.is_none() {
            let epoch = self.due.pop_front();
            self.at_work = epoch.map(|epoch| Evaluation {
                epoch,
                task,
                last: exhausted && self.due.is_empty(),
            });
        }
        self.at_work.filter(|at_work| at_work.task == task)
    }
}

#[cfg(test)]
impl super::Cluster {
    /// An evaluation has come to this.
    pub(crate) fn add_evaluation(&mut self, report: wire::EvaluationReport) {
        self.evaluations.add(report);
    }
}

/// Those of a list that are kept.
fn newest<T>(done: &[T]) -> &[T] {
    &done[done.len().saturating_sub(KEPT)..]
}

/// An evaluation's result, as it is kept.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SavedEvaluation {
    data_epoch: u32,
    samples: u64,
    #[serde(with = "shared_proto::number::map")]
    metrics: BTreeMap<String, f64>,
}

impl From<wire::EvaluationReport> for SavedEvaluation {
    fn from(report: wire::EvaluationReport) -> Self {
        Self {
            data_epoch: report.data_epoch,
            samples: report.samples,
            metrics: report.metrics.into_iter().collect(),
        }
    }
}

impl From<SavedEvaluation> for wire::EvaluationReport {
    fn from(saved: SavedEvaluation) -> Self {
        Self {
            data_epoch: saved.data_epoch,
            samples: saved.samples,
            metrics: saved.metrics.into_iter().collect(),
        }
    }
}
