//! Members that have left for good. The cluster keeps the newest of them, because a process may come back
//! under its identity. Of the others it keeps totals, so that the state stays small.

use serde::{Deserialize, Serialize};
use shared_proto::ids::{Role, TaskId};
use shared_proto::number::Number;

use super::Cluster;
use super::members::Member;

/// The number of departed members that keep their identity.
const DEAD_KEPT: usize = 64;

/// The totals of members that are no longer tracked.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Forgotten {
    /// The next free index of a server. No index is assigned twice, because the marks of blocks identify
    /// workers by them.
    next_ps: u32,
    /// The next free index of a worker.
    next_worker: u32,
    /// The number of workers that have finished a step.
    pub(super) workers: usize,
    /// The seconds spent in pull, compute, push and wait, summed over all workers.
    times: [Number; 4],
    /// The updates of servers. Not stored: a restarted coordinator knows no such counters of other servers either.
    #[serde(skip)]
    pub(super) updates: u64,
    #[serde(skip)]
    pub(super) staleness_sum: u64,
    #[serde(skip)]
    pub(super) max_clock_lead: u64,
}

impl Forgotten {
    /// Returns the seconds spent in pull, compute, push and wait.
    pub(super) fn times(&self) -> [f64; 4] {
        self.times.map(|time| time.0)
    }

    fn add(&mut self, member: &Member) {
        let work = &member.progress;
        self.workers += usize::from(work.steps > 0);
        let times = work.times;
        let more = [times.pull, times.compute, times.push, times.wait];
        for (sum, more) in self.times.iter_mut().zip(more) {
            sum.0 += more;
        }
    }
}

impl Cluster {
    /// Returns the index of a task that registers for the first time.
    pub(super) fn new_index(&mut self, role: Role) -> u32 {
        // The state of an earlier release lacks the next index, but has all members.
        let known = self.members.keys().filter(|id| id.role == role);
        let known = known
            .map(|id| id.index.saturating_add(1))
            .max()
            .unwrap_or(0);
        let next = match role {
            Role::Ps => &mut self.forgotten.next_ps,
            Role::Worker | Role::Coordinator => &mut self.forgotten.next_worker,
        };
        let index = known.max(*next);
        *next = index.saturating_add(1);
        index
    }

    /// Forgets all departed members but the newest. A forgotten one that returns gets a new index, and a
    /// higher generation than it ever had.
    pub(super) fn forget_the_dead(&mut self) {
        let mut dead: Vec<TaskId> = self
            .members
            .values()
            .filter(|m| !m.alive && !self.is_expected(m))
            .map(|m| m.task.id)
            .collect();
        let too_many = dead.len().saturating_sub(DEAD_KEPT);
        dead.sort_by_key(|id| self.members.get(id).map(|m| (m.seen, m.task.id)));
        for id in dead.into_iter().take(too_many) {
            let Some(member) = self.members.remove(&id) else {
                continue;
            };
            let above = member.task.generation.next();
            self.first_generation = self.first_generation.max(above);
            self.forgotten.add(&member);
            self.recoveries.remove(&id);
            if let Some(report) = self.shard_reports.remove(&id) {
                let forgotten = &mut self.forgotten;
                forgotten.updates = forgotten.updates.saturating_add(report.updates);
                forgotten.staleness_sum =
                    forgotten.staleness_sum.saturating_add(report.staleness_sum);
                forgotten.max_clock_lead = forgotten.max_clock_lead.max(report.max_clock_lead);
            }
        }
    }

    /// Returns whether the cluster waits for a departed member, because it has a shard or was evicted.
    fn is_expected(&self, member: &Member) -> bool {
        self.awaited.contains_key(&member.task.id) || self.shard_of(member.task).is_some()
    }
}
