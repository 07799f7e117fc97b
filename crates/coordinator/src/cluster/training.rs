//! Leases of work, finished steps, commits, and the end of the job.

use std::time::Instant;

use serde::{Deserialize, Serialize};
use shared_proto::ids::{Clock, Origin, Role, Sequence, Task};
use shared_proto::planted;
use shared_proto::refusal::{Reason, Refusal};
use shared_proto::view::{Commit, JobPhase};
use shared_proto::wire;

use super::Cluster;
use super::evaluations::Evaluation;
use super::finished::not_leased;
use crate::record::Record;
use crate::splits::Split;

/// The most steps in a split. The data of a worker that dies is soon done again.
const MOST_BATCHES: u64 = 64;

/// The fewest splits of an epoch for each worker, so that all workers end it together.
const SPLITS_PER_WORKER: u64 = 4;

/// The weight of the newest step in the moving average of a worker's rate.
const RATE_SMOOTHING: f64 = 0.2;

/// The work that a worker is given.
#[derive(Debug, PartialEq)]
pub(crate) enum Work {
    Split(Split),
    Evaluate {
        epoch: u32,
        save_model: bool,
    },
    /// No work at present, for this reason.
    Idle(String),
    Done,
}

/// Sync mode: the open step and its parts.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Step {
    pub(super) clock: Clock,
    parts: Vec<Part>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Part {
    task: Task,
    /// The number of samples, once the part is finished.
    finished: Option<u64>,
    /// True if its gradient was NaN or infinite, so that it does not count.
    #[serde(default)]
    skipped: bool,
}

impl Step {
    pub(crate) fn unfinished(&self) -> impl Iterator<Item = Task> + '_ {
        self.parts
            .iter()
            .filter(|p| p.finished.is_none())
            .map(|p| p.task)
    }
}

/// The work done, summed over workers.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) steps: u64,
    pub(crate) samples: u64,
    /// The number of steps that were left out because their gradients were NaN or infinite.
    pub(crate) skipped: u64,
    /// The work since the last line of metrics.
    pub(super) recent: Recent,
}

impl Tally {
    /// Continues from the counts of a checkpoint.
    pub(super) fn continue_from(&mut self, steps: u64, samples: u64) {
        *self = Self {
            steps,
            samples,
            skipped: self.skipped,
            recent: Recent::default(),
        };
    }
}

#[derive(Debug, Default)]
pub(super) struct Recent {
    pub(super) worker_steps: u64,
    pub(super) steps: u64,
    pub(super) loss_sum: f64,
}

impl Cluster {
    /// Leases work to a worker. A repeated call before the work is done gives the same answer.
    pub(crate) fn lease_work(&mut self, now: Instant, task: Task) -> (Work, Clock) {
        let work = self.choose_work(now, task);
        let min_clock = self.update_min_clock();
        let Some(member) = self.members.get_mut(&task.id) else {
            return (work, min_clock);
        };
        let state = &mut member.progress;
        state.active = matches!(work, Work::Split(_));
        if !matches!(work, Work::Idle(_)) {
            state.moved = now;
        }
        // A worker that was away continues at the min clock.
        state.clock = state.clock.max(min_clock);
        (work, state.clock)
    }

    fn choose_work(&mut self, now: Instant, task: Task) -> Work {
        if self.ended() {
            return Work::Done;
        }
        if let Some(member) = self.members.get_mut(&task.id)
            && !std::mem::replace(&mut member.progress.ready, true)
        {
            self.must_persist();
        }
        self.awaited.remove(&task.id);
        self.unable.can_work(task.id);
        self.begin(now);
        if self.checkpoints.ending {
            return Work::Idle(self.checkpoints.last_of());
        }
        if self.phase != JobPhase::Training {
            return Work::Idle(self.missing());
        }
        let held = self.ledger.as_ref().and_then(|ledger| ledger.held_by(task));
        if let Some(split) = held {
            return Work::Split(split);
        }
        self.evaluate_when_at_rest();
        let exhausted = self.exhausted();
        if let Some(evaluation) = self.evaluations.lease(task, exhausted) {
            self.must_persist();
            return Work::Evaluate {
                epoch: evaluation.epoch,
                save_model: evaluation.last,
            };
        }
        let split = if self.sync() {
            self.plan_step(now);
            self.ledger.as_ref().and_then(|ledger| ledger.held_by(task))
        } else if self.stopping {
            None
        } else {
            let batches = self.split_batches();
            let ledger = self.ledger.as_mut();
            let leased = ledger.and_then(|ledger| ledger.lease(task, batches));
            if leased.is_some() {
                self.must_persist();
            }
            leased
        };
        match split {
            Some(split) => Work::Split(split),
            None => Work::Idle(self.idle_reason()),
        }
    }

