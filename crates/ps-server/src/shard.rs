//! Pushes and pulls: steps 5 to 7 of the data's way. Each block is locked by itself and updated inline
//! in the task that received the gradient.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use daemon::membership::Lease;
use shared_proto::blocks::BlockId;
use shared_proto::ids::{Epoch, Origin, Task, Version};
use shared_proto::job::{Job, Mode, NonFinite, Schedule};
use shared_proto::payload::{Dtype, Elements};
use shared_proto::planted;
use shared_proto::receipt::ReceiptKey;
use shared_proto::refusal::{Reason, Refusal};
use shared_proto::view::{Commit, View};
use shared_proto::wire;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::block::{NotStaged, Taken};
use crate::checks::{Checked, out_of_order};
use crate::counters::Counters;
use crate::gate::{Admission, Gate};
use crate::limits;
use crate::save::Saving;
use crate::store::{Store, not_initialized};
use optimizer::schedule::factor;
use optimizer::{Rule, rule};

/// A view that this shard has caught up with: it has the map, and has applied the commit.
#[derive(Clone, Default)]
pub(crate) struct Followed {
    pub(crate) view: Arc<View>,
    pub(crate) store: Option<Arc<Store>>,
    /// Cancelled when the epoch ends. Its sessions end with it.
    pub(crate) epoch_over: CancellationToken,
    /// The lease under which the shard answers. After it, the shard may belong to another server.
    pub(crate) lease: Lease,
    /// The key by which receipts are made.
    receipts: Option<ReceiptKey>,
    /// True if the process is about to stop, so that later pushes would be lost.
    pub(crate) closed: bool,
}

/// What becomes of a pull that was not refused.
pub(crate) enum Pulled {
    Weights(wire::Weights),
    /// It must wait for these tasks; for a newer view if there are none.
    Wait(Vec<Task>),
}

/// A shard of the variables.
pub(crate) struct Shard {
    pub(crate) gate: Gate,
    pub(crate) counters: Counters,
    rule: Box<dyn Rule>,
    base_rate: f32,
    schedule: Schedule,
    /// The most bytes of a checkpoint's copies.
    snapshot_bytes: usize,
    /// The job's setting for NaN and infinity, which decides whether checkpoints may have such values.
    non_finite: NonFinite,
    followed: watch::Sender<Followed>,
}

impl Shard {
    pub(crate) fn new(job: &Job) -> Self {
        Self {
            gate: Gate {
                job: job.name.clone(),
                strategy: job.strategy.clone(),
            },
            counters: Counters::new(),
            rule: rule(&job.optimizer),
            base_rate: job.optimizer.learning_rate(),
            schedule: job.schedule.clone(),
            non_finite: job.non_finite,
            snapshot_bytes: (job.checkpoint.snapshot_mebibytes as usize).saturating_mul(1 << 20),
            followed: watch::channel(Followed::default()).0,
        }
    }

