//! Members that have left for good. The cluster keeps the newest of them, because a process may come back under its
//! identity. Of the others it keeps only totals, so that the state stays small.

use serde::{Deserialize, Serialize};
use shared_proto::ids::{Generation, Role, TaskId};

use super::Cluster;
use super::members::Member;
use super::times::Times;

/// The maximum number of identities of departed members that are kept.
const DEAD_KEPT: usize = 64;

/// The totals of members that are no longer tracked.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Forgotten {
    /// The generation of tasks that register for the first time. It is higher than the generations of all forgotten
    /// members.
    pub(super) first_generation: Generation,
    /// The next free index of a server. No index is assigned twice, because the watermarks of blocks identify workers
    /// by their index.
    next_ps: u32,
    /// The next free index of a worker.
    next_worker: u32,
    /// The number of forgotten workers that have finished a step.
    pub(super) workers: usize,
    /// The sum of the times of all forgotten workers.
    pub(super) times: Times,
}

impl Default for Forgotten {
    fn default() -> Self {
        Self {
            first_generation: Generation(1),
            next_ps: 0,
            next_worker: 0,
            workers: 0,
            times: Times::default(),
        }
    }
}

impl Forgotten {
    /// Returns the next free index of a role.
    pub(super) fn next_index(&self, role: Role) -> u32 {
        match role {
            Role::Ps => self.next_ps,
            Role::Worker | Role::Coordinator => self.next_worker,
        }
    }

    fn add(&mut self, member: &Member) {
        let work = &member.progress;
        self.workers += usize::from(work.steps > 0);
        self.times.add(&work.times);
    }
}

impl Cluster {
    /// Assigns the index of a task that registers for the first time.
    pub(super) fn new_index(&mut self, role: Role) -> u32 {
        let next = match role {
            Role::Ps => &mut self.durable.forgotten.next_ps,
            Role::Worker | Role::Coordinator => &mut self.durable.forgotten.next_worker,
        };
        let index = *next;
        *next = index.saturating_add(1);
        index
    }

    /// Forgets departed members, except the newest and those that the cluster waits for. A forgotten member that
    /// returns gets a new index, and a higher generation than any that it has had.
    pub(super) fn forget_the_dead(&mut self) {
        let members = self.durable.members.values();
        let mut dead: Vec<TaskId> = members
            .filter(|m| !m.is_alive() && !self.is_expected(m))
            .map(|m| m.task.id)
            .collect();
        let too_many = dead.len().saturating_sub(DEAD_KEPT);
        dead.sort_by_key(|id| self.durable.members.get(id).map(|m| (m.seen, m.task.id)));
        for id in dead.into_iter().take(too_many) {
            let Some(member) = self.durable.members.remove(&id) else {
                continue;
            };
            let above = member.task.generation.next();
            self.durable.forgotten.first_generation =
                self.durable.forgotten.first_generation.max(above);
            self.durable.forgotten.add(&member);
            self.observed.forget(id);
        }
    }

    /// Returns whether the cluster waits for a departed member, because it has a shard, or was evicted and should
    /// register again.
    fn is_expected(&self, member: &Member) -> bool {
        self.durable.awaited.contains_key(&member.task.id)
            || self.durable.shard_of(member.task).is_some()
    }
}
