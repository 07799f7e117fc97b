//! Checks and counts reports of finished steps.

use std::time::Instant;

use shared_proto::ids::{Clock, Origin, Task};
use shared_proto::planted;
use shared_proto::refusal::{Reason, Refusal};
use shared_proto::wire;

use super::Cluster;
use super::admission::not_leased;
use super::due::FollowUp;
use super::record::Record;
use super::steps::Step;
use super::times::Times;

/// The weight of the newest report in the moving average of a worker's samples per second.
const RATE_SMOOTHING: f64 = 0.2;

impl Cluster {
    /// Checks that the split of a report is the one that the sender holds.
    ///
    /// # Errors
    /// [`Reason::NotLeased`] if it is not.
    pub(super) fn check_lease(
        &self,
        task: Task,
        request: &wire::FinishStepRequest,
    ) -> Result<(), Refusal> {
        let held = self.durable.training.held_by(task);
        match held {
            Some(split) if split.id == request.split => Ok(()),
            _ => Err(not_leased(task, request)),
        }
    }

    /// In sync mode, checks by the receipts of a report that all shards hold the sender's gradient, unless the step is
    /// skipped.
    ///
    /// # Errors
    /// [`Reason::Malformed`] names a shard without a valid receipt.
    pub(super) fn check_receipts(
        &self,
        origin: &Origin,
        request: &wire::FinishStepRequest,
    ) -> Result<(), Refusal> {
        if !self.sync() || request.skipped > 0 || planted!(NoReceipts) {
            return Ok(());
        }
        // The clock includes the step that this call finishes.
        let clock = Clock(origin.clock.0.saturating_sub(1));
        let key = self.durable.run.receipt_key.prepare();
        let holds = |shard: &u32| {
            // Workers hand them in by shard, so one look is enough as a rule.
            let likely = request.receipts.get(*shard as usize);
            let likely = likely.into_iter().chain(&request.receipts);
            let mut given = likely.filter(|given| given.shard == *shard);
            given.any(|given| key.verifies(&given.receipt, *shard, origin.task, clock))
        };
        let shards = 0..self.durable.servers().len() as u32;
        let mut with_blocks = shards.filter(|shard| self.durable.updated_blocks_of(*shard) > 0);
        match with_blocks.find(|shard| !holds(shard)) {
            None => Ok(()),
            Some(shard) => Err(Refusal::new(
                Reason::Malformed,
                format!(
                    "{} says that it has finished step {clock} without the receipt of shard {shard} for its gradient; push to all blocks, and hand in what the shards acknowledge with. Register again",
                    origin.task
                ),
            )),
        }
    }

    /// Checks that the numbers of a report are possible.
    ///
    /// # Errors
    /// [`Reason::Malformed`] names the impossible numbers.
    pub(super) fn check_numbers(
        &self,
        task: Task,
        request: &wire::FinishStepRequest,
    ) -> Result<(), Refusal> {
        let held = self.durable.training.held_by(task);
        let done = held.map_or(0, |split| request.position.saturating_sub(split.start));
        self.check_report(task, request, done)
    }

    /// Checks that the numbers of a report of steps with `done` samples are possible.
    ///
    /// # Errors
    /// [`Reason::Malformed`] names the impossible numbers.
    pub(super) fn check_report(
        &self,
        task: Task,
        request: &wire::FinishStepRequest,
        done: u64,
    ) -> Result<(), Refusal> {
        let times = request.times.unwrap_or_default();
        let seconds = [times.pull, times.compute, times.push, times.wait];
        let what = if request.steps == 0 || request.steps > done {
            format!("finishes {} steps with {done} samples", request.steps)
        } else if request.skipped.saturating_add(request.late) > request.steps {
            let (skipped, late) = (request.skipped, request.late);
            format!(
                "skips {skipped} and is late in {late} of {} steps",
                request.steps
            )
        } else if request.late > 0 && self.job.strategy.backup_workers.is_none() {
            "is late in a step, but the job has no backup workers".to_owned()
        } else if request.late == request.steps && request.samples > 0 {
            format!(
                "has {} samples of steps in which it is late",
                request.samples
            )
        } else if seconds.iter().any(|s| !s.is_finite() || *s < 0.0) {
            "reports a time that is negative or no number".to_owned()
        } else {
            return Ok(());
        };
        Err(Refusal::new(
            Reason::Malformed,
            format!(
                "{task} {what}; each step has at least one sample, and skipped and late steps are among them"
            ),
        ))
    }

    /// Checks in sync mode that the report finishes the sender's whole part of the open step.
    ///
    /// # Errors
    /// [`Reason::NotLeased`] if it does not.
    pub(super) fn check_part(
        &self,
        origin: &Origin,
        request: &wire::FinishStepRequest,
    ) -> Result<(), Refusal> {
        let task = origin.task;
        let mine = |step: &&Step| step.unfinished().any(|unfinished| unfinished == task);
        let step = self.durable.training.step.as_ref().filter(mine);
        let held = self.durable.training.held_by(task);
        match (step, held) {
            (Some(step), Some(split))
                if request.steps == 1
                    && request.position == split.end
                    && origin.clock == step.clock.next() =>
            {
                Ok(())
            }
            _ => Err(Refusal::new(
                Reason::NotLeased,
                format!(
                    "{task} says that it has finished {} steps and split {} up to position {}, at clock {}; in sync mode a worker finishes its whole part of the open step, once",
                    request.steps, request.split, request.position, origin.clock
                ),
            )),
        }
    }

    /// Counts a worker's report of steps. The worker's share of these steps has `samples` samples.
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

    /// After a restart of the coordinator, records how many of a worker's steps the state lacks. Outside sync mode, the
    /// persisted state may be a moment older than the last replies, so that it lacks a few steps. If it is an older
    /// copy, it lacks many.
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

    /// In sync mode, evicts the sender unless all shards hold its gradient, so that no other worker waits for its part
    /// of the step.
    ///
    /// # Errors
    /// [`Reason::Malformed`] names a shard without a valid receipt.
    pub(super) fn require_receipts(
        &mut self,
        origin: &Origin,
        request: &wire::FinishStepRequest,
    ) -> Result<(), Refusal> {
        self.check_receipts(origin, request).inspect_err(|_| {
            let why = "it finished a step without a receipt of each shard";
            self.due.add(FollowUp::Evict(origin.task.id, why));
        })
    }
}
