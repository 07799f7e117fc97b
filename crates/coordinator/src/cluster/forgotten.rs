//! Members that are gone for good. The cluster keeps the newest of them, since a process may come back
//! under its identity; of all others it keeps sums, so that the state stays small however many came
//! and went.

use serde::{Deserialize, Serialize};
use shared_proto::ids::{Role, TaskId};
use shared_proto::number::Number;

use super::Cluster;
use super::members::Member;

/// Members that are gone and still known by their identity.
const DEAD_KEPT: usize = 64;

/// What is left of members that are not known any more.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Forgotten {
    /// Indices below these were given out: none is given out twice, since blocks know the messages that
    /// they have taken by them.
    next_ps: u32,
    next_worker: u32,
    /// Workers that have finished a step.
    pub(super) workers: usize,
    /// Pull, compute, push, wait, summed over them.
    times: [Number; 4],
    /// Of servers; a coordinator that starts again knows no such counters of others either.
    #[serde(skip)]
    pub(super) updates: u64,
    #[serde(skip)]
    pub(super) staleness_sum: u64,
    #[serde(skip)]
    pub(super) max_clock_lead: u64,
}

impl Forgotten {
    /// Pull, compute, push, wait, in seconds.
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
    /// The index of a task that registers for the first time.
    pub(super) fn new_index(&mut self, role: Role) -> u32 {
        // The state of an earlier release does not say how many were given out; it has them all.
        let known = self.members.keys().filter(|id| id.role == role);
        let known = known.map(|id| id.index + 1).max().unwrap_or(0);
        let next = match role {
            Role::Ps => &mut self.forgotten.next_ps,
            Role::Worker | Role::Coordinator => &mut self.forgotten.next_worker,
        };
        let index = known.max(*next);
        *next = index + 1;
        index
    }

    /// Forgets all but the newest of those that are gone. One that comes back after that gets an index
    /// of its own, and a higher generation than it ever had.
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
            if let Some(report) = self.shard_reports.remove(&id) {
                let forgotten = &mut self.forgotten;
                forgotten.updates = forgotten.updates.saturating_add(report.updates);
                forgotten.staleness_sum =
                    forgotten.staleness_sum.saturating_add(report.staleness_sum);
                forgotten.max_clock_lead = forgotten.max_clock_lead.max(report.max_clock_lead);
            }
        }
    }

    /// Whether the cluster waits for one that is gone: a shard, or a place in the training, is its.
    fn is_expected(&self, member: &Member) -> bool {
        self.awaited.contains_key(&member.task.id) || self.shard_of(member.task).is_some()
    }
}