    /// Returns the rule by which gradients change weights.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn rule(&self) -> &dyn Rule {
        &*self.rule
    }

    /// Returns whether the job is in sync mode.
    pub(crate) fn is_sync(&self) -> bool {
        self.gate.strategy.mode == Mode::Sync
    }

    /// Returns whether weights that are NaN or infinite end the job.
    pub(crate) fn refuses_non_finite(&self) -> bool {
        self.non_finite == NonFinite::Fail
    }

    /// Returns the number of values that the optimizer keeps beside each weight.
    pub(crate) fn slots(&self) -> u32 {
        self.rule.slots().count as u32
    }

    /// Takes a push (steps 5 to 7): checks all of it, then updates or stages block by block.
    pub(crate) fn push(&self, push: wire::Push) -> Result<wire::Acknowledged, Refusal> {
        let origin = Origin::read(push.origin.as_ref(), "Push")?;
        let followed = self.followed();
        let (view, store) = (&followed.view, followed.store.as_ref());
        let store = self.initialized(&origin, view, store)?;
        let (gradients, elsewhere) = self.check(store, &origin, view, push.gradients)?;

        let mut taken = Vec::with_capacity(gradients.len());
        let mut newly_staged = 0;
        for Checked {
            block: id,
            based_on,
            gradient,
        } in gradients
        {
            let Some(block) = store.blocks.by_id.get(&id) else {
                continue;
            };
            let mut block = block.lock();
            let taken_before = block.has_taken(origin.task, origin.sequence);
            if taken_before == Taken::Unknown {
                // A later session of the worker has overtaken this one.
                return Err(out_of_order(&origin, &store.map.describe(id)));
            } else if taken_before == Taken::Yes && !planted!(NoDedup) {
                self.counters.duplicates.increment(1);
            } else if self.is_sync() {
                let bytes = gradient.bytes() as f64;
                let gradient = limits::own(gradient);
                let staging = block.stage(&origin, view, gradient);
                newly_staged += usize::from(staging.is_first);
                let more = bytes - staging.replaced_bytes as f64;
                self.counters.staged_bytes.increment(more);
            } else if !planted!(AcknowledgesUnapplied) || !origin.sequence.0.is_multiple_of(7) {
                let began = Instant::now();
                let rate = |version| self.learning_rate(store, version);
                let applied = block.apply(&origin, view, &gradient, based_on, &*self.rule, rate);
                self.counters.applied(began.elapsed(), applied.staleness);
                if !block.is_finite() {
                    store.found_non_finite(id);
                }
            }
            let mut version = store.version(id, &block);
            if let Some(mark) = block.mark_of(origin.task) {
                version.version = mark.version.0;
            }
            taken.push(version);
        }
        self.counters.pushes.increment(1);
        Ok(wire::Acknowledged {
            sequence: origin.sequence.0,
            level: self.level().into(),
            blocks: taken,
            elsewhere,
            epoch: store.map.epoch.0,
            receipt: self.receipt(&followed, store, &origin, newly_staged),
        })
    }

    /// Returns the receipt of a worker once its gradient is staged in all blocks; empty before that, and outside
    /// sync mode.
    fn receipt(
        &self,
        followed: &Followed,
        store: &Store,
        origin: &Origin,
        newly_staged: usize,
    ) -> Bytes {
        if !self.is_sync() || !store.blocks.staged(origin.task, origin.clock, newly_staged) {
            return Bytes::new();
        }
        let receipt = followed.receipts.as_ref();
        let receipt = receipt.map(|key| key.receipt(store.shard, origin.task, origin.clock));
        receipt.map_or_else(Bytes::new, |receipt| Bytes::copy_from_slice(&receipt))
    }

    /// Step 2: answers a pull with what the asker does not have, or returns the workers that it must wait for.
    pub(crate) fn pull(
        &self,
        pull: &wire::Pull,
        origin: &Origin,
        followed: &Followed,
    ) -> Result<Pulled, Refusal> {
        let view = &followed.view;
        let store = self.initialized(origin, view, followed.store.as_ref())?;
        if view.number.0 < pull.view {
            return Ok(Pulled::Wait(Vec::new()));
        }
        match self.gate.pull(origin.task, origin.clock, view) {
            Admission::Wait(on) if !planted!(NoGate) => Ok(Pulled::Wait(on)),
            Admission::Reject(refusal) if !planted!(NoGate) => Err(refusal),
            _ => Ok(Pulled::Weights(self.weights(pull, origin, view, store)?)),
        }
    }

    /// Collects the weights for a pull that may be answered.
    fn weights(
        &self,
        pull: &wire::Pull,
        origin: &Origin,
        view: &View,
        store: &Store,
    ) -> Result<wire::Weights, Refusal> {
        let mut weights = wire::Weights {
            request: origin.sequence.0,
            epoch: store.map.epoch.0,
            min_clock: view.min_clock.0,
            ..wire::Weights::default()
        };
        store.check_pull(pull)?;
        let dtype = Dtype::try_from(pull.dtype).map_err(|_| {
            Refusal::new(
                Reason::WrongDtype,
                format!("weights are asked for as dtype {}; there are DTYPE_F32, DTYPE_BF16 and DTYPE_F16", pull.dtype),
            )
        })?;
        let _whole_steps = store.blocks.committing.read();
        for known in &pull.blocks {
            let id = BlockId::read(known.block)?;
            if store.map.shard(id)? != store.shard {
                weights.elsewhere.push(id.into());
                continue;
            }
            let Some(block) = store.blocks.by_id.get(&id) else {
                continue;
            };
            let block = block.lock();
            let version = store.version(id, &block);
            if !block.initialized() {
                return Err(not_initialized(&store.map.describe(id)));
            }
            if version == *known {
                self.counters.unchanged.increment(1);
                weights.unchanged.push(id.into());
                continue;
            }
            let values = block.weights();
            drop(block);
            let values = Elements::of(values, dtype);
            if dtype.size() < Dtype::F32.size() && !values.all_finite() {
                return Err(Refusal::new(
                    Reason::NonFinite,
                    format!(
                        "{} holds weights too large for {}; set strategy.wire to f32 (f16 ends at 65504, bf16 where f32 does)",
                        store.map.describe(id),
                        dtype.as_str_name()
                    ),
                ));
            }
            self.counters.sent_bytes.increment(values.bytes() as u64);
            weights.blocks.push(wire::BlockWeights {
                version: Some(version),
                payload: Some(values.into()),
            });
        }
        Ok(weights)
    }

    /// Returns, for some blocks, the number of a worker's pushes that each has taken.
    pub(crate) fn outcome(&self, ask: &wire::AskOutcome) -> Result<wire::Outcome, Refusal> {
        let origin = Origin::read(ask.origin.as_ref(), "AskOutcome")?;
        let Followed { view, store, .. } = self.followed();
        let store = self.initialized(&origin, &view, store.as_ref())?;
        limits::check_asked(ask, store)?;
        let outcome = |id: &wire::BlockId| {
            let id = BlockId::from(*id);
            let Some(block) = store.blocks.by_id.get(&id) else {
                store.map.range(id)?;
                return Err(Refusal::new(
                    Reason::UnknownBlock,
                    format!("{} is not on shard {}", store.map.describe(id), store.shard),
                ));
            };
            let block = block.lock();
            let mark = block.mark_of(origin.task);
            Ok(wire::BlockOutcome {
                version: Some(store.version(id, &block)),
                sequence: mark.map_or(0, |mark| mark.sequence.0),
                clock: mark.map_or(0, |mark| mark.clock.0),
                taken: mark.map_or(0, |mark| mark.taken) + u64::from(planted!(OutcomeOverstated)),
            })
        };
        Ok(wire::Outcome {
            request: origin.sequence.0,
            blocks: ask.blocks.iter().map(outcome).collect::<Result<_, _>>()?,
        })
    }

    /// Takes initial values from the initialiser.
    pub(crate) fn initialize(
        &self,
        initialize: wire::Initialize,
    ) -> Result<wire::Acknowledged, Refusal> {
        let origin = Origin::read(initialize.origin.as_ref(), "Initialize")?;
        let Followed { view, store, .. } = self.followed();
        let store = self.store(&origin, &view, store.as_ref())?;
        if view.initializer != Some(origin.task) {
            return Err(Refusal::new(
                Reason::NotLeased,
                format!(
                    "{} is not the initialiser in view {}; register the variables again",
                    origin.task, view.number
                ),
            ));
        }
        let mut checked = Vec::with_capacity(initialize.blocks.len());
        for part in &initialize.blocks {
            let id = BlockId::read(part.block)?;
            checked.push((id, store.read_values(id, part.payload.as_ref())?));
        }
        limits::each_once(checked.iter().map(|(id, _)| *id), store)?;
        let mut acknowledged = wire::Acknowledged {
            sequence: origin.sequence.0,
            level: wire::AcknowledgementLevel::Applied.into(),
            epoch: store.map.epoch.0,
            ..wire::Acknowledged::default()
        };
        for (id, values) in checked {
            match store.blocks.by_id.get(&id) {
                Some(block) => {
                    let mut block = block.lock();
                    block.initialize(&values, &*self.rule);
                    acknowledged.blocks.push(store.version(id, &block));
                }
                None => acknowledged.elsewhere.push(id.into()),
            }
        }
        self.counters.holds(store.size());
        Ok(acknowledged)
    }

    /// Returns whether catching up with a view takes work on the blocks.
    pub(crate) fn has_work_for(&self, view: &View) -> bool {
        view.commit.is_some() && self.followed.borrow().view.commit != view.commit
    }

    /// Begins the checkpoint that a view orders, if it is new: from now on commits copy the blocks that it needs.
    /// `store` is that of the view's epoch.
    pub(crate) fn begin_saving(&self, view: &View, store: Option<&Store>) -> Option<Arc<Saving>> {
        let store = store.filter(|_| self.followed.borrow().view.checkpoint != view.checkpoint)?;
        let order = view.checkpoint;
        let order = order.filter(|order| order.epoch == store.map.epoch);
        let saving =
            order.map(|order| Arc::new(Saving::new(order, self.snapshot_bytes, self.non_finite)));
        store.blocks.saving.lock().clone_from(&saving);
        saving
    }

    /// Catches up with a view: applies its commit, if that is new, and lets the sessions see it. `store` is
    /// that of the view's epoch.
    ///
    /// # Errors
    /// If the shard lacks a committed gradient, so that its weights would not be the job's.
    pub(crate) fn follow(
        &self,
        mut view: View,
        store: Option<Arc<Store>>,
    ) -> Result<(), NotStaged> {
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
                self.commit(commit, store)?;
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

    /// Applies a step.
    fn commit(&self, commit: &Commit, store: &Store) -> Result<(), NotStaged> {
        let saving = store.blocks.saving.lock().clone();
        let saving = saving.filter(|s| !s.is_to_have(commit) || planted!(CheckpointLacksStep));
        let _whole_steps = store.blocks.committing.write();
        let mut mean = Vec::new();
        for entry in &store.blocks.by_id {
            if planted!(HalfStep) && entry.key().variable % 2 == 1 {
                continue;
            }
            if let Some(saving) = &saving {
                saving.wait_for_room(*entry.key());
            }
            let began = Instant::now();
            let rate = |version| self.learning_rate(store, version);
            let mut block = entry.lock();
            if let Some(saving) = &saving {
                saving.copy_before_write(*entry.key(), &block);
            }
            block.commit(commit, &*self.rule, rate, &mut mean)?;
            self.counters.applied(began.elapsed(), 0);
            if !block.is_finite() {
                store.found_non_finite(*entry.key());
            }
        }
        *store.blocks.committed.lock() = Some(commit.clone());
        store.blocks.none_staged();
        self.counters.staged_bytes.set(0.0);
        Ok(())
    }

    /// Returns the newest view that the shard has caught up with.
    pub(crate) fn followed(&self) -> Followed {
        self.followed.borrow().clone()
    }

    /// Returns a receiver of the views that the shard catches up with.
    pub(crate) fn subscribe(&self) -> watch::Receiver<Followed> {
        self.followed.subscribe()
    }

    fn level(&self) -> wire::AcknowledgementLevel {
        match self.gate.strategy.mode {
            Mode::Sync => wire::AcknowledgementLevel::Staged,
            Mode::Bounded | Mode::Async => wire::AcknowledgementLevel::Applied,
        }
    }

    fn learning_rate(&self, store: &Store, version: Version) -> f32 {
        self.base_rate * factor(&self.schedule, version.0, store.map.total_updates)
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
