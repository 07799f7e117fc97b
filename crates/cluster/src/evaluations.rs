//! Evaluations, each made by one worker after a pass over the data.

use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;

use serde::{Deserialize, Serialize};
use shared_proto::ids::{Origin, Task};
use shared_proto::job::{self, Job};
use shared_proto::planted;
use shared_proto::refusal::{Reason, Refusal};
use shared_proto::wire;

use super::Cluster;
use super::due::FollowUp;
use super::monitors::{Measured, Monitors};
use super::record::Record;

/// The number of bytes of a SHA-256.
pub const DIGEST_BYTES: usize = 32;

/// The maximum number of results, the newest, that are kept in the state, in manifests and for status. `metrics.jsonl`
/// has all results.
const KEPT: usize = 64;

/// The evaluations that are due, in progress, or done.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Evaluations {
    pub(super) due: VecDeque<u32>,
    pub(super) at_work: Option<Evaluation>,
    pub(super) done: Vec<SavedEvaluation>,
    /// The data epoch and the worker of the last result, so that a repeated report is accepted.
    pub(super) reported: Option<(u32, Task)>,
    /// The state of the metrics that the job's settings follow.
    #[serde(default)]
    pub(super) monitors: Monitors,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Evaluation {
    #[serde(rename = "epoch")]
    pub(super) data_epoch: u32,
    pub(super) task: Task,
    /// True if training is over, so that the weights are the final ones.
    pub(super) last: bool,
}

impl Evaluations {
    /// Returns the evaluations of a job that goes back to a checkpoint. Those that were in progress are due again.
    pub(super) fn restored(
        due: &[u32],
        done: &[SavedEvaluation],
        monitors: Option<&Monitors>,
        job: &Job,
    ) -> Self {
        let measured = done.iter().map(SavedEvaluation::measured);
        Self {
            due: due.iter().copied().collect(),
            done: newest(done).to_vec(),
            monitors: Monitors::restored(monitors, measured, job),
            ..Self::default()
        }
    }

    /// Returns the data epochs to be evaluated, including those in progress.
    pub(super) fn all_due(&self) -> Vec<u32> {
        let at_work = self.at_work.map(|at_work| at_work.data_epoch);
        at_work
            .into_iter()
            .chain(self.due.iter().copied())
            .collect()
    }

    /// Returns the results as messages.
    pub(super) fn reports(&self) -> Vec<wire::EvaluationReport> {
        self.done.iter().cloned().map(Into::into).collect()
    }

    /// Adds a result, and drops the oldest beyond [`KEPT`].
    pub(super) fn add(&mut self, report: SavedEvaluation) {
        self.done.push(report);
        let older = self.done.len().saturating_sub(KEPT);
        self.done.drain(..older);
    }

    pub(crate) fn holder(&self) -> Option<Task> {
        self.at_work.map(|at_work| at_work.task)
    }

    pub(crate) fn release(&mut self, task: Task) {
        if let Some(lost) = self.at_work.take_if(|at_work| at_work.task == task) {
            self.due.push_front(lost.data_epoch);
        }
    }

    pub(super) fn pending(&self) -> bool {
        self.at_work.is_some() || !self.due.is_empty()
    }

    /// Returns the evaluation that `task` holds, or leases it the next one that is due. `exhausted` is true if training
    /// is over.
    pub(super) fn lease(&mut self, task: Task, exhausted: bool) -> Option<Evaluation> {
        if self.at_work.is_none() {
            let data_epoch = self.due.pop_front();
            self.at_work = data_epoch.map(|data_epoch| Evaluation {
                data_epoch,
                task,
                last: exhausted && self.due.is_empty(),
            });
        }
        self.at_work.filter(|at_work| at_work.task == task)
    }
}

/// Returns the newest results of a list, as many as are kept.
fn newest<T>(done: &[T]) -> &[T] {
    &done[done.len().saturating_sub(KEPT)..]
}

/// An evaluation's result, as it is stored.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct SavedEvaluation {
    pub(super) data_epoch: u32,
    samples: u64,
    #[serde(with = "shared_proto::number::map")]
    pub(super) metrics: BTreeMap<String, f64>,
    #[serde(default)]
    pub(super) model_sha256: Vec<u8>,
}

