//! The views that a shard catches up with, and the steps that they commit.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use daemon::membership::Lease;
use shared_proto::ids::Epoch;
use shared_proto::planted;
use shared_proto::receipt::ReceiptKey;
use shared_proto::view::{Commit, View};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::Shard;
use super::block::{Limit, NotCommitted};
use super::snapshot::Snapshot;
use super::store::Store;

/// A view that this shard has caught up with: the shard has the view's map, and has applied the view's commit.
#[derive(Clone, Default)]
pub(crate) struct Followed {
    pub(crate) view: Arc<View>,
    pub(crate) store: Option<Arc<Store>>,
    /// Cancelled when the epoch ends. The sessions of the epoch then end too.
    pub(crate) epoch_over: CancellationToken,
    /// The lease under which the shard answers. After it, the shard may belong to another server.
    pub(crate) lease: Lease,
    /// The key by which receipts are made.
    pub(super) receipts: Option<ReceiptKey>,
    /// True if the process is about to stop, so that later pushes would be lost.
    pub(crate) closed: bool,
}

impl Shard {
    /// Returns whether catching up with a view takes work on the blocks.
    pub(crate) fn has_work_for(&self, view: &View) -> bool {
        view.commit.is_some() && self.followed.borrow().view.commit != view.commit
    }

    /// Begins the checkpoint that a view orders, if the order is new. From now on, commits copy the blocks that the
    /// checkpoint needs. `store` has the shard's blocks in the view's epoch.
    pub(crate) fn begin_snapshot(
        &self,
        view: &View,
        store: Option<&Store>,
    ) -> Option<Arc<Snapshot>> {
        let store = store.filter(|_| self.followed.borrow().view.checkpoint != view.checkpoint)?;
        let order = view.checkpoint;
        let order = order.filter(|order| order.epoch == store.map.epoch);
        let snapshot = order.map(|order| Arc::new(Snapshot::new(order, self.snapshot_bytes)));
        store.blocks.snapshot.lock().clone_from(&snapshot);
        snapshot
    }

    /// Catches up with a view: applies its commit, if that is new, and shows the view to the sessions. `store` has the
    /// shard's blocks in the view's epoch.
    ///
    /// # Errors
    /// If the shard lacks a committed gradient, so that its weights would not be the job's, or has lost rows.
    pub(crate) fn follow(
        &self,
        mut view: View,
        store: Option<Arc<Store>>,
    ) -> Result<(), NotCommitted> {
        let before = self.followed();
        if let Some(store) = &store {
            let same = before.store.as_ref();
            if same.is_some_and(|before| Arc::ptr_eq(&before.blocks, &store.blocks)) {
                // A coordinator that has started again may not know how far workers have come.
                view.min_clock = view.min_clock.max(before.view.min_clock);
            }
            let new = |commit: &&Commit| match planted!(CommitsAgain) {
                true => before.view.commit.as_ref() != Some(*commit),
                false => store.blocks.committed.lock().as_ref() != Some(*commit),
            };
            if let Some(commit) = view.commit.as_ref().filter(new) {
                self.commit(commit, view.learning_rate_factor, store)?;
            }
        }
        self.counters.live_workers.set(view.workers.len() as f64);
        let epoch = store.as_ref().map_or(Epoch(0), |store| store.map.epoch);
        let same_epoch = epoch == before.epoch();
        self.followed.send_replace(Followed {
            view: Arc::new(view),
            store,
            epoch_over: match same_epoch {
                true => before.epoch_over.clone(),
                false => CancellationToken::new(),
            },
            lease: before.lease,
            receipts: before.receipts,
            closed: before.closed,
        });
        if !same_epoch {
            before.epoch_over.cancel();
        }
        Ok(())
    }

    /// Sets the lease under which the shard answers, and the key of its receipts.
    pub(crate) fn answer_under(&self, lease: Lease, receipts: Option<ReceiptKey>) {
        self.followed.send_modify(|followed| {
            followed.lease = lease;
            followed.receipts = receipts;
        });
    }

