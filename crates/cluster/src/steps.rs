//! Plans and commits the steps of sync mode, and counts the steps that workers finish outside rings.

use std::time::Instant;

use serde::{Deserialize, Serialize};
use shared_proto::ids::{Clock, Epoch, Origin, Role, Task};
use shared_proto::planted;
use shared_proto::refusal::{Reason, Refusal};
use shared_proto::view::Commit;
use shared_proto::wire;

use super::Cluster;
use super::admission::not_leased;

/// Sync mode: the open step and its parts.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Step {
    pub(super) clock: Clock,
    pub(super) parts: Vec<Part>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Part {
    pub(super) task: Task,
    /// The number of samples of a finished part; `None` before.
    pub(super) finished: Option<u64>,
    /// True if the part's gradient was NaN or infinite, so that the part does not count.
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

    /// Returns whether all parts are finished, and at least one of them counts.
    pub(super) fn is_to_measure(&self) -> bool {
        self.is_complete() && self.parts.iter().any(|part| !part.skipped)
    }

    /// Returns the commit of the finished parts that count, without a clip factor.
    pub(super) fn to_commit(&self) -> Commit {
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

impl Cluster {
    /// Sync mode: plans the next step and divides its data among the workers that are ready, unless a step is open or
    /// the next one must wait.
    pub(super) fn plan_step(&mut self, now: Instant) {
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

    fn finish_part(&mut self, now: Instant, task: Task, samples: u64, skipped: bool) {
        let step = self.durable.training.step.as_mut();
        let parts = step.map(|step| step.parts.iter_mut());
        if let Some(part) = parts.and_then(|mut parts| parts.find(|p| p.task == task)) {
            part.finished = Some(samples);
            part.skipped = skipped;
        }
        self.commit_if_complete(now);
    }

    /// Sync mode: returns the clock of the open step, and the epoch, if this worker has finished its part of the step.
    pub fn waits_for_parts(&self, task: Task) -> Option<(Clock, Epoch)> {
        let step = self.durable.training.step.as_ref()?;
        let mut parts = step.parts.iter();
        let finished = parts.any(|part| part.task == task && part.finished.is_some());
        finished.then(|| (step.clock, self.durable.epoch()))
    }

    /// Notes that the finished parts of the open step must be persisted, because a worker does not report its part
    /// again once it has a reply.
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

    /// Takes a server's report of its shard's part of the norm of the open step. A report of another step or epoch, or
    /// of other contributors, changes nothing.
    ///
    /// # Errors
    /// [`Reason::Malformed`] for a negative sum of squares.
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
            self.norms.add(of, report.shard, report.squares);
            self.commit_if_complete(now);
        }
        Ok(())
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

    /// Counts the finished steps of a worker that is in no ring.
    ///
    /// # Errors
    /// As [`Self::finish_step`] says.
    pub(super) fn finish_own_steps(
        &mut self,
        now: Instant,
        origin: &Origin,
        request: &wire::FinishStepRequest,
    ) -> Result<(), Refusal> {
        let task = origin.task;
        self.check_epoch(origin)?;
        let Some(member) = self.durable.members.get(&task.id) else {
            return Ok(());
        };
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
        self.require_receipts(origin, request)?;
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
        Ok(())
    }
}