    fn idle_reason(&self) -> String {
        if let Some(Evaluation { epoch, task, .. }) = self.evaluations.at_work {
            return format!("{task} evaluates epoch {}", epoch.saturating_add(1));
        }
        if let Some(server) = self.draining.keys().next() {
            return format!("{server} is about to stop, and its shard is saved first");
        }
        if let Some((gone, _)) = self.awaited.first_key_value() {
            return format!("{gone} is given time to come back");
        }
        "others finish their data".to_owned()
    }

    pub(super) fn begin(&mut self, now: Instant) {
        let initialized = self.variables.as_ref().is_some_and(|v| v.initialized);
        if self.phase == JobPhase::Starting {
            self.save_if_due(now);
        }
        if self.phase == JobPhase::Starting && initialized && self.missing().is_empty() {
            self.phase = JobPhase::Training;
            self.must_persist();
            self.began = Some(now);
            for member in self.members.values_mut() {
                member.progress.moved = now;
            }
            self.records.push(Record::Began {
                ps: self.servers().len(),
                workers: self.live(Role::Worker).count(),
                training_samples: self.training_samples(),
            });
        }
    }

    fn split_batches(&self) -> u64 {
        let workers = self.live(Role::Worker).count().max(1) as u64;
        let batches = self.training_samples().div_ceil(self.job.batch_size.into());
        (batches / (workers * SPLITS_PER_WORKER)).clamp(1, MOST_BATCHES)
    }

    /// Sync mode: cuts the next step among the workers that are ready, unless a step is open.
    pub(super) fn plan_step(&mut self, now: Instant) {
        let ending = self.stopping || self.checkpoints.ending;
        // A step must not begin on a server that is about to stop.
        let ending = ending || !self.draining.is_empty();
        let busy = self.step.is_some() || self.evaluations.pending() || ending;
        // The step waits for workers that were evicted and are expected back.
        if busy || !self.awaited.is_empty() && !planted!(NobodyAwaited) {
            return;
        }
        let clock = self.update_min_clock();
        let mut ranks: Vec<Task> = self
            .live(Role::Worker)
            .filter(|m| m.progress.ready)
            .map(|m| m.task)
            .collect();
        ranks.sort_by_key(|task| task.id.index);
        let Some(ledger) = &mut self.ledger else {
            return;
        };
        let parts: Vec<Part> = ledger
            .lease_step(&ranks)
            .into_iter()
            .map(|(task, _)| Part {
                task,
                finished: None,
                skipped: false,
            })
            .collect();
        if parts.is_empty() {
            return;
        }
        for part in &parts {
            if let Some(member) = self.members.get_mut(&part.task.id) {
                member.progress.moved = now;
            }
        }
        self.step = Some(Step { clock, parts });
        self.must_persist();
    }

    /// Counts finished steps, once each.
    ///
    /// # Errors
    /// [`Reason::NotLeased`] if the split is not leased to the sender, [`Reason::FutureClock`] if the sender
    /// cannot have come so far, [`Reason::StaleEpoch`] if a shard has moved since and may have lost the
    /// gradients.
    pub(crate) fn finish_step(
        &mut self,
        now: Instant,
        origin: &Origin,
        request: &wire::FinishStepRequest,
    ) -> Result<Clock, Refusal> {
        let task = origin.task;
        let Some(member) = self.members.get(&task.id) else {
            return Ok(self.min_clock);
        };
        if origin.sequence == member.progress.finished && origin.sequence > Sequence(0) {
            return Ok(self.min_clock);
        }
        if origin.sequence < member.progress.finished || origin.sequence == Sequence(0) {
            return Err(super::out_of_order(origin, "FinishStep"));
        }
        self.check_epoch(origin)?;
        let reached = member.progress.clock.0.saturating_add(request.steps);
        // A restarted coordinator may not know how far workers have come.
        if origin.clock.0 > reached && !member.progress.uncertain {
            return Err(Refusal::new(
                Reason::FutureClock,
                format!(
                    "{task} says that it has finished {} steps after {} more, but it had finished {}",
                    origin.clock, request.steps, member.progress.clock
                ),
            ));
        }
        if self.sync() {
            self.check_part(origin, request)?;
        }
        self.check_lease(task, request)?;
        self.check_numbers(task, request)?;
        if let Err(refusal) = self.check_receipts(origin, request) {
            // Its gradient cannot count on all shards, so the other workers must not wait for it.
            self.remove(
                now,
                task.id,
                "it finished a step without a receipt of each shard",
            );
            return Err(refusal);
        }
        let ledger = self.ledger.as_mut();
        let advanced = ledger.and_then(|l| l.advance(task, request.split, request.position));
        let (samples, complete) = advanced.ok_or_else(|| not_leased(task, request))?;
        self.count(now, origin, request, samples);
        self.evaluations.due.extend(complete);
        if self.sync() {
            self.must_persist();
            self.finish_part(now, task, samples, request.skipped > 0);
        } else {
            self.tally.steps = self.tally.steps.saturating_add(request.steps);
            self.record_progress(now, request.steps);
        }
        self.schedule_last_evaluation();
        Ok(self.update_min_clock())
    }