    /// Stops taking messages. The values stay, so that they can be saved.
    pub(crate) fn close(&self) {
        self.followed.send_modify(|followed| followed.closed = true);
        self.followed().epoch_over.cancel();
    }

    /// Stops answering for the shard, which another server may have by now. Returns the values it has held.
    pub(crate) fn forget(&self) -> Option<Arc<Store>> {
        let before = self.followed();
        let after = Followed {
            closed: before.closed,
            ..Followed::default()
        };
        self.followed.send_replace(after);
        self.counters.staged_bytes.set(0.0);
        before.epoch_over.cancel();
        before.store
    }

    /// Applies a committed step. `lowered_to` is a factor of the learning rate.
    fn commit(&self, commit: &Commit, lowered_to: f64, store: &Store) -> Result<(), NotCommitted> {
        let snapshot = store.blocks.snapshot.lock().clone();
        let snapshot = snapshot.filter(|s| !s.is_to_have(commit) || planted!(CheckpointLacksStep));
        let _whole_steps = store.blocks.committing.write();
        let limit = Limit {
            factor: commit.clip_factor.unwrap_or(1.0),
            ..self.limit()
        };
        let mut sum = Vec::new();
        for entry in &store.blocks.by_id {
            let id = *entry.key();
            if !store.map.takes_updates(id) || (planted!(HalfStep) && id.variable % 2 == 1) {
                continue;
            }
            if let Some(snapshot) = &snapshot {
                snapshot.wait_for_room(id);
            }
            let began = Instant::now();
            let mut block = entry.lock();
            if let Some(snapshot) = &snapshot {
                snapshot.copy_before_write(id, &mut block);
            }
            // Changes of averaged variables are no gradients.
            let limit = match store.map.is_trained(id) {
                true => limit,
                false => Limit::OFF,
            };
            block.commit(commit, store.rule(id), lowered_to, limit, &mut sum)?;
            if !commit.contributors.is_empty() {
                self.counters.applied(began.elapsed(), 0, None);
            }
            if !block.is_finite() {
                store.found_non_finite(id);
            }
        }
        *store.blocks.committed.lock() = Some(commit.clone());
        store.blocks.none_staged();
        self.counters.staged_bytes.set(0.0);
        Ok(())
    }

    /// Returns this shard's part of the norm of a step: the sum of the squares of the mean gradient of its blocks.
    ///
    /// # Errors
    /// If the shard lacks one of the gradients.
    pub(crate) fn squares(&self, step: &Commit, store: &Store) -> Result<f64, NotCommitted> {
        let mut sum = Vec::new();
        let mut of_blocks = BTreeMap::new();
        for entry in &store.blocks.by_id {
            let id = *entry.key();
            if store.map.is_trained(id) {
                let squares = entry.lock().squares(step, self.limit(), &mut sum)?;
                of_blocks.insert(id, squares);
            }
        }
        // In the order of the blocks, so that the sum is the same in each run.
        Ok(of_blocks.into_values().sum())
    }

    /// Returns the limit on the elements of the mean gradient of all workers.
    fn limit(&self) -> Limit {
        Limit {
            value: self.job.clip_value.filter(|_| self.job.servers_clip()),
            ..Limit::OFF
        }
    }

    /// Returns the newest view that the shard has caught up with.
    pub(crate) fn followed(&self) -> Followed {
        self.followed.borrow().clone()
    }

    /// Returns a receiver of the views that the shard catches up with.
    pub(crate) fn subscribe(&self) -> watch::Receiver<Followed> {
        self.followed.subscribe()
    }
}

impl Followed {
    /// Returns the epoch of the map in force; 0 before there is one.
    pub(crate) fn epoch(&self) -> Epoch {
        self.store
            .as_ref()
            .map_or(Epoch(0), |store| store.map.epoch)
    }

    pub(crate) fn shard(&self) -> Option<u32> {
        self.store.as_ref().map(|store| store.shard)
    }
}
