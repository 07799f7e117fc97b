//! Recovery from the loss of a server: the shard waits for a server, a server takes it, and values go back to a
//! checkpoint.

use std::time::Instant;

use shared_proto::blocks::{ShardServer, Source};
use shared_proto::ids::{Epoch, Role, Task};
use shared_proto::planted;
use shared_proto::refusal::brief;
use shared_proto::wire;

use super::Cluster;
use super::checkpoints::{DurableCheckpoint, SavedProgress, Stage, source};
use super::due::FollowUp;
use super::evaluations::Evaluations;
use super::observed::Recent;
use super::record::Record;
use super::ring::Cause;
use super::saving::StoreTask;

impl Cluster {
    /// Takes a shard away from the departed server `gone`, and gives it to a spare server if there is one. Fails the
    /// job if it has no checkpoints.
    pub(super) fn orphan(&mut self, now: Instant, shard: usize, gone: Task) {
        self.give_up_saving();
        self.raise_epoch(now, Cause::Shard);
        if let Some(map) = self.durable.map_mut() {
            map.shards[shard].server = ShardServer::Lost(gone);
        }
        if self.saving.place.is_none() {
            return self.fail_without_checkpoints(now, gone, shard);
        }
        if let Some(spare) = self.spare_for(shard) {
            self.assign(now, spare, shard);
        }
    }

    fn fail_without_checkpoints(&mut self, now: Instant, gone: Task, shard: usize) {
        self.fail(
            now,
            format!("{gone}, the server of shard {shard}, is gone, and its values with it: there are no checkpoints (checkpoint.enabled is false); start the job again"),
        );
    }

    /// Returns the shard whose values a returning server still has in memory; `None` if another server was assigned to
    /// the shard, or the values are not its newest.
    pub(super) fn kept_shard(
        &self,
        earlier: Option<Task>,
        holding: Option<&wire::Holding>,
    ) -> Option<usize> {
        let holding = holding?;
        let shard = self
            .durable
            .shard_of(earlier.filter(|e| e.generation.0 == holding.generation)?)?;
        let variables = self.durable.variables.as_ref().filter(|v| v.initialized)?;
        let source = &variables.map.as_ref()?.shards.get(shard)?.source;
        let same = holding.shard as usize == shard && holding.source_epoch == source.epoch.0;
        // It may not have loaded the values that it was told to load.
        let loaded = !self.durable.checkpoints.loading.contains_key(&shard);
        (same && loaded).then_some(shard)
    }

    /// Returns the address of a server that has registered.
    fn address_of(&self, server: Task) -> String {
        self.durable
            .member(server.id)
            .map_or_else(String::new, |member| member.address.clone())
    }

    /// Gives a shard back to a server that still has its values. Nothing is lost.
    pub(super) fn give_back(&mut self, now: Instant, server: Task, shard: usize) {
        self.give_up_saving();
        let address = self.address_of(server);
        self.raise_epoch(now, Cause::Shard);
        let Some(map) = self.durable.map_mut() else {
            return;
        };
        map.shards[shard].server = ShardServer::new(server, address);
        tracing::info!(%server, shard, epoch = map.epoch.0, "a server is back, with its values");
        self.due.add(FollowUp::FormRing);
    }

    /// Gives a shard to a server, which loads the newest checkpoint. In sync mode, the whole job goes back to this
    /// checkpoint. Before the first checkpoint, a worker sends the initial values again.
    pub(super) fn assign(&mut self, now: Instant, server: Task, shard: usize) {
        self.give_up_saving();
        let address = self.address_of(server);
        let sync = self.sync();
        let newest = self.durable.checkpoints.newest.clone();
        self.raise_epoch(now, Cause::Shard);
        let Some(variables) = &mut self.durable.variables else {
            return;
        };
        let Some(map) = &mut variables.map else {
            return;
        };
        let new = ShardServer::new(server, address);
        let gone = std::mem::replace(&mut map.shards[shard].server, new).task();
        let epoch = map.epoch;
        *self.observed.recoveries.entry(gone.id).or_default() += 1;
        tracing::info!(%server, shard, epoch = epoch.0, "gave a shard to a server");
        match newest.filter(|_| variables.initialized) {
            None if variables.initialized && self.saving.place.is_none() => {
                self.fail_without_checkpoints(now, server, shard);
            }
            Some(kept) if sync => self.go_back(now, &kept),
            Some(kept) => {
                map.shards[shard].source = source(epoch, &kept);
                self.durable
                    .checkpoints
                    .loading
                    .insert(shard, String::new());
                self.record_restore(now, kept.number, Some(shard));
                self.evaluate_again_at_the_end();
            }
            None => self.initialize_anew(epoch),
        }
        self.must_persist();
        self.due.add(FollowUp::FormRing);
    }

    /// Takes all shards and the training back to a checkpoint, and evicts all workers.
    pub(super) fn go_back(&mut self, now: Instant, kept: &DurableCheckpoint) {
        if let Some(map) = self.durable.map_mut() {
            let source = source(map.epoch, kept);
            map.fill_from(&source);
            let all = 0..map.shards.len();
            self.durable.checkpoints.loading = all.map(|shard| (shard, String::new())).collect();
        }
        self.durable.ring.go_back();
        if !planted!(KeepsProgress) {
            self.restore_progress(&kept.progress);
        }
        self.record_restore(now, kept.number, None);
        self.evict_workers_later("the job has gone back to a checkpoint");
    }

    /// Notes that all workers that are alive now must be evicted at the end of the call.
    fn evict_workers_later(&mut self, why: &'static str) {
        let workers = self.durable.live(Role::Worker).map(|m| m.task).collect();
        self.due.add(FollowUp::EvictWorkers(workers, why));
    }

