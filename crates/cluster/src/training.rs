//! The progress of the training, and its beginning.

use std::time::Instant;

use serde::{Deserialize, Serialize};
use shared_proto::ids::{Clock, Role, Task};
use shared_proto::view::{Commit, JobPhase};
use shared_proto::wire;

use super::Cluster;
use super::ledger::{Ledger, Split};
use super::record::Record;
use super::steps::Step;

/// The progress of the training.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Training {
    /// The data; `None` before the variables have their initial values.
    pub(super) ledger: Option<Ledger>,
    /// Sync mode: the open step.
    pub(super) step: Option<Step>,
    /// Sync mode: the newest committed step.
    pub(super) commit: Option<Commit>,
    pub(super) min_clock: Clock,
    pub(super) tally: Tally,
    /// The number of samples trained on before this run, according to the checkpoint that it began with.
    pub(super) earlier_samples: u64,
    /// True if the job must end before all its data is used: on request, or because of `early_stopping`.
    pub(super) stopping: bool,
    /// The reason why `early_stopping` ends the job; empty if it does not.
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

/// The work done by all workers. A step that workers make together counts once.
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

    /// Notes for which workers a worker waits. If `on` is empty, the wait is over.
    pub(crate) fn waiting(&mut self, now: Instant, task: Task, on: Vec<wire::Task>) {
        if let Some(member) = self.durable.members.get_mut(&task.id) {
            let since = member.progress.waits_since.unwrap_or(now);
            member.progress.waits_since = (!on.is_empty()).then_some(since);
            member.progress.waiting_on = on;
        }
    }
}
