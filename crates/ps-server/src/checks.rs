//! Step 5 of the data's way: a message is checked as a whole before anything changes.

use std::collections::HashSet;
use std::sync::Arc;

use shared_proto::blocks::BlockId;
use shared_proto::ids::{Origin, Sequence, Version};
use shared_proto::payload::Elements;
use shared_proto::refusal::{Reason, Refusal};
use shared_proto::view::View;
use shared_proto::wire;

use crate::block::Taken;
use crate::gate::{Admission, Gate};
use crate::shard::Shard;
use crate::store::{Store, not_initialized};

/// A gradient of a push that has passed the checks.
pub(crate) struct Checked {
    pub(crate) block: BlockId,
    pub(crate) based_on: Version,
    pub(crate) gradient: Elements,
}

impl Shard {
    /// Returns the store, if the sender is in the view and uses the store's map.
    pub(crate) fn store<'a>(
        &self,
        origin: &Origin,
        view: &View,
        store: Option<&'a Arc<Store>>,
    ) -> Result<&'a Store, Refusal> {
        self.gate.member(origin, view)?;
        let store = store.ok_or_else(|| not_initialized("the shard map"))?;
        Gate::epoch(origin, store.map.epoch)?;
        Ok(store)
    }

    /// Returns the store as [`Self::store`] does, if the variables have their values.
    pub(crate) fn initialized<'a>(
        &self,
        origin: &Origin,
        view: &View,
        store: Option<&'a Arc<Store>>,
    ) -> Result<&'a Store, Refusal> {
        let store = self.store(origin, view, store)?;
        if view.initialized {
            Ok(store)
        } else {
            Err(not_initialized("the job"))
        }
    }

    /// Checks all gradients of a push. Returns those of this shard, and the blocks of other shards.
    pub(crate) fn check(
        &self,
        store: &Store,
        origin: &Origin,
        view: &View,
        gradients: Vec<wire::Gradient>,
    ) -> Result<(Vec<Checked>, Vec<wire::BlockId>), Refusal> {
        let mut checked = Vec::with_capacity(gradients.len());
        let mut elsewhere = Vec::new();
        let mut all_taken = true;
        if origin.sequence == Sequence(0) {
            return Err(Refusal::new(
                Reason::Malformed,
                "a push has no sequence number; they begin with 1",
            ));
        }
        let mut named = HashSet::with_capacity(gradients.len());
        for gradient in gradients {
            let id = BlockId::read(gradient.block)?;
            if !named.insert(id) {
                return Err(store.twice(id));
            }
            let values = store.read_values(id, gradient.payload.as_ref())?;
            if store.map.shard(id)? != store.shard {
                elsewhere.push(id.into());
                continue;
            }
            if let Some(block) = store.blocks.by_id.get(&id) {
                let block = block.lock();
                if !block.initialized() {
                    return Err(not_initialized(&store.map.describe(id)));
                }
                match block.has_taken(origin.task, origin.sequence) {
                    Taken::Yes => {}
                    Taken::No => all_taken = false,
                    Taken::Unknown => return Err(out_of_order(origin, &store.map.describe(id))),
                }
            }
            self.counters
                .received_bytes
                .increment(values.bytes() as u64);
            checked.push(Checked {
                block: id,
                based_on: Version(gradient.based_on_version),
                gradient: values,
            });
        }
        // A push that was taken before is acknowledged again, even if its step is over.
        if !all_taken
            && let Admission::Reject(refusal) = self.gate.push(origin.task, origin.clock, view)
        {
            return Err(refusal);
        }
        Ok((checked, elsewhere))
    }
}

/// Returns the refusal of a push that comes after a later one of its sender.
pub(crate) fn out_of_order(origin: &Origin, block: &str) -> Refusal {
    Refusal::new(
        Reason::OutOfOrder,
        format!(
            "push {} of {} comes after a later one that {block} has taken; send what was not acknowledged again in order, and give a push that was refused a new number",
            origin.sequence, origin.task
        ),
    )
}
