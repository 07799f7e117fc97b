//! Servers that are about to stop. A checkpoint with all of their shards is ordered first, so that their successors
//! lose nothing.

use std::collections::btree_map::Entry;
use std::time::Instant;

use shared_proto::ids::Task;
use shared_proto::planted;

use super::Cluster;

impl Cluster {
    /// Notes that a server is about to stop. Returns whether its shard must be saved first.
    pub(super) fn begin_draining(&mut self, now: Instant, server: Task) -> bool {
        let initialized = self.durable.initialized();
        let holds = self.durable.shard_of(server).is_some();
        if self.ended() || self.place().is_none() || !initialized || !holds || planted!(NoDrain) {
            return false;
        }
        if let Entry::Vacant(entry) = self.draining.entry(server.id) {
            tracing::info!(%server, "a server is about to stop; its shard is saved");
            entry.insert(None);
            // The server does not wait for the backoff after failed checkpoints.
            if let Some(failed) = &mut self.saving.failed {
                failed.try_again = now;
            }
        }
        true
    }

    /// Returns whether the shards of all draining servers are saved.
    pub(super) fn drained(&self) -> bool {
        let newest = self.newest_checkpoint();
        // When one server leaves, no checkpoint can be written until its shard is served again. So all that are
        // about to stop leave after the same checkpoint.
        let saved = |number: &Option<u64>| number.is_some() && newest >= *number;
        self.draining.values().all(saved)
    }

    /// Returns whether a server waits for a checkpoint that is not ordered yet.
    pub(super) fn awaits_draining(&self) -> bool {
        self.draining.values().any(Option::is_none)
    }

    /// Notes that a checkpoint is ordered. It contains every push to the shards of draining servers.
    pub(super) fn drains_into(&mut self, checkpoint: u64) {
        for number in self.draining.values_mut() {
            number.get_or_insert(checkpoint);
        }
    }

    /// Notes that the checkpoint ordered last has failed, so the servers that wait for it need another.
    pub(super) fn drain_again(&mut self) {
        let newest = self.newest_checkpoint();
        for number in self.draining.values_mut() {
            if *number > newest {
                *number = None;
            }
        }
    }
}
