//! The epochs of the shard map. Each move of a shard, and each end of a ring, begins a new epoch.

use std::time::Instant;

use super::Cluster;
use super::ring::Cause;

impl Cluster {
    /// Begins a new epoch, because a shard has moved or has other values, or because the ring breaks. A formed ring
    /// ends with its epoch.
    pub(super) fn raise_epoch(&mut self, now: Instant, cause: Cause) {
        match self.durable.ring.is_formed() {
            true => self.note_broken(now, cause),
            false => self.observed.rings.waits_again(now),
        }
        let next = self.durable.epoch().next();
        if let Some(map) = self.durable.map_mut() {
            map.epoch = next;
        }
        if self.has_ring() {
            self.durable.ring.end(next);
            // Its source may be gone. If the next ring begins with a checkpoint as well, its own source loads it.
            let part = self.part_of_ring();
            self.durable.checkpoints.loading.remove(&part);
        }
        if self.has_ring() && self.durable.map().is_some() && self.saving.at_work() {
            // Servers write a checkpoint in one epoch. The next ring begins with another.
            self.give_up_saving();
            self.saving.begun = None;
        }
        self.must_persist();
    }

    /// Breaks the ring, if one is formed. All members must then join the next one.
    pub(super) fn break_ring(&mut self, now: Instant, cause: Cause) {
        if self.durable.ring.is_formed() {
            self.raise_epoch(now, cause);
        }
    }

    /// Notes that the formed ring is over.
    fn note_broken(&mut self, now: Instant, cause: Cause) {
        let ring = &self.durable.ring;
        tracing::info!(
            ring = ring.number.0,
            why = cause.text(),
            "the ring is broken"
        );
        self.observed.rings.broke(now, cause);
        // The others have waited for the one that is lost.
        for member in self.durable.members.values_mut() {
            member.progress.moved = now;
        }
        self.must_persist();
    }
}