    fn count(
        &mut self,
        now: Instant,
        origin: &Origin,
        request: &wire::FinishStepRequest,
        samples: u64,
    ) {
        self.last_finish = Some(now);
        self.tally.samples = self.tally.samples.saturating_add(samples);
        self.tally.recent.worker_steps =
            self.tally.recent.worker_steps.saturating_add(request.steps);
        self.tally.recent.loss_sum += request.loss_sum;
        self.tally.skipped = self.tally.skipped.saturating_add(request.skipped);
        self.may_persist();
        let Some(member) = self.members.get_mut(&origin.task.id) else {
            return;
        };
        let work = &mut member.progress;
        work.finished = origin.sequence;
        work.uncertain = false;
        work.clock = work.clock.max(origin.clock);
        work.samples = work.samples.saturating_add(samples);
        work.steps = work.steps.saturating_add(request.steps);
        // A restarted coordinator may have forgotten some pushes.
        let told = request.pushes.min(origin.clock.0);
        let more = request.steps.saturating_sub(request.skipped);
        work.pushes = told.max(work.pushes.saturating_add(more));
        work.loss = request.loss_sum / request.steps.max(1) as f64;
        let seconds = now.duration_since(work.moved).as_secs_f64();
        if seconds > 0.0 {
            let rate = samples as f64 / seconds;
            let old = work.samples_per_second;
            let weight = if old > 0.0 { RATE_SMOOTHING } else { 1.0 };
            work.samples_per_second = old + weight * (rate - old);
        }
        work.moved = now;
        if let Some(times) = &request.times {
            work.times.pull += times.pull;
            work.times.compute += times.compute;
            work.times.push += times.push;
            work.times.wait += times.wait;
        }
    }

    fn finish_part(&mut self, now: Instant, task: Task, samples: u64, skipped: bool) {
        let parts = self.step.as_mut().map(|step| step.parts.iter_mut());
        if let Some(part) = parts.and_then(|mut parts| parts.find(|p| p.task == task)) {
            part.finished = Some(samples);
            part.skipped = skipped;
        }
        self.commit_if_complete(now);
    }

    /// Removes a worker that is gone from the open step, unless it has finished its part.
    pub(super) fn leave_step(&mut self, now: Instant, task: Task) {
        if let Some(step) = &mut self.step {
            step.parts
                .retain(|p| p.task != task || p.finished.is_some());
            self.commit_if_complete(now);
        }
    }

    fn commit_if_complete(&mut self, now: Instant) {
        let Some(step) = self.step.take_if(|step| step.unfinished().next().is_none()) else {
            return;
        };
        self.must_persist();
        let contributors: Vec<(Task, u64)> = step
            .parts
            .iter()
            .filter(|part| !part.skipped)
            .skip(usize::from(
                planted!(ForgottenContributor) && step.parts.len() > 1,
            ))
            .filter_map(|part| Some((part.task, part.finished?)))
            .collect();
        if step.parts.is_empty() {
            // All its workers are gone. Its data was given back, and the step is planned anew.
            if let Some(ledger) = &mut self.ledger {
                ledger.refund(1);
            }
        } else {
            self.commit = Some(Commit {
                step: step.clock,
                contributors,
            });
            self.tally.steps = self.tally.steps.saturating_add(1);
            self.record_progress(now, 1);
        }
        self.schedule_last_evaluation();
        self.update_min_clock();
        self.save_if_due(now);
        self.plan_step(now);
    }

    /// Returns whether there is no more data to train on.
    fn exhausted(&self) -> bool {
        let ledger = self.ledger.as_ref();
        ledger.is_some_and(|ledger| ledger.exhausted() || self.stopping && ledger.is_at_rest())
    }

    /// Schedules an evaluation at the end of the data, even if no epoch ends there.
    pub(super) fn schedule_last_evaluation(&mut self) {
        if self.exhausted() && !self.evaluations.pending() && self.step.is_none() {
            let epoch = self.ledger.as_ref().map_or(0, |ledger| ledger.epoch());
            self.evaluations.due.push_back(epoch);
        }
    }

    /// Schedules the last evaluation again, because a shard has gone back after it. The evaluation and the
    /// model that was saved with it no longer match the weights.
    pub(super) fn evaluate_again_at_the_end(&mut self) {
        if self.checkpoints.ending && !planted!(StaleModel) {
            self.checkpoints.not_last_any_more();
            self.evaluations.reported = None;
            self.schedule_last_evaluation();
        }
    }

    pub(super) fn end_well(&mut self, now: Instant) {
        if self.ended() {
            return;
        }
        self.phase = JobPhase::Done;
        self.must_persist();
        self.record_end(now);
    }

    /// Notes which workers a worker waits for.
    pub(crate) fn waiting(&mut self, task: Task, on: Vec<wire::Task>) {
        if let Some(member) = self.members.get_mut(&task.id) {
            member.progress.waiting_on = on;
        }
    }
}
