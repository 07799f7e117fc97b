//! Servers that are about to stop: a checkpoint is ordered that has all of their shards, so that whoever takes them
//! next loses nothing.

use std::time::Instant;

use shared_proto::ids::Task;

use super::Cluster;

impl Cluster {
    /// A server is about to stop, and takes no pushes any more; in sync mode no step is planned until it has
    /// gone. Returns whether it may go.
    pub(crate) fn drain(&mut self, now: Instant, server: Task) -> bool {
        let initialized = self.variables.as_ref().is_some_and(|v| v.initialized);
        let holds = self.shard_of(server).is_some();
        if self.ended() || self.place().is_none() || !initialized || !holds {
            return true;
        }
        self.draining.entry(server.id).or_insert_with(|| {
            tracing::info!(%server, "a server is about to stop; its shard is saved");
            None
        });
        // In sync mode a checkpoint is of the time between two steps.
        if self.step.is_none() {
            self.save_if_due(now);
        }
        let newest = self.checkpoints.newest.as_ref().map(|newest| newest.number);
        let has_all = self.draining.get(&server.id).copied().flatten();
        has_all.is_some_and(|number| newest >= Some(number))
    }

    /// Whether some server waits for a checkpoint that is not ordered yet.
    pub(super) fn awaits_draining(&self) -> bool {
        self.draining.values().any(Option::is_none)
    }

    /// Notes that a checkpoint is ordered. It contains every push to the shards of draining servers.
    pub(super) fn drains_into(&mut self, checkpoint: u64) {
        for number in self.draining.values_mut() {
            number.get_or_insert(checkpoint);
        }
    }

    /// The checkpoint that was ordered last comes to nothing: those that wait for it need another.
    pub(super) fn drain_again(&mut self) {
        let newest = self.checkpoints.newest.as_ref().map(|newest| newest.number);
        for number in self.draining.values_mut() {
            if *number > newest {
                *number = None;
            }
        }
    }
}