impl SavedEvaluation {
    fn measured(&self) -> Measured<'_> {
        Measured {
            data_epoch: self.data_epoch,
            metrics: &self.metrics,
        }
    }
}

impl From<wire::EvaluationReport> for SavedEvaluation {
    fn from(report: wire::EvaluationReport) -> Self {
        Self {
            data_epoch: report.data_epoch,
            samples: report.samples,
            metrics: report.metrics.into_iter().collect(),
            model_sha256: report.model_sha256.into(),
        }
    }
}

impl From<SavedEvaluation> for wire::EvaluationReport {
    fn from(saved: SavedEvaluation) -> Self {
        Self {
            data_epoch: saved.data_epoch,
            samples: saved.samples,
            metrics: saved.metrics.into_iter().collect(),
            model_sha256: saved.model_sha256.into(),
        }
    }
}

impl Cluster {
    /// Takes an evaluation's result, as [`Self::evaluated`] says.
    pub(super) fn take_evaluation(
        &mut self,
        now: Instant,
        origin: &Origin,
        report: wire::EvaluationReport,
    ) -> Result<bool, Refusal> {
        let (task, data_epoch) = (origin.task, report.data_epoch);
        let at_work = self.durable.evaluations.at_work;
        let is_held = at_work.is_some_and(|e| e.task == task && e.data_epoch == data_epoch);
        // A pass may be evaluated again at the end of the job. That result comes with a model.
        let is_new = is_held && (self.job.run_dir.is_none() || !report.model_sha256.is_empty());
        let is_known = self.durable.evaluations.reported == Some((data_epoch, task));
        if self.ended() || is_known && !is_new {
            return Ok(self.durable.evaluations.done.contains(&report.into()));
        }
        if !self.has_ring() {
            self.check_epoch(origin)?;
        } else if self.durable.map().is_some() && origin.epoch != self.durable.epoch() {
            // The rows may be of another epoch. Without servers, the weights of a step are the same in each ring.
            self.durable.evaluations.release(task);
            self.must_persist();
            return Ok(false);
        }
        let evaluation = self.check_evaluation(task, &report)?;
        if let Some(missing) = self.missing_metric(&report) {
            self.fail(now, missing);
            return Ok(false);
        }
        self.durable.evaluations.at_work = None;
        self.records.push_back(Record::Evaluation {
            seconds: self.seconds(now),
            epoch: report.data_epoch.saturating_add(1),
            steps: self.durable.training.tally.steps,
            samples: report.samples,
            metrics: report.metrics.clone().into_iter().collect(),
        });
        self.durable.evaluations.reported = Some((data_epoch, task));
        let report = SavedEvaluation::from(report);
        self.lower_rate_on_plateau(now, &report);
        self.durable.evaluations.add(report);
        self.must_persist();
        if !evaluation.last {
            self.consider_stopping();
        }
        if evaluation.last && self.saving.place.is_some() {
            self.durable.checkpoints.end();
            self.save_if_due(now);
        } else if evaluation.last {
            self.end_well(now);
        } else {
            self.schedule_last_evaluation();
        }
        if self.in_lock_step() {
            self.due.add(FollowUp::Plan);
        }
        Ok(true)
    }

    /// Checks the report of an evaluation, and returns this evaluation.
    ///
    /// # Errors
    /// [`Reason::NotLeased`] or [`Reason::Malformed`], as [`Self::evaluated`] says.
    fn check_evaluation(
        &self,
        task: Task,
        report: &wire::EvaluationReport,
    ) -> Result<Evaluation, Refusal> {
        if !report.metrics.contains_key("loss") {
            return Err(Refusal::new(
                Reason::Malformed,
                format!("the evaluation of {task} has no metric \"loss\"; each has one"),
            ));
        }
        let mine = |e: &Evaluation| e.task == task && e.data_epoch == report.data_epoch;
        let at_work = self.durable.evaluations.at_work;
        let Some(evaluation) = at_work.filter(mine) else {
            return Err(Refusal::new(
                Reason::NotLeased,
                format!(
                    "the evaluation of epoch {} is not leased to {task}; register again",
                    report.data_epoch
                ),
            ));
        };
        let model_is_told = report.model_sha256.len() == DIGEST_BYTES;
        if evaluation.last && self.job.run_dir.is_some() && !model_is_told {
            return Err(Refusal::new(
                Reason::Malformed,
                format!(
                    "{task} has evaluated the final weights without the SHA-256 of the model.safetensors that it was to write; write the file, then report"
                ),
            ));
        }
        Ok(evaluation)
    }

