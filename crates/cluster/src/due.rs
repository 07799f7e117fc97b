//! What a call leaves due. A method deep inside a call only notes it here, and `events` carries it out at the end of the call.

use shared_proto::ids::TaskId;

/// The follow-ups of the present call.
#[derive(Debug, Default)]
pub(super) struct Due {
    /// The members to evict, each with the reason.
    evictions: Vec<(TaskId, &'static str)>,
    /// The reason for which all workers are to be evicted, if they are.
    without_workers: Option<&'static str>,
    /// Whether a ring may be complete now.
    ring: bool,
}

/// One follow-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FollowUp {
    /// Evict a member, for this reason.
    Evict(TaskId, &'static str),
    /// Evict all workers, for this reason.
    EvictWorkers(&'static str),
    /// Form the ring, if all that it needs is there.
    FormRing,
}

impl Due {
    /// Notes a follow-up. All workers are evicted once, for the last of several reasons.
    pub(super) fn add(&mut self, follow_up: FollowUp) {
        match follow_up {
            FollowUp::Evict(member, why) => self.evictions.push((member, why)),
            FollowUp::EvictWorkers(why) => self.without_workers = Some(why),
            FollowUp::FormRing => self.ring = true,
        }
    }

    /// Takes the next follow-up. A ring is formed once all are gone that are to go.
    pub(super) fn take(&mut self) -> Option<FollowUp> {
        let all = self.without_workers.take().map(FollowUp::EvictWorkers);
        let one = || {
            self.evictions
                .pop()
                .map(|(id, why)| FollowUp::Evict(id, why))
        };
        let ring = std::mem::take(&mut self.ring);
        let next = all.or_else(one);
        self.ring = ring && next.is_some();
        next.or(ring.then_some(FollowUp::FormRing))
    }

    /// Returns whether nothing is left to do.
    pub(super) fn is_empty(&self) -> bool {
        self.evictions.is_empty() && self.without_workers.is_none() && !self.ring
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_is_formed_after_all_evictions() {
        let mut due = Due::default();
        due.add(FollowUp::FormRing);
        due.add(FollowUp::Evict(TaskId::worker(1), "one"));
        due.add(FollowUp::EvictWorkers("all"));
        let taken: Vec<FollowUp> = std::iter::from_fn(|| due.take()).collect();
        let evict = FollowUp::Evict(TaskId::worker(1), "one");
        assert_eq!(
            taken,
            [FollowUp::EvictWorkers("all"), evict, FollowUp::FormRing]
        );
        assert!(due.is_empty());
    }
}
