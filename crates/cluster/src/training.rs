//! The progress of the training, leases of work, and the end of the job.

use std::time::Instant;

use serde::{Deserialize, Serialize};
use shared_proto::ids::{Clock, Origin, Role, Task};
use shared_proto::planted;
use shared_proto::view::{Commit, JobPhase};
use shared_proto::wire;

use super::Cluster;
use super::evaluations::Evaluation;
use super::ledger::{Ledger, Split};
use super::record::Record;
use super::steps::Step;

/// The most steps in a split. The data of a worker that dies is soon done again.
pub(super) const MOST_BATCHES: u64 = 64;

/// The fewest splits of an epoch for each worker, so that all workers end it together.
const SPLITS_PER_WORKER: u64 = 4;

/// The work that a worker is given.
#[derive(Debug, PartialEq)]
pub enum Work {
    /// A split of its own.
    Split(Split),
    /// A split that all members of the ring hold together, and this member's rank.
    Shared {
        /// The split.
        split: Split,
        /// The member's rank, from 0.
        rank: u32,
        /// The number of members.
        ranks: u32,
        /// The part of the learning rate that is left after plateaus.
        learning_rate_factor: f64,
    },
    /// The ring is over; the worker is to join the next one.
    Regroup,
    /// The worker is to copy its values, and to write them as this checkpoint.
    CopyValues {
        /// The number of the checkpoint.
        number: u64,
        /// The most elements of a block in its files.
        block_elements: u64,
        /// The number of its part.
        shard: u32,
        /// True if it only hands its part of the optimizer's state to the member that writes the checkpoint.
        helps: bool,
    },
    /// The worker is to evaluate the model.
    Evaluate {
        /// The data epoch that has ended, from 0.
        data_epoch: u32,
        /// Whether it also writes the model.
        save_model: bool,
    },
    /// No work at present, for this reason.
    Idle(String),
    /// The job has ended.
    Done,
}

/// The progress of the training.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Training {
    /// The data; none before the variables have their initial values.
    pub(super) ledger: Option<Ledger>,
    /// Sync mode: the open step.
    pub(super) step: Option<Step>,
    /// Sync mode: the newest committed step.
    pub(super) commit: Option<Commit>,
    pub(super) min_clock: Clock,
    pub(super) tally: Tally,
    /// Samples trained on before this run, according to the checkpoint that it began with.
    pub(super) earlier_samples: u64,
    /// True if the job was told to end before its data does.
    pub(super) stopping: bool,
    /// The reason, if the job's own settings end it early.
    #[serde(default)]
    pub(super) stopped_early: String,
}

impl Training {
    /// Returns the data epoch of fresh splits; 0 before there are any.
    pub(super) fn data_epoch(&self) -> u32 {
        let ledger = self.ledger.as_ref();
        ledger.map_or(0, |ledger| ledger.data_epoch())
    }

    /// Returns the split that a worker holds.
    pub(super) fn held_by(&self, task: Task) -> Option<Split> {
        self.ledger.as_ref()?.held_by(task)
    }

    /// Returns whether no worker gets another split.
    pub(super) fn leases_no_more(&self) -> bool {
        let ledger = self.ledger.as_ref();
        self.stopping || ledger.is_none_or(Ledger::leases_no_more)
    }

    /// Returns whether there is no more data to train on.
    pub(super) fn exhausted(&self) -> bool {
        let ledger = self.ledger.as_ref();
        ledger.is_some_and(|ledger| ledger.exhausted() || self.stopping && ledger.is_at_rest())
    }
}

/// The work done, summed over workers.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Tally {
    pub(super) steps: u64,
    pub(super) samples: u64,
    /// The number of steps that were left out because their gradients were NaN or infinite.
    pub(super) skipped: u64,
    /// The number of steps of workers that were left out because their gradients were late.
    #[serde(default)]
    pub(super) late: u64,
}

impl Cluster {
    /// Leases work to a worker. A repeated call before the work is done gives the same answer.
    /// `copied` is the newest checkpoint for which the worker has copied its values.
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
        // A step whose norm is being measured is committed first.
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
            self.plan_step(now);
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

    pub(super) fn begin(&mut self, now: Instant) {
        let initialized = self.durable.initialized();
        if self.durable.outcome.phase == JobPhase::Starting {
            self.save_if_due(now);
        }
        if self.durable.outcome.phase == JobPhase::Starting
            && initialized
            && self.missing().is_empty()
        {
            self.durable.outcome.phase = JobPhase::Training;
            self.must_persist();
            self.leave_fast_path();
            self.instants.began = Some(now);
            for member in self.durable.members.values_mut() {
                member.progress.moved = now;
            }
            self.records.push_back(Record::Began {
                ps: self.durable.servers().len(),
                workers: self.durable.live(Role::Worker).count(),
                training_samples: self.durable.training_samples(),
            });
        }
    }

    fn split_batches(&self) -> u64 {
        let workers = self.durable.live(Role::Worker).count().max(1) as u64;
        let batches = self
            .durable
            .training_samples()
            .div_ceil(self.job.samples_per_step());
        (batches / (workers * SPLITS_PER_WORKER)).clamp(1, MOST_BATCHES)
    }

    /// Schedules an evaluation at the end of the data, even if no epoch ends there.
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

    /// Schedules the last evaluation again, because a shard has gone back after it. The evaluation and the
    /// model that was saved with it no longer match the weights.
    pub(super) fn evaluate_again_at_the_end(&mut self) {
        if self.durable.checkpoints.ending() && !planted!(StaleModel) {
            self.not_last_any_more();
            self.durable.evaluations.reported = None;
            self.schedule_last_evaluation();
        }
    }

    /// Notes which workers a worker waits for.
    pub(crate) fn waiting(&mut self, now: Instant, task: Task, on: Vec<wire::Task>) {
        if let Some(member) = self.durable.members.get_mut(&task.id) {
            let since = member.progress.waits_since.unwrap_or(now);
            member.progress.waits_since = (!on.is_empty()).then_some(since);
            member.progress.waiting_on = on;
        }
    }
}
