//! The follow-ups of a call. Methods note them during the call, and `events` carries them out at its end.

use shared_proto::ids::{Task, TaskId};

/// The follow-ups of the present call.
#[derive(Debug, Default)]
pub(super) struct Due {
    /// The members to evict, each with the reason.
    evictions: Vec<(TaskId, &'static str)>,
    /// The workers to evict and to expect back, and the reason.
    workers: Option<(Vec<Task>, &'static str)>,
    /// True if a ring may be complete now.
    ring: bool,
    /// True if the next step may be planned.
    plan: bool,
}

/// One follow-up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum FollowUp {
    /// Evict a member, for this reason.
    Evict(TaskId, &'static str),
    /// Evict these workers, and wait until they have registered again.
    EvictWorkers(Vec<Task>, &'static str),
    /// Form the ring, if its conditions are met.
    FormRing,
    /// Plan the next step of a job in lock step.
    Plan,
}

impl Due {
    /// Notes a follow-up. A second [`FollowUp::EvictWorkers`] replaces the first one, because its list includes the
    /// workers of the first.
    pub(super) fn add(&mut self, follow_up: FollowUp) {
        match follow_up {
            FollowUp::Evict(member, why) => self.evictions.push((member, why)),
            FollowUp::EvictWorkers(workers, why) => self.workers = Some((workers, why)),
            FollowUp::FormRing => self.ring = true,
            FollowUp::Plan => self.plan = true,
        }
    }

    /// Takes the next follow-up. Evictions come first, then the ring, and the plan comes last.
    pub(super) fn take(&mut self) -> Option<FollowUp> {
        if let Some((workers, why)) = self.workers.take() {
            return Some(FollowUp::EvictWorkers(workers, why));
        }
        if let Some((member, why)) = self.evictions.pop() {
            return Some(FollowUp::Evict(member, why));
        }
        if std::mem::take(&mut self.ring) {
            return Some(FollowUp::FormRing);
        }
        std::mem::take(&mut self.plan).then_some(FollowUp::Plan)
    }

    /// Returns whether no follow-up is left.
    pub(super) fn is_empty(&self) -> bool {
        self.evictions.is_empty() && self.workers.is_none() && !self.ring && !self.plan
    }
}

#[cfg(test)]
mod tests {
    use shared_proto::ids::Generation;

    use super::*;

    #[test]
    fn evictions_come_before_the_ring_and_the_ring_before_the_plan() {
        let task = Task {
            id: TaskId::worker(0),
            generation: Generation(1),
        };
        let expected = [
            FollowUp::EvictWorkers(vec![task], "all"),
            FollowUp::Evict(TaskId::worker(1), "one"),
            FollowUp::FormRing,
            FollowUp::Plan,
        ];
        let mut due = Due::default();
        for follow_up in expected.iter().rev() {
            due.add(follow_up.clone());
        }
        let taken: Vec<FollowUp> = std::iter::from_fn(|| due.take()).collect();
        assert_eq!(taken, expected);
        assert!(due.is_empty());
    }
}