    /// Lowers the learning rate if this result shows a plateau.
    fn lower_rate_on_plateau(&mut self, now: Instant, report: &SavedEvaluation) {
        if let Some(why) = self.monitor(report.measured()) {
            let factor = self.learning_rate_factor();
            tracing::info!(factor, "the learning rate falls: {why}");
            self.records.push_back(Record::LearningRate {
                seconds: self.seconds(now),
                epoch: report.data_epoch.saturating_add(1),
                steps: self.durable.training.tally.steps,
                factor,
                why,
            });
        }
    }

    /// Returns the error of a job that monitors a metric that its evaluations do not have; `None` if they have all.
    fn missing_metric(&self, report: &wire::EvaluationReport) -> Option<String> {
        let early = self.job.early_stopping.as_ref();
        let plateau = self.job.plateau.as_ref();
        let best = self.job.best.as_ref();
        let monitored = [
            ("early_stopping.metric", early.map(|early| &early.metric)),
            ("plateau.metric", plateau.map(|plateau| &plateau.metric)),
            ("best.metric", best.map(|best| &best.metric)),
        ];
        let missing = |metric: &&String| !report.metrics.contains_key(*metric);
        let (setting, metric) = monitored
            .into_iter()
            .find_map(|(setting, metric)| Some((setting, metric.filter(missing)?)))?;
        let mut there: Vec<&str> = report.metrics.keys().map(String::as_str).collect();
        there.sort_unstable();
        Some(format!(
            "job setting `{setting}` is {metric:?}, but evaluations of this job have only {}; name one of these, or add it to objective.metrics",
            there.join(", ")
        ))
    }

    /// Stops the training early if `early_stopping` finds that evaluations no longer improve.
    fn consider_stopping(&mut self) {
        let early = self.job.early_stopping.as_ref();
        let monitors = &self.durable.evaluations.monitors;
        let why = early.and_then(|early| monitors.stops_early(early));
        let Some(why) = why.filter(|_| !self.durable.training.stopping) else {
            return;
        };
        tracing::info!("stopping early: {why}");
        self.durable.training.stopped_early = why;
        self.durable.training.stopping = true;
        self.must_persist();
        self.evaluate_when_at_rest();
    }

    /// Decides about an early stop once more, because the job has gone back to a checkpoint and may no longer have the
    /// evaluations that led to the stop.
    pub(super) fn reconsider_stopping(&mut self) {
        let training = &mut self.durable.training;
        if !training.stopped_early.is_empty() {
            training.stopped_early.clear();
            training.stopping = false;
            self.consider_stopping();
        }
    }

    /// Schedules an evaluation after the complete pass `pass`, if the job evaluates after each pass. `None`: no pass is
    /// complete.
    pub(super) fn evaluate_after(&mut self, pass: Option<u32>) {
        // The last evaluation is scheduled once all data is done.
        if self.job.evaluations == job::Evaluations::EachEpoch {
            self.durable.evaluations.due.extend(pass);
        }
    }

    /// Schedules the last evaluation once all data is done, even if no data epoch ends there.
    pub(super) fn schedule_last_evaluation(&mut self) {
        if self.durable.training.exhausted()
            && !self.durable.evaluations.pending()
            && self.durable.training.step.is_none()
        {
            // Of the pass that was trained last, which may not be the one of which data was leased last.
            let data_epoch = self.trained_epochs().saturating_sub(1);
            self.durable.evaluations.due.push_back(data_epoch);
        }
    }

    /// Schedules the last evaluation of a stopped job once no worker holds data.
    pub(super) fn evaluate_when_at_rest(&mut self) {
        if self.durable.training.stopping && !self.ended() && !self.durable.checkpoints.ending() {
            self.schedule_last_evaluation();
        }
    }

    /// Schedules the last evaluation again, because a shard has gone back after it. The evaluation and the
    /// model that was saved with it no longer match the weights.
    pub(super) fn evaluate_again_at_the_end(&mut self) {
        if self.durable.checkpoints.ending() && !planted!(StaleModel) {
            self.not_last_any_more();
            self.durable.evaluations.reported = None;
            self.schedule_last_evaluation();
        }
    }
}
