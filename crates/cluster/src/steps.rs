//! Steps: planned in sync mode, finished by workers, and committed in sync mode.

use std::collections::BTreeMap;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use shared_proto::ids::{Clock, Epoch, Origin, Role, Sequence, Task};
use shared_proto::planted;
use shared_proto::refusal::{Reason, Refusal};
use shared_proto::view::Commit;
use shared_proto::wire;

use super::Cluster;
use super::admission::{not_leased, out_of_order};
use super::record::Record;
use super::times::Times;

/// The weight of the newest step in the moving average of a worker's rate.
const RATE_SMOOTHING: f64 = 0.2;

/// Sync mode: the open step and its parts.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Step {
    pub(super) clock: Clock,
    pub(super) parts: Vec<Part>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Part {
    pub(super) task: Task,
    /// The number of samples, once the part is finished.
    pub(super) finished: Option<u64>,
    /// True if its gradient was NaN or infinite, so that it does not count.
    pub(super) skipped: bool,
}

impl Step {
    pub(super) fn unfinished(&self) -> impl Iterator<Item = Task> + '_ {
        self.parts
            .iter()
            .filter(|p| p.finished.is_none())
            .map(|p| p.task)
    }

    fn is_complete(&self) -> bool {
        self.unfinished().next().is_none()
    }

    /// Returns whether all parts are finished, and one of them has a gradient.
    fn is_to_measure(&self) -> bool {
        self.is_complete() && self.parts.iter().any(|part| !part.skipped)
    }

    /// Returns the commit of the finished parts.
    fn to_commit(&self) -> Commit {
        let parts = self.parts.iter().filter(|part| !part.skipped);
        let forgotten = usize::from(planted!(ForgottenContributor) && self.parts.len() > 1);
        let contributor = |part: &Part| Some((part.task, part.finished?));
        Commit {
            step: self.clock,
            contributors: parts.skip(forgotten).filter_map(contributor).collect(),
            clip_factor: None,
        }
    }
}

/// Sync mode: the parts of the shards in the norm of the open step. They are lost with this process, and reported again.
#[derive(Debug, Default)]
pub(super) struct Norms {
    of: (Epoch, Clock),
    /// The sum of the squares of each shard.
    squares: BTreeMap<u32, f64>,
}

impl Cluster {
    /// Sync mode: cuts the next step among the workers that are ready, unless a step is open.
    pub(super) fn plan_step(&mut self, now: Instant) {
        if self.has_ring() {
            return self.plan_span(now);
        }
        let ending = self.durable.training.stopping || self.durable.checkpoints.ending();
        // A step must not begin on a server that is about to stop.
        let ending = ending || !self.draining.is_empty();
        let busy =
            self.durable.training.step.is_some() || self.durable.evaluations.pending() || ending;
        // The step waits for workers that were evicted and are expected back.
        if busy || !self.durable.awaited.is_empty() && !planted!(NobodyAwaited) {
            return;
        }
        let clock = self.update_min_clock();
        let mut ranks: Vec<Task> = self
            .durable
            .live(Role::Worker)
            .filter(|m| m.progress.ready)
            .map(|m| m.task)
            .collect();
        ranks.sort_by_key(|task| task.id.index);
        let Some(ledger) = &mut self.durable.training.ledger else {
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
            if let Some(member) = self.durable.members.get_mut(&part.task.id) {
                member.progress.moved = now;
            }
        }
        self.durable.training.step = Some(Step { clock, parts });
        self.must_persist();
        self.leave_fast_path();
    }