    /// Makes a worker send the initial values again, because there is no checkpoint yet.
    fn initialize_anew(&mut self, epoch: Epoch) {
        if let Some(variables) = &mut self.durable.variables {
            (variables.initialized, variables.initializer) = (false, None);
            if let Some(map) = &mut variables.map {
                map.fill_from(&Source::initializer(epoch));
            }
        }
        self.evict_workers_later("the initial values are sent once more");
    }

    /// Sets the job's progress to that of a checkpoint.
    pub(super) fn restore_progress(&mut self, progress: &SavedProgress) {
        let budget = self
            .job
            .steps
            .map(|steps| steps.saturating_sub(progress.steps));
        let ledger = progress.ledger.clone();
        self.durable.training.ledger =
            Some(ledger.under(self.job.epochs, budget, self.in_lock_step()));
        let monitors = progress.monitors.as_ref();
        let done = &progress.evaluations;
        self.durable.evaluations = Evaluations::restored(&progress.due, done, monitors, &self.job);
        self.reconsider_stopping();
        (self.durable.training.step, self.durable.training.commit) = (None, None);
        self.durable.training.min_clock = progress.clock;
        let tally = &mut self.durable.training.tally;
        (tally.steps, tally.samples) = (progress.steps, progress.samples);
        self.observed.recent = Recent::default();
        self.forget_losses();
        self.not_last_any_more();
        self.schedule_last_evaluation();
    }

    pub(super) fn record_restore(&mut self, now: Instant, checkpoint: u64, shard: Option<usize>) {
        self.forget_losses();
        self.records.push_back(Record::Restored {
            seconds: self.seconds(now),
            checkpoint,
            shard,
            steps: self.durable.training.tally.steps,
        });
    }

    /// Takes a report that a part has loaded its values, or cannot. If the checkpoint is unusable, orders a search for
    /// an older one, or fails a job that cannot begin without it.
    pub(crate) fn shard_restored(
        &mut self,
        now: Instant,
        task: Task,
        report: &wire::RestoreReport,
    ) {
        let shard = report.shard as usize;
        let map = self.durable.map();
        let expected = match map.and_then(|map| map.shards.get(shard)) {
            Some(placed) => placed.server.task() == task && placed.source.epoch.0 == report.epoch,
            None => {
                let ring = &self.durable.ring;
                shard == self.part_of_ring() && ring.is_loaded_by(task, report.epoch)
            }
        };
        if !expected {
            return;
        }
        if report.error.is_empty() {
            let newly = self.durable.checkpoints.loading.remove(&shard).is_some();
            self.must_persist();
            if newly && let Some(from) = self.checkpoint_of(shard) {
                self.derive_losses(now, report, from);
            }
            self.records
                .push_back(Record::loaded(self.seconds(now), report));
            return;
        }
        let Some(kept) = self.durable.checkpoints.newest.clone() else {
            return;
        };
        // A late report: the shard has loaded its values since.
        let Some(known) = self.durable.checkpoints.loading.get_mut(&shard) else {
            return;
        };
        let error = brief(&report.error);
        if *known != error {
            *known = error.clone().into_owned();
            tracing::error!(shard, checkpoint = kept.number, "{error}");
        }
        let begun = self.durable.checkpoints.stage != Stage::First;
        match report.failure() {
            wire::RestoreFailure::Unavailable => return,
            // An older checkpoint would be denied as well.
            wire::RestoreFailure::Denied if begun => return,
            wire::RestoreFailure::Denied | wire::RestoreFailure::Unusable => {}
        }
        if !begun {
            let why = format!(
                "the job cannot begin from checkpoint {}: {}",
                kept.number, error
            );
            return self.fail(now, why);
        }
        self.saving
            .store_task
            .get_or_insert(StoreTask::FindBefore(Box::new(kept)));
    }

    /// Returns the number of the checkpoint from which a shard's values come; `None` if they are initial values.
    fn checkpoint_of(&self, shard: usize) -> Option<u64> {
        let map = self.durable.map()?;
        let (_, number) = map.shards.get(shard)?.source.checkpoint.as_ref()?;
        Some(*number)
    }

    /// Continues from the checkpoint before a damaged one, as [`Self::older_found`] says.
    pub(super) fn go_back_before(
        &mut self,
        now: Instant,
        damaged: &DurableCheckpoint,
        found: Result<DurableCheckpoint, String>,
    ) {
        if self.ended() {
            return;
        }
        let kept = match found {
            Ok(kept) => kept,
            Err(why) => {
                let number = damaged.number;
                return self.fail(
                    now,
                    format!("checkpoint {number} cannot be loaded, and {why}"),
                );
            }
        };
        tracing::warn!(
            damaged = damaged.number,
            instead = kept.number,
            "taking the checkpoint before"
        );
        self.durable.checkpoints.newest = Some(kept.clone());
        self.saving.base = None;
        let loading = &self.durable.checkpoints.loading;
        let all = self.sync() || loading.contains_key(&self.part_of_ring());
        self.give_up_saving();
        self.raise_epoch(now, Cause::Restore);
        let variables = self.durable.variables.as_mut();
        let Some(map) = variables.and_then(|v| v.map.as_mut()) else {
            return;
        };
        let epoch = map.epoch;
        if all {
            return self.go_back(now, &kept);
        }
        // Shards that have loaded their values keep them.
        for (shard, why) in &mut self.durable.checkpoints.loading {
            why.clear();
            if let Some(placed) = map.shards.get_mut(*shard) {
                placed.source = source(epoch, &kept);
            }
        }
        self.evaluate_again_at_the_end();
    }
}
