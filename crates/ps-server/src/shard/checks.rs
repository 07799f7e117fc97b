//! Step 5 of the data path: a message is checked as a whole before anything changes.

use std::collections::HashSet;
use std::sync::Arc;

use shared_proto::blocks::BlockId;
use shared_proto::ids::{Origin, Sequence, Version};
use shared_proto::refusal::{Reason, Refusal};
use shared_proto::values::Values;
use shared_proto::view::View;
use shared_proto::wire;

use super::Shard;
use super::block::Taken;
use super::gate::{Admission, Gate};
use super::store::{Store, not_initialized};

/// The most blocks that can be asked about at once: the answer must fit into a message.
const MOST_ASKED: usize = 32_768;

/// A gradient smaller than this is copied out of its message when it is staged: otherwise a few bytes
/// would keep the whole message in memory.
const OWNED_BYTES: usize = 256 << 10;

/// A gradient of a push that has passed the checks.
pub(crate) struct Checked {
    pub(crate) block: BlockId,
    pub(crate) based_on: Version,
    pub(crate) gradient: Values,
}

impl Shard {
    /// Admits a message: returns the store if the sender is in the view and uses the store's map.
    pub(crate) fn admit<'a>(
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

    /// Admits a message as [`Self::admit`] does, if the variables have their values.
    pub(crate) fn admit_initialized<'a>(
        &self,
        origin: &Origin,
        view: &View,
        store: Option<&'a Arc<Store>>,
    ) -> Result<&'a Store, Refusal> {
        let store = self.admit(origin, view, store)?;
        if view.initialized {
            Ok(store)
        } else {
            Err(not_initialized("the job"))
        }
    }

    /// Checks all gradients of a push. Returns the gradients for this shard, and the ids of blocks that other shards
    /// hold.
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
            if !store.map.takes_updates(id) {
                return Err(frozen(&store.map.describe(id)));
            }
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

fn frozen(block: &str) -> Refusal {
    Refusal::new(
        Reason::Malformed,
        format!("{block} is frozen and takes no updates; leave it out of pushes"),
    )
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

/// Checks that each block is named once, and that the answer has room for all of them.
pub(super) fn check_asked(ask: &wire::AskOutcome, store: &Store) -> Result<(), Refusal> {
    if ask.blocks.len() > MOST_ASKED {
        let what = format!(
            "{} blocks are asked about at once; {MOST_ASKED} is the most, so ask in several messages",
            ask.blocks.len()
        );
        return Err(Refusal::new(Reason::Oversized, what));
    }
    each_once(ask.blocks.iter().map(|id| BlockId::from(*id)), store)
}

/// Checks that each block is named once.
pub(super) fn each_once(
    ids: impl ExactSizeIterator<Item = BlockId>,
    store: &Store,
) -> Result<(), Refusal> {
    let mut named = HashSet::with_capacity(ids.len());
    for id in ids {
        if !named.insert(id) {
            return Err(store.twice(id));
        }
    }
    Ok(())
}

/// Copies a gradient out of its message, if the message may be much larger.
pub(super) fn own(gradient: Values) -> Values {
    match gradient.bytes() < OWNED_BYTES {
        true => gradient.copied(),
        false => gradient,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shared_proto::payload::{self, Dtype, Elements};

    #[test]
    fn a_small_gradient_does_not_hold_its_message() {
        let message = payload::to_bytes(&vec![1.0; 1 << 16]);
        let part = Elements::new(message.slice(..8), Dtype::F32);
        let owned = own(part.into());
        assert_eq!(owned.bytes(), 8);
        assert!(message.is_unique());
    }
}
