//! The norm of a step in sync mode. The servers limit it together: each server reports its shard's part, and the
//! coordinator sends the same factor to all.

use std::collections::BTreeMap;

use shared_proto::ids::{Clock, Epoch};
use shared_proto::view::Commit;

use super::Cluster;
use super::steps::Step;

/// Sync mode: the shards' parts of the norm of the open step. They are not persisted; after a restart the servers
/// report them again.
#[derive(Debug, Default)]
pub(super) struct Norms {
    of: (Epoch, Clock),
    /// By shard: the sum of the squares of its part of the mean gradient.
    squares: BTreeMap<u32, f64>,
}

impl Norms {
    /// Adds a shard's part. Drops the parts of another step or epoch.
    pub(super) fn add(&mut self, of: (Epoch, Clock), shard: u32, squares: f64) {
        if self.of != of {
            (self.of, self.squares) = (of, BTreeMap::new());
        }
        self.squares.insert(shard, squares);
    }
}

impl Cluster {
    /// Returns whether the open step waits for its norm: all its parts are finished, and the servers limit the mean
    /// gradient.
    pub(super) fn is_measuring(&self) -> bool {
        self.job.servers_clip()
            && self.job.clip_norm.is_some()
            && self
                .durable
                .training
                .step
                .as_ref()
                .is_some_and(Step::is_to_measure)
    }

    /// Returns the commit that the open step will get, without its clip factor, if the step waits for its norm.
    pub(super) fn step_to_measure(&self) -> Option<Commit> {
        let step = self.durable.training.step.as_ref();
        step.filter(|_| self.is_measuring()).map(Step::to_commit)
    }

    /// Returns the servers that have not reported their parts of the norm.
    pub(super) fn unmeasured(&self) -> Vec<String> {
        let reported = |shard: &usize| self.norms.squares.contains_key(&(*shard as u32));
        let servers = self.durable.servers().into_iter().enumerate();
        let missing = servers.filter(|(shard, _)| !reported(shard));
        missing.map(|(_, task)| task.to_string()).collect()
    }

    /// Returns the clip factor of the open step. The outer value is `None` while parts of the norm are missing. The
    /// inner value is `None` if the step is not limited.
    pub(super) fn clip_factor(&self) -> Option<Option<f32>> {
        let (Some(step), Some(most)) = (self.step_to_measure(), self.job.clip_norm) else {
            return Some(None);
        };
        let shards = 0..self.durable.map()?.shards.len() as u32;
        let is_current = self.norms.of == (self.durable.epoch(), step.step);
        let squares = shards.map(|shard| self.norms.squares.get(&shard).filter(|_| is_current));
        let norm = squares.sum::<Option<f64>>()?.sqrt();
        let most = f64::from(most);
        // The rounded factor is 1 at most, which is no limit.
        Some((norm > most).then_some((most / norm) as f32))
    }
}
