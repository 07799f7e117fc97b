//! Describes for people why training waits.

use std::time::Duration;

use shared_proto::ids::Role;
use shared_proto::view::JobPhase;

use super::Cluster;
use super::checkpoints::Stage;
use super::members::Standing;

/// If the job does not set the number of servers, the shard map is cut once no server has joined for this long.
pub(super) const SETTLE: Duration = Duration::from_secs(3);

impl Cluster {
    /// Describes what prevents training from beginning or continuing; empty if nothing does.
    pub(crate) fn missing(&self) -> String {
        if self.ended() {
            return String::new();
        }
        if let Some(shard) = self.durable.orphans().next() {
            let map = self.durable.map();
            let gone = map.and_then(|map| {
                self.durable
                    .members
                    .get(&map.shards[shard].server.task().id)
            });
            let gone = gone.map_or_else(String::new, |m| match &m.standing {
                Standing::Gone(why) => format!(": {} is gone ({why})", m.task),
                Standing::Alive => String::new(),
            });
            let troubled = self.durable.unable.troubled_servers();
            return format!("shard {shard} has no server{gone}; start it again{troubled}");
        }
        if let Some(loads) = self.durable.checkpoints.loads(self.part_of_ring()) {
            return loads;
        }
        if self.durable.checkpoints.ending() {
            return self.saving.last_of();
        }
        let nobody = self.durable.live(Role::Worker).next().is_none();
        if self.durable.outcome.phase == JobPhase::Training && nobody {
            return "no worker is there; start one".to_owned();
        }
        if self.durable.outcome.phase != JobPhase::Starting {
            return match self.is_ring_broken() {
                true => self.missing_in_ring(),
                false => String::new(),
            };
        }
        let wanted = self.job.workers() as usize;
        let ready = self
            .durable
            .live(Role::Worker)
            .filter(|m| m.progress.ready)
            .count();
        let servers = self.missing_servers(false);
        match &self.durable.variables {
            None => self.missing_members(wanted),
            Some(v) if v.map.is_none() && self.job.servers() != Some(0) => {
                servers.unwrap_or_else(|| "the shard map is being cut".to_owned())
            }
            Some(v) if !v.initialized => match v.initializer {
                Some(task) => format!("{task} is sending the initial values"),
                None => "no worker has begun to send initial values".to_owned(),
            },
            Some(_) if ready < wanted => format!("{ready} of {wanted} workers are ready"),
            Some(_)
                if self.saving.place.is_some()
                    && self.durable.checkpoints.stage == Stage::First =>
            {
                self.saving.awaits("first")
            }
            Some(_) => String::new(),
        }
    }

    /// Describes which members are missing before the model is known.
    fn missing_members(&self, wanted: usize) -> String {
        let workers = self.durable.live(Role::Worker).count();
        let of_workers =
            (workers < wanted).then(|| format!("{workers} of {wanted} workers have registered"));
        let missing: Vec<String> = of_workers
            .into_iter()
            .chain(self.missing_servers(true))
            .collect();
        match missing.is_empty() {
            true => "the workers read their data and build the model".to_owned(),
            false => missing.join("; "),
        }
    }

    /// Describes the servers that the shard map waits for; `None` if it waits for none. `settled` is false while more
    /// servers may still join a job that does not set their number.
    pub(super) fn missing_servers(&self, settled: bool) -> Option<String> {
        let servers = self.durable.live(Role::Ps).count();
        match self.job.servers() {
            Some(wanted) if servers < wanted as usize => Some(format!(
                "{servers} of {wanted} parameter servers have registered{}",
                self.durable.unable.troubled_servers()
            )),
            None if servers == 0 => Some(format!(
                "no parameter server has registered; start one{}",
                self.durable.unable.troubled_servers()
            )),
            None if !settled => Some(format!(
                "{servers} parameter servers have registered; training begins once no other has joined for {} s",
                SETTLE.as_secs()
            )),
            _ => None,
        }
    }
}