    /// Counts finished steps, once each.
    ///
    /// # Errors
    /// [`Reason::NotLeased`] if the split is not leased to the sender, [`Reason::FutureClock`] if the sender
    /// cannot have come so far, [`Reason::StaleEpoch`] if a shard has moved since and may have lost the
    /// gradients.
    pub fn finish_step(
        &mut self,
        now: Instant,
        origin: &Origin,
        request: &wire::FinishStepRequest,
    ) -> Result<Clock, Refusal> {
        let task = origin.task;
        let Some(member) = self.durable.members.get(&task.id) else {
            return Ok(self.durable.training.min_clock);
        };
        let finished = member.progress.finished;
        if origin.sequence == Sequence(0) || origin.sequence < finished && !request.repeated {
            return Err(out_of_order(origin, "FinishStep"));
        }
        if origin.sequence <= finished {
            return Ok(self.durable.training.min_clock);
        }
        if self.has_ring() {
            self.finish_in_ring(now, origin, request)?;
            return Ok(self.update_min_clock());
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
        self.require_receipts(now, origin, request)?;
        let ledger = self.durable.training.ledger.as_mut();
        let advanced = ledger.and_then(|l| l.advance(task, request.split, request.position));
        let (samples, complete) = advanced.ok_or_else(|| not_leased(task, request))?;
        self.count(now, origin, request, samples);
        let tally = &mut self.durable.training.tally;
        tally.samples = tally.samples.saturating_add(samples);
        self.evaluate_after(complete);
        if !self.sync()
            && self.durable.training.held_by(task).is_none()
            && (complete.is_some() || self.durable.training.leases_no_more())
        {
            // Idle workers wait for the end of a data epoch or of all data. The end of any other split
            // wakes none.
            self.leave_fast_path();
        }
        if self.sync() {
            // Persisted with the commit of the step, or by `persist_parts`, before the call is answered.
            self.finish_part(now, task, samples, request.skipped > 0);
        } else {
            let tally = &mut self.durable.training.tally;
            tally.steps = tally.steps.saturating_add(request.steps);
            self.record_progress(now, request.steps);
        }
        self.schedule_last_evaluation();
        Ok(self.update_min_clock())
    }

    /// Evicts the worker in sync mode unless all shards hold its gradient, so that no other worker waits for its step.
    ///
    /// # Errors
    /// [`Reason::Malformed`] names a shard without a receipt.
    pub(super) fn require_receipts(
        &mut self,
        now: Instant,
        origin: &Origin,
        request: &wire::FinishStepRequest,
    ) -> Result<(), Refusal> {
        self.check_receipts(origin, request).inspect_err(|_| {
            let why = "it finished a step without a receipt of each shard";
            self.remove(now, origin.task.id, why);
        })
    }

    /// Counts a worker's report of steps, of which it has made `samples` samples.
    pub(super) fn count(
        &mut self,
        now: Instant,
        origin: &Origin,
        request: &wire::FinishStepRequest,
        samples: u64,
    ) {
        self.instants.last_finish = Some(now);
        let tally = &mut self.durable.training.tally;
        tally.skipped = tally.skipped.saturating_add(request.skipped);
        tally.late = tally.late.saturating_add(request.late);
        let with_gradients = request.steps.saturating_sub(request.late);
        // A step without samples has no loss.
        if request.samples > 0 {
            let recent = &mut self.observed.recent;
            recent.worker_steps = recent.worker_steps.saturating_add(with_gradients);
            recent.loss_sum += request.loss_sum;
            // A step that was left out reports no loss.
            let with_loss = with_gradients.saturating_sub(request.skipped);
            if with_loss > 0 {
                self.watch_loss(now, request.loss_sum / with_loss as f64);
            }
        }
        self.may_persist();
        let more = with_gradients.saturating_sub(request.skipped);
        self.record_forgotten(now, origin, request.pushes, more);
        self.change_progress(origin.task.id, |work| {
            work.finished = origin.sequence;
            work.uncertain = false;
            work.clock = work.clock.max(origin.clock);
            work.samples = work.samples.saturating_add(samples);
            work.steps = work.steps.saturating_add(request.steps);
            // A restarted coordinator may have forgotten some pushes.
            let told = request.pushes.min(origin.clock.0);
            work.pushes = told.max(work.pushes.saturating_add(more));
            if request.samples > 0 {
                work.loss = request.loss_sum / with_gradients.max(1) as f64;
            }
            let seconds = now.duration_since(work.moved).as_secs_f64();
            if seconds > 0.0 {
                let rate = samples as f64 / seconds;
                let old = work.samples_per_second;
                let weight = if old > 0.0 { RATE_SMOOTHING } else { 1.0 };
                work.samples_per_second = old + weight * (rate - old);
            }
            (work.acted, work.moved) = (now, now);
            if let Some(times) = &request.times {
                work.times.add(&Times::from(times));
            }
        });
    }

    /// After a restart of the coordinator: records how many steps of a worker its state lacks. The state of other modes than sync
    /// may be a moment older than the last answers; if it is an older copy, there are many.
    fn record_forgotten(&mut self, now: Instant, origin: &Origin, told: u64, more: u64) {
        let task = origin.task;
        let Some(work) = self.durable.member(task.id).map(|member| &member.progress) else {
            return;
        };
        let steps = told
            .min(origin.clock.0)
            .saturating_sub(work.pushes.saturating_add(more));
        if !work.uncertain || steps == 0 {
            return;
        }
        tracing::warn!(%task, steps, "this coordinator has started again with a state that lacks steps of a worker");
        self.records.push_back(Record::Forgotten {
            seconds: self.seconds(now),
            task: task.to_string(),
            steps,
        });
    }

    fn finish_part(&mut self, now: Instant, task: Task, samples: u64, skipped: bool) {
        let step = self.durable.training.step.as_mut();
        let parts = step.map(|step| step.parts.iter_mut());
        if let Some(part) = parts.and_then(|mut parts| parts.find(|p| p.task == task)) {
            part.finished = Some(samples);
            part.skipped = skipped;
        }
        self.commit_if_complete(now);
    }

    /// Sync mode: returns the open step and the epoch if this worker has finished its part of the step.
    pub fn waits_for_parts(&self, task: Task) -> Option<(Clock, Epoch)> {
        let step = self.durable.training.step.as_ref()?;
        let mut parts = step.parts.iter();
        let finished = parts.any(|part| part.task == task && part.finished.is_some());
        finished.then(|| (step.clock, self.durable.epoch()))
    }

    /// Persists the finished parts of the open step. A worker does not report a part again once it has an answer.
    pub fn persist_parts(&mut self) {
        self.must_persist_soon();
    }

    /// Removes a worker that is gone from the open step, unless it has finished its part.
    pub(super) fn leave_step(&mut self, now: Instant, task: Task) {
        if let Some(step) = &mut self.durable.training.step {
            step.parts
                .retain(|p| p.task != task || p.finished.is_some());
            self.commit_if_complete(now);
        }
    }

    /// Returns whether the open step waits for its norm: all its parts are finished, and the servers limit the mean.
    pub(super) fn is_measuring(&self) -> bool {
        self.job.servers_clip()
            && self.job.clip_norm.is_some()
            && self
                .durable
                .training
                .step
                .as_ref()
                .is_some_and(Step::is_to_measure)
    }

    /// Returns the open step as it is to be committed, if it waits for its norm.
    pub(super) fn step_to_measure(&self) -> Option<Commit> {
        let step = self.durable.training.step.as_ref();
        step.filter(|_| self.is_measuring()).map(Step::to_commit)
    }

    /// Returns the tasks of the servers that have not reported their part of the norm.
    pub(super) fn unmeasured(&self) -> Vec<String> {
        let reported = |shard: &usize| self.norms.squares.contains_key(&(*shard as u32));
        let servers = self.durable.servers().into_iter().enumerate();
        let missing = servers.filter(|(shard, _)| !reported(shard));
        missing.map(|(_, task)| task.to_string()).collect()
    }

    /// Takes a shard's part in the norm of the open step. A report of another step or epoch changes nothing.
    ///
    /// # Errors
    /// [`Reason::Malformed`] for an impossible number.
    pub(crate) fn measured(
        &mut self,
        now: Instant,
        task: Task,
        report: &wire::NormReport,
    ) -> Result<(), Refusal> {
        // NaN is no limit: the update makes weights NaN, and non_finite decides.
        if report.squares < 0.0 {
            return Err(Refusal::new(
                Reason::Malformed,
                format!("{task} reports {} as a sum of squares", report.squares),
            ));
        }
        let of = (self.durable.epoch(), Clock(report.step));
        let is_current = of.0 == Epoch(report.epoch)
            && self.durable.shard_of(task) == Some(report.shard as usize)
            && self
                .step_to_measure()
                .is_some_and(|step| step.step == of.1 && step.samples() == report.samples);
        if is_current {
            if self.norms.of != of {
                self.norms = Norms {
                    of,
                    ..Norms::default()
                };
            }
            self.norms.squares.insert(report.shard, report.squares);
            self.commit_if_complete(now);
        }
        Ok(())
    }

    /// Returns the factor of the open step, once all shards have reported their parts in its norm; the inner value is none if the step
    /// is not limited.
    fn clip_factor(&self) -> Option<Option<f32>> {
        let (Some(step), Some(most)) = (self.step_to_measure(), self.job.clip_norm) else {
            return Some(None);
        };
        let shards = 0..self.durable.map()?.shards.len() as u32;
        let is_current = self.norms.of == (self.durable.epoch(), step.step);
        let squares = shards.map(|shard| self.norms.squares.get(&shard).filter(|_| is_current));
        let norm = squares.sum::<Option<f64>>()?.sqrt();
        let most = f64::from(most);
        // The rounded factor is 1 at most, which is no limit.
        Some((norm > most).then_some((most / norm) as f32))
    }

    fn commit_if_complete(&mut self, now: Instant) {
        let complete = self
            .durable
            .training
            .step
            .as_ref()
            .is_some_and(Step::is_complete);
        if !complete {
            return;
        }
        let Some(clip_factor) = self.clip_factor() else {
            if self.view.measured != self.step_to_measure() {
                // The next view has `measured`, which the fast path does not compare.
                self.leave_fast_path();
            }
            return;
        };
        self.leave_fast_path();
        let Some(step) = self.durable.training.step.take() else {
            return;
        };
        self.must_persist();
        if step.parts.is_empty() {
            // All its workers are gone. Its data was given back, and the step is planned anew.
            if let Some(ledger) = &mut self.durable.training.ledger {
                ledger.refund(1);
            }
        } else {
            self.durable.training.commit = Some(Commit {
                clip_factor,
                ..step.to_commit()
            });
            self.durable.training.tally.steps = self.durable.training.tally.steps.saturating_add(1);
            self.record_progress(now, 1);
        }
        self.schedule_last_evaluation();
        self.update_min_clock();
        self.save_if_due(now);
        self.plan_step(now);
    }
}
