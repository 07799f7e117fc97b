//! Cuts the shard map once the variables and the servers are known.

use std::time::Instant;

use shared_proto::blocks::{PlacedShard, ShardMap, ShardServer, Source};
use shared_proto::ids::{Epoch, Role, Task};
use shared_proto::refusal::{Reason, Refusal};

use super::Cluster;
use super::capacity::check_capacity;
use super::checkpoints::source;
use super::map_size::check_map_size;
use super::members::Member;
use super::placement::{block_elements, held_by_workers, place, place_tables};
use super::waits::SETTLE;

impl Cluster {
    /// Returns the shard map.
    ///
    /// # Errors
    /// [`Reason::NotInitialized`] before it is cut.
    pub fn shard_map(&self) -> Result<&ShardMap, Refusal> {
        let map = self.durable.map();
        map.ok_or_else(|| {
            Refusal::new(
                Reason::NotInitialized,
                "the shard map is not cut yet: no worker has registered variables, servers are missing, or the job has none",
            )
        })
    }

    /// Cuts the shard map, unless it is cut already. If it cannot be cut yet, returns the missing condition. A job
    /// without servers gets no map.
    ///
    /// # Errors
    /// [`Reason::Oversized`] if the map does not fit into a control message, or a server has too little memory.
    pub(super) fn cut_shard_map(&mut self, now: Instant) -> Result<Option<String>, Refusal> {
        if self.durable.map().is_some() {
            return Ok(None);
        }
        let joined = self.instants.last_ps_joined;
        let settled = joined.is_none_or(|at| now >= at + SETTLE);
        if let Some(missing) = self.missing_servers(settled) {
            return Ok(Some(missing));
        }
        let mut servers: Vec<&Member> = self.durable.live(Role::Ps).collect();
        servers.sort_by_key(|m| m.task.id.index);
        if let Some(wanted) = self.job.servers() {
            servers.truncate(wanted as usize);
        }
        if servers.is_empty() {
            return Ok(None);
        }
        let Some(variables) = &self.durable.variables else {
            return Ok(None);
        };
        let shards = servers.len() as u32;
        let block_elements = match &self.durable.checkpoints.start {
            Some(start) => start.block_elements,
            None => block_elements(&variables.model.variables, shards),
        };
        let location = self.checkpoint_location();
        check_map_size(&variables.model, block_elements, servers.len(), location)?;
        let placed = match self.has_ring() {
            true => held_by_workers(&variables.model.variables),
            false => place(variables.model.variables.clone(), shards, block_elements),
        };
        let tables = place_tables(&variables.model.tables, shards);
        check_capacity(&self.job, &servers, &placed, block_elements)?;
        let servers: Vec<(Task, String)> = servers
            .iter()
            .map(|m| (m.task, m.address.clone()))
            .collect();
        let checkpoints = &self.durable.checkpoints;
        let begin_with = checkpoints.start.as_ref().and(checkpoints.newest.clone());
        let workers = u64::from(self.job.cluster.workers.unwrap_or(1));
        let Some(variables) = &mut self.durable.variables else {
            return Ok(None);
        };
        let source = match &begin_with {
            Some(kept) => source(Epoch(1), kept),
            None => Source::initializer(Epoch(1)),
        };
        tracing::info!(
            shards,
            variables = placed.len(),
            tables = tables.len(),
            block_elements,
            "cut the shard map"
        );
        variables.map = Some(ShardMap {
            epoch: Epoch(1),
            shards: servers
                .into_iter()
                .map(|(server, address)| PlacedShard {
                    server: ShardServer::new(server, address),
                    source: source.clone(),
                })
                .collect(),
            variables: placed,
            tables,
            block_elements,
            total_updates: self
                .job
                .total_updates(variables.data.training_samples, workers),
        });
        if let Some(kept) = begin_with {
            variables.initialized = true;
            self.durable.checkpoints.loading =
                (0..shards as usize).map(|s| (s, String::new())).collect();
            self.restore_progress(&kept.progress);
        }
        self.must_persist();
        Ok(None)
    }

    /// Returns the longest location of a checkpoint from which shards may be loaded; empty without checkpoints.
    fn checkpoint_location(&self) -> &str {
        let newest = self.durable.checkpoints.newest.as_ref();
        let newest = newest.map_or("", |kept| &kept.location);
        let place = self.place().map_or("", |place| &place.location);
        if newest.len() > place.len() {
            newest
        } else {
            place
        }
    }
}
