//! Counts for status, gauges and the summary, since this process started. A restarted coordinator counts anew.

use std::collections::BTreeMap;

use shared_proto::ids::TaskId;
use shared_proto::wire;

use super::ring::Rings;
use super::rise::LossWatch;

/// Counts since this process started.
#[derive(Debug, Default)]
pub(super) struct Observed {
    pub(super) fault_counts: FaultCounts,
    /// By server: the number of times that it was lost and its shard was restored.
    pub(super) recoveries: BTreeMap<TaskId, u64>,
    /// The number of times that workers have left because they could not work, by kind.
    pub(super) worker_failures: BTreeMap<String, u64>,
    /// The newest report of each server.
    pub(super) shard_reports: BTreeMap<TaskId, wire::ShardReport>,
    /// The counts of updates of servers that are no longer tracked.
    pub(super) forgotten: Updates,
    /// The steps since the last `Record::Steps`.
    pub(super) recent: Recent,
    pub(super) loss_watch: LossWatch,
    /// The warning about the newest rise of the training loss, with advice; empty if there is none.
    pub(super) loss_warning: String,
    pub(super) rings: Rings,
}

/// Counts of faults.
#[derive(Clone, Copy, Debug, Default)]
pub struct FaultCounts {
    /// The number of servers that sent nothing for a lease.
    pub lost_servers: u64,
    /// The number of workers that sent nothing for a lease, made no progress for the stall time-out, or were replaced
    /// by another process of their identity before they left.
    pub lost_workers: u64,
    /// The number of checkpoints that could not be written.
    pub failed_checkpoints: u64,
}

/// Counts of updates that servers have reported.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Updates {
    pub(super) updates: u64,
    pub(super) staleness_sum: u64,
    pub(super) max_clock_lead: u64,
    pub(super) corrected_steps: wire::CorrectedSteps,
}

impl Updates {
    fn add(&mut self, report: &wire::ShardReport) {
        self.updates = self.updates.saturating_add(report.updates);
        self.staleness_sum = self.staleness_sum.saturating_add(report.staleness_sum);
        self.max_clock_lead = self.max_clock_lead.max(report.max_clock_lead);
        if let Some(steps) = &report.corrected_steps {
            self.corrected_steps.add(steps);
        }
    }
}

/// The steps since the last `Record::Steps`.
#[derive(Debug, Default)]
pub(super) struct Recent {
    pub(super) worker_steps: u64,
    pub(super) steps: u64,
    pub(super) loss_sum: f64,
}

impl Observed {
    /// Forgets a member, except for its part in the totals.
    pub(super) fn forget(&mut self, id: TaskId) {
        self.recoveries.remove(&id);
        if let Some(report) = self.shard_reports.remove(&id) {
            self.forgotten.add(&report);
        }
    }

    /// Returns the counts of updates of all servers.
    pub(super) fn updates(&self) -> Updates {
        let mut all = self.forgotten;
        for report in self.shard_reports.values() {
            all.add(report);
        }
        all
    }
}
