//! Takes the shard that a new map assigns to this server: from memory, empty, or from a checkpoint.

use std::sync::Arc;
use std::time::Instant;

use checkpoint::LoadError;
use shared_proto::blocks::{ShardMap, Source};
use shared_proto::planted;
use shared_proto::wire;
use shared_proto::wire::report_request::Report;

use super::load::{load, versions, watermarks};
use super::reports::send;
use super::{Follower, Registered};
use crate::error::PsError;
use crate::shard::store::Store;

/// The outcome of taking the shard that a new map assigns.
pub(super) enum Taken {
    Store(Option<Arc<Store>>),
    Failed,
}

impl Follower {
    /// Takes the shard that a new map assigns to this server, if any. Keeps the values in memory if they come from the
    /// source that the map names. Otherwise loads the values from the map's checkpoint and reports the outcome, or, if
    /// the map names no checkpoint, begins without values.
    pub(super) async fn take_shard(
        &self,
        registered: &mut Registered<'_>,
        map: ShardMap,
    ) -> Result<Taken, PsError> {
        let task = registered.membership.task;
        let Some(own) = map
            .shards
            .iter()
            .position(|shard| shard.server.task() == task)
        else {
            tracing::info!(epoch = map.epoch.0, "holds no shard; stays as a spare");
            return Ok(Taken::Store(None));
        };
        let shard = own as u32;
        let source = map.shards.get(own).map(|shard| &shard.source);
        let held = registered
            .store
            .as_ref()
            .filter(|store| store.source() == source);
        if let Some(store) = held {
            return Ok(Taken::Store(Some(Arc::new(store.under(map)))));
        }
        let Some(Source {
            epoch,
            checkpoint: Some((location, number)),
            ..
        }) = source.cloned()
        else {
            tracing::info!(shard, epoch = map.epoch.0, "took a shard");
            let store = Arc::new(Store::empty(shard, map, &self.shard.job, &self.shard.rows));
            return Ok(Taken::Store(Some(store)));
        };
        let began = Instant::now();
        // Frees the old values before the new ones are loaded.
        (registered.store, *registered.held) = (None, None);
        drop(self.shard.forget());
        self.shard.answer_under(
            registered.membership.lease(),
            registered.membership.receipt_key,
        );
        let loaded = self.load(shard, map, &location, number).await;
        let mut report = wire::RestoreReport {
            shard,
            epoch: epoch.0,
            ..wire::RestoreReport::default()
        };
        match &loaded {
            Ok(store) => {
                report.blocks = versions(store);
                if !self.shard.is_sync() {
                    report.watermarks = watermarks(store);
                }
            }
            Err(error) => {
                tracing::error!(shard, checkpoint = number, "cannot load a shard: {error}");
                report.error = error.to_string();
                report.set_failure(error.failure());
            }
        }
        send(registered.membership, Report::Restore(report)).await?;
        Ok(match loaded {
            Ok(store) => {
                self.shard.counters.restores.increment(1);
                self.shard.counters.holds(store.size());
                let seconds = began.elapsed().as_secs_f64();
                tracing::info!(
                    shard,
                    checkpoint = number,
                    location,
                    seconds,
                    "loaded a shard"
                );
                Taken::Store(Some(Arc::new(store)))
            }
            Err(_) => Taken::Failed,
        })
    }

    async fn load(
        &self,
        shard: u32,
        map: ShardMap,
        location: &str,
        number: u64,
    ) -> Result<Store, LoadError> {
        let from = (self.open)(location)?;
        let number = number.saturating_sub(u64::from(planted!(OlderCheckpoint)));
        let loaded = async {
            let manifest = from.manifest(number).await?;
            let job = &self.shard.job;
            let rows = &self.shard.rows;
            let loaded = load(shard, map, &from, &manifest, job, rows, self.offload).await?;
            let location = location.to_owned();
            match loaded.block_not_finite() {
                Some(block) if self.shard.refuses_non_finite() => Err(LoadError::NotFinite {
                    number,
                    location,
                    block,
                }),
                _ => Ok(loaded),
            }
        };
        let loaded = loaded.await;
        if let Err(LoadError::Checkpoint(error)) = loaded {
            return Err(from.advise(number, error).await.into());
        }
        loaded
    }
}
