//! Leases work to workers that ask for it.

use std::time::Instant;

use shared_proto::ids::{Clock, Origin, Role};
use shared_proto::view::JobPhase;

use super::Cluster;
use super::evaluations::Evaluation;
use super::ledger::Split;

/// The maximum number of steps in a split. It is small, so that other workers soon redo the data of a worker that dies.
pub(super) const MOST_BATCHES: u64 = 64;

/// The number of splits that each worker should get in an epoch, at least, so that all workers end it at about the same
/// time.
const SPLITS_PER_WORKER: u64 = 4;

/// The work that a worker is given.
#[derive(Debug, PartialEq)]
pub enum Work {
    /// A split that this worker holds alone.
    Split(Split),
    /// A split that all members of the ring hold together, and this member's rank.
    Shared {
        /// The split.
        split: Split,
        /// The member's rank, from 0.
        rank: u32,
        /// The number of members that compute. Members whose rank is `ranks` or higher are spare: they have no samples.
        ranks: u32,
        /// The product of all factors by which the learning rate has fallen on plateaus.
        learning_rate_factor: f64,
    },
    /// The worker is not in the present ring, and must join the next one.
    Regroup,
    /// The worker must copy its values for a checkpoint, and write the ring's part of the checkpoint from them.
    CopyValues {
        /// The number of the checkpoint.
        number: u64,
        /// The maximum number of elements of a block in the checkpoint's files.
        block_elements: u64,
        /// The index of the ring's part among the parts of the checkpoint.
        shard: u32,
        /// True if the worker only sends its part of the optimizer's state to the member that writes the checkpoint.
        helps: bool,
    },
    /// The worker must evaluate the model.
    Evaluate {
        /// The data epoch that has ended, from 0.
        data_epoch: u32,
        /// Whether the worker also writes the model.
        save_model: bool,
    },
    /// No work at present, for this reason.
    Idle(String),
    /// The job has ended.
    Done,
}

impl Cluster {
    /// Leases work to a worker. Returns the work, and the clock at which the worker continues. A repeated call before
    /// the work is done returns the same work. `copied` is the newest checkpoint for which the worker has copied its
    /// values.
    pub fn lease_work(
        &mut self,
        now: Instant,
        origin: &Origin,
        copied: Option<u64>,
    ) -> (Work, Clock) {
        let task = origin.task;
        let work = self.choose_work(now, origin, copied);
        let min_clock = self.update_min_clock();
        let clock = self.change_progress(task.id, |state| {
            state.active = matches!(work, Work::Split(_) | Work::Shared { .. });
            if !matches!(work, Work::Idle(_)) {
                (state.acted, state.moved) = (now, now);
            }
            // A worker that was away continues at the min clock.
            state.clock = state.clock.max(min_clock);
            state.clock
        });
        (work, clock.unwrap_or(min_clock))
    }

    /// Plans the next steps of a ring, or the next step in sync mode, unless steps are under way.
    pub(super) fn plan(&mut self, now: Instant) {
        match self.has_ring() {
            true => self.plan_span(now),
            false => self.plan_step(now),
        }
    }

    fn choose_work(&mut self, now: Instant, origin: &Origin, copied: Option<u64>) -> Work {
        let task = origin.task;
        if self.ended() {
            return Work::Done;
        }
        self.note_copied(task, copied);
        if self.has_ring() && !self.is_in_ring(origin) {
            return Work::Regroup;
        }
        if self.has_ring() {
            self.enter_ring(now, task);
        }
        if let Some(member) = self.durable.members.get_mut(&task.id)
            && !std::mem::replace(&mut member.progress.ready, true)
        {
            self.must_persist();
        }
        self.durable.awaited.remove(&task.id);
        self.durable.unable.can_work(task.id);
        self.begin(now);
        if let Some(copy) = self.copy_for_checkpoint(task, copied) {
            return copy;
        }
        if self.durable.checkpoints.ending() {
            return Work::Idle(self.saving.last_of());
        }
        if self.durable.outcome.phase != JobPhase::Training {
            return Work::Idle(self.missing());
        }
        if let Some(work) = self.work_in_ring(task) {
            return work;
        }
        if let Some(split) = self.durable.training.held_by(task) {
            return Work::Split(split);
        }
        self.evaluate_when_at_rest();
        let exhausted = self.durable.training.exhausted();
        // While the norm of a step is measured, the step is committed first.
        let measuring = self.is_measuring();
        let evaluations = &mut self.durable.evaluations;
        let leased = match measuring {
            true => None,
            false => evaluations.lease(task, exhausted),
        };
        if let Some(evaluation) = leased {
            self.must_persist();
            return Work::Evaluate {
                data_epoch: evaluation.data_epoch,
                save_model: evaluation.last,
            };
        }
        let split = if self.in_lock_step() {
            self.plan(now);
            if let Some(work) = self.work_in_ring(task) {
                return work;
            }
            self.durable.training.held_by(task)
        } else if self.durable.training.stopping {
            None
        } else {
            let batches = self.split_batches();
            let ledger = self.durable.training.ledger.as_mut();
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
        if let Some(Evaluation {
            data_epoch, task, ..
        }) = self.durable.evaluations.at_work
        {
            return format!("{task} evaluates epoch {}", data_epoch.saturating_add(1));
        }
        if let Some(server) = self.draining.keys().next() {
            return format!("{server} is about to stop, and its shard is saved first");
        }
        if let Some((gone, _)) = self.durable.awaited.first_key_value() {
            return format!("{gone} is given time to come back");
        }
        if self.is_measuring() {
            let missing = self.unmeasured().join(", ");
            return format!("the norm of a step is measured; {missing} has not reported its part");
        }
        "others finish their data".to_owned()
    }

    fn split_batches(&self) -> u64 {
        let workers = self.durable.live(Role::Worker).count().max(1) as u64;
        let batches = self
            .durable
            .training_samples()
            .div_ceil(self.job.samples_per_step());
        (batches / (workers * SPLITS_PER_WORKER)).clamp(1, MOST_BATCHES)
    }
}
