//! Checks of what a worker reports about finished steps.

use shared_proto::ids::{Clock, Origin, Task};
use shared_proto::planted;
use shared_proto::refusal::{Reason, Refusal};
use shared_proto::wire;

use super::Cluster;
use super::admission::not_leased;
use super::steps::Step;

impl Cluster {
    /// Checks that the split is the one that the sender holds.
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

    /// Checks in sync mode that all shards hold the gradient.
    ///
    /// # Errors
    /// [`Reason::Malformed`] names a shard without a receipt.
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
    /// [`Reason::Malformed`] names those that are not.
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
    /// [`Reason::Malformed`] names those that are not.
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
}
