//! The servers' reports of their shards.

use std::time::Instant;

use shared_proto::ids::Task;
use shared_proto::job::NonFinite;
use shared_proto::refusal::brief;
use shared_proto::wire;

use super::Cluster;

impl Cluster {
    /// Takes a server's report of its shard.
    pub(crate) fn report_shard(&mut self, now: Instant, task: Task, mut report: wire::ShardReport) {
        // The server does not know yet that it has another shard, or none.
        if self.durable.servers().get(report.shard as usize) != Some(&task) {
            return;
        }
        self.durable.unable.can_work(task.id);
        if !report.non_finite.is_empty() && self.job.non_finite == NonFinite::Fail {
            let variable = brief(&report.non_finite);
            self.fail(
                now,
                format!(
                    "an update has made values of variable {variable:?} on {task} NaN or infinite; lower the learning rate, or set clip_norm"
                ),
            );
        }
        self.writes_on(now, task, &report);
        report.tables.truncate(self.durable.tables().len());
        self.observed.shard_reports.insert(task.id, report);
    }

    /// Returns whether every live server of a shard has sent its last report.
    pub fn all_shards_reported(&self) -> bool {
        let servers = self.durable.servers();
        let live = |task: &&Task| self.durable.member(task.id).is_some_and(|m| m.is_alive());
        servers.iter().filter(live).all(|task| {
            self.observed
                .shard_reports
                .get(&task.id)
                .is_some_and(|r| r.last)
        })
    }

    /// Notes progress of the checkpoint if a server has written more of it since its previous report.
    fn writes_on(&mut self, now: Instant, task: Task, report: &wire::ShardReport) {
        let before = self.observed.shard_reports.get(&task.id);
        let more = report.checkpoint_bytes > before.map_or(0, |before| before.checkpoint_bytes);
        let of_shard = self.durable.servers().get(report.shard as usize) == Some(&task);
        let at_work = self.saving.at_work.as_mut();
        if let Some(at_work) = at_work.filter(|_| of_shard && more) {
            at_work.moved = now;
        }
    }
}
