//! Pushes and pulls: steps 5 to 7 of the data path. Each block is locked by itself. Outside sync mode, it is updated
//! inline in the task that received the gradient; in sync mode, the gradient is only staged.

use std::time::Instant;

use bytes::Bytes;
use shared_proto::blocks::BlockId;
use shared_proto::ids::{Origin, Task};
use shared_proto::job::Mode;
use shared_proto::payload::Dtype;
use shared_proto::planted;
use shared_proto::refusal::{Reason, Refusal};
use shared_proto::table::Rows;
use shared_proto::values::Values;
use shared_proto::view::View;
use shared_proto::wire;

use super::Shard;
use super::block::Taken;
use super::checks::{self, Checked, out_of_order};
use super::gate::Admission;
use super::store::{Store, not_initialized};
use super::views::Followed;

/// The answer to a pull that is not refused.
pub(crate) enum PullAnswer {
    Weights(wire::Weights),
    /// The pull must wait for these tasks, or for a newer view if there are none.
    Wait(Vec<Task>),
}

impl Shard {
    /// Takes a push (steps 5 to 7): checks all of it, then updates or stages block by block.
    pub(crate) fn push(&self, push: wire::Push) -> Result<wire::Acknowledged, Refusal> {
        let origin = Origin::read(push.origin.as_ref(), "Push")?;
        let followed = self.followed();
        let (view, store) = (&followed.view, followed.store.as_ref());
        let store = self.admit_initialized(&origin, view, store)?;
        let (gradients, elsewhere) = self.check(store, &origin, view, push.gradients)?;

        let mut taken = Vec::with_capacity(gradients.len());
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
                let gradient = checks::own(gradient);
                let staging = block.stage(&origin, view, gradient);
                // Under the block's lock, so that a copy of the message never finds a block taken that does not count yet.
                if staging.is_first {
                    store.blocks.note_staged(origin.task, origin.clock);
                }
                let more = bytes - staging.replaced_bytes as f64;
                self.counters.staged_bytes.increment(more);
            } else if !planted!(AcknowledgesUnapplied) || !origin.sequence.0.is_multiple_of(7) {
                let began = Instant::now();
                let applied = block.apply(&origin, view, &gradient, based_on, store.rule(id));
                let applied = applied.map_err(|lost| self.lose(&store.map.describe(id), lost))?;
                self.counters
                    .applied(began.elapsed(), applied.staleness, applied.step);
                if !block.is_finite() {
                    store.found_non_finite(id);
                }
            }
            let mut version = store.version(id, &block);
            if let Some(last) = block.watermark_of(origin.task) {
                version.version = last.version.0;
            }
            taken.push(version);
        }
        self.counters.pushes.increment(1);
        let blocks = &store.blocks;
        let all_staged = self.is_sync() && blocks.all_staged(origin.task, origin.clock);
        Ok(wire::Acknowledged {
            sequence: origin.sequence.0,
            level: self.level().into(),
            blocks: taken,
            elsewhere,
            epoch: store.map.epoch.0,
            receipt: self.receipt(&followed, store, &origin, all_staged),
        })
    }

    /// Returns a worker's receipt once all blocks hold its gradient; empty before that, and outside sync mode.
    fn receipt(
        &self,
        followed: &Followed,
        store: &Store,
        origin: &Origin,
        all_staged: bool,
    ) -> Bytes {
        if !all_staged {
            return Bytes::new();
        }
        let receipt = followed.receipts.as_ref();
        let receipt = receipt.map(|key| key.receipt(store.shard, origin.task, origin.clock));
        receipt.map_or_else(Bytes::new, |receipt| Bytes::copy_from_slice(&receipt))
    }

    /// Step 2 of the data path: answers a pull with the blocks of which the worker does not have the newest version, or
    /// returns the workers that the pull must wait for.
    pub(crate) fn pull(
        &self,
        pull: &wire::Pull,
        origin: &Origin,
        followed: &Followed,
    ) -> Result<PullAnswer, Refusal> {
        let view = &followed.view;
        let store = self.admit_initialized(origin, view, followed.store.as_ref())?;
        if view.number.0 < pull.view {
            return Ok(PullAnswer::Wait(Vec::new()));
        }
        match self.gate.pull(origin.task, origin.clock, view) {
            Admission::Wait(on) if !planted!(NoGate) => Ok(PullAnswer::Wait(on)),
            Admission::Reject(refusal) if !planted!(NoGate) => Err(refusal),
            _ => Ok(PullAnswer::Weights(
                self.weights(pull, origin, view, store)?,
            )),
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
        let wants = store.read_pull(pull)?;
        let dtype = Dtype::try_from(pull.dtype).map_err(|_| {
            Refusal::new(
                Reason::WrongDtype,
                format!("weights are asked for as dtype {}; there are DTYPE_F32, DTYPE_BF16 and DTYPE_F16", pull.dtype),
            )
        })?;
        let _whole_steps = store.blocks.committing.read();
        for ((id, want), wanted) in wants.into_iter().zip(&pull.blocks) {
            if store.map.shard(id)? != store.shard {
                weights.elsewhere.push(id.into());
                continue;
            }
            let Some(block) = store.blocks.by_id.get(&id) else {
                continue;
            };
            let mut block = block.lock();
            let version = store.version(id, &block);
            if !block.initialized() {
                return Err(not_initialized(&store.map.describe(id)));
            }
            let rule = store.rule(id);
            // The version that the asker holds is one of values like those that it asks for. Averages have none.
            let table = store.map.table(id)?;
            let is_average = want.average && block.has_averages(rule);
            let held = (wanted.epoch, wanted.version);
            if table.is_none() && !is_average && held == (version.epoch, version.version) {
                self.counters.unchanged.increment(1);
                weights.unchanged.push(id.into());
                continue;
            }
            let ahead = want.look_ahead && !is_average;
            let ahead = ahead.then(|| block.look_ahead(view, rule)).flatten();
            let values = ahead.map_or_else(|| block.values(&want, rule), Ok);
            let values = values.map_err(|lost| self.lose(&store.map.describe(id), lost))?;
            drop(block);
            let values = values.to(dtype);
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
                payload: Some(match table {
                    Some(spec) => Rows::payload(&[], values, spec.dimension),
                    None => values.into(),
                }),
            });
        }
        Ok(weights)
    }

    /// Returns how many pushes of a worker each of the given blocks has taken, and the number of the last one.
    pub(crate) fn outcome(&self, ask: &wire::AskOutcome) -> Result<wire::Outcome, Refusal> {
        let origin = Origin::read(ask.origin.as_ref(), "AskOutcome")?;
        let Followed { view, store, .. } = self.followed();
        let store = self.admit_initialized(&origin, &view, store.as_ref())?;
        checks::check_asked(ask, store)?;
        let outcome = |id: &wire::BlockId| {
            let id = BlockId::from(*id);
            let Some(block) = store.blocks.by_id.get(&id) else {
                store.map.shard(id)?;
                return Err(Refusal::new(
                    Reason::UnknownBlock,
                    format!("{} is not on shard {}", store.map.describe(id), store.shard),
                ));
            };
            let block = block.lock();
            let last = block.watermark_of(origin.task);
            Ok(wire::BlockOutcome {
                version: Some(store.version(id, &block)),
                sequence: last.map_or(0, |last| last.sequence.0),
                clock: last.map_or(0, |last| last.clock.0),
                taken: last.map_or(0, |last| last.taken) + u64::from(planted!(OutcomeOverstated)),
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
        let store = self.admit(&origin, &view, store.as_ref())?;
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
            let Values::Dense(values) = store.read_values(id, part.payload.as_ref())? else {
                return Err(initial_rows_refused(&store.map.describe(id)));
            };
            checked.push((id, values));
        }
        checks::each_once(checked.iter().map(|(id, _)| *id), store)?;
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
                    block.initialize(&values, store.rule(id));
                    acknowledged.blocks.push(store.version(id, &block));
                }
                None => acknowledged.elsewhere.push(id.into()),
            }
        }
        self.counters.holds(store.size());
        Ok(acknowledged)
    }

    fn level(&self) -> wire::AcknowledgementLevel {
        match self.gate.strategy.mode {
            Mode::Sync => wire::AcknowledgementLevel::Staged,
            Mode::Bounded | Mode::Async => wire::AcknowledgementLevel::Applied,
        }
    }
}

/// Returns the refusal of initial values for a bucket of a table.
fn initial_rows_refused(bucket: &str) -> Refusal {
    Refusal::new(
        Reason::Malformed,
        format!(
            "{bucket} has no initial values of its own: rows begin with those of the table's settings; leave it out"
        ),
    )
}
