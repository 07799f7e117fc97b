//! The state of a shard as a checkpoint needs it, while training continues. Blocks are written one by one. An update of
//! a block that is being written leaves the old values to the writer and continues with a copy (see `Block`).
//!
//! In sync mode a checkpoint has the state after one step, the same on all shards. A commit that comes before the
//! writer has finished copies the blocks that are not written yet. If the copies reach a limit, the commit waits for
//! the store. Copies are written first, so that each file makes room for the waiting commit.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use shared_proto::blocks::BlockId;
use shared_proto::view::{CheckpointOrder, Commit, View};

use super::block::{Block, SharedBlock};

/// The longest time that a commit waits for room before the checkpoint is given up.
pub(crate) const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// The blocks of a checkpoint that is being written.
pub(crate) struct Snapshot {
    pub(crate) order: CheckpointOrder,
    /// The most bytes of copies that commits may make.
    most_copied: usize,
    state: Mutex<State>,
    room: Condvar,
}

#[derive(Default)]
struct State {
    reached: HashSet<BlockId>,
    copies: BTreeMap<BlockId, SharedBlock>,
    copied_bytes: usize,
    /// True once no copies are needed any more.
    over: bool,
}

impl Snapshot {
    pub(crate) fn new(order: CheckpointOrder, most_copied: usize) -> Self {
        Self {
            order,
            most_copied,
            state: Mutex::default(),
            room: Condvar::new(),
        }
    }

    /// Returns whether this step is part of the checkpoint.
    pub(crate) fn is_to_have(&self, commit: &Commit) -> bool {
        self.order.clock > commit.step
    }

    /// Returns whether the step that this view commits is part of the checkpoint.
    pub(crate) fn has(&self, view: &View) -> bool {
        let commit = view.commit.as_ref();
        commit.is_some_and(|commit| self.is_to_have(commit))
    }

    /// Waits until there is room for a copy of a block, if the block needs one. Ends the checkpoint if that takes
    /// longer than [`LONGEST_WAIT`]. The caller must not hold the lock of a block.
    pub(crate) fn wait_for_room(&self, id: BlockId) {
        let full = |state: &mut State| {
            state.copied_bytes >= self.most_copied && !state.over && !state.reached.contains(&id)
        };
        let mut state = self.state.lock();
        if full(&mut state) {
            tracing::info!(
                number = self.order.number,
                "a step waits for the checkpoint that is being written"
            );
            let waited = self.room.wait_while_for(&mut state, full, LONGEST_WAIT);
            if waited.timed_out() {
                // Training matters more than this checkpoint.
                state.over = true;
                state.copies.clear();
            }
        }
    }

    /// Copies a block before it changes, unless it is written or copied already.
    pub(crate) fn copy_before_write(&self, id: BlockId, block: &mut Block) {
        let mut state = self.state.lock();
        if !state.over && state.reached.insert(id) {
            let shared = block.share(id, self.order.number);
            state.copied_bytes += shared.bytes();
            state.copies.insert(id, shared);
        }
    }

    /// Returns the next block to write: a copied one if there is any, otherwise the next of the remaining ones.
    pub(crate) fn next(&self, remaining: &mut impl Iterator<Item = BlockId>) -> Option<BlockId> {
        let copied = self.state.lock().copies.keys().next().copied();
        copied.or_else(|| remaining.next())
    }

    /// Returns the block as it is in the checkpoint.
    pub(crate) fn reach(&self, id: BlockId, block: &mut Block) -> SharedBlock {
        let mut state = self.state.lock();
        state.reached.insert(id);
        match state.copies.remove(&id) {
            Some(shared) => {
                state.copied_bytes -= shared.bytes();
                self.room.notify_all();
                shared
            }
            None => block.share(id, self.order.number),
        }
    }

    /// Ends the checkpoint, written or not, so that commits no longer wait for it.
    pub(crate) fn end(&self) {
        let mut state = self.state.lock();
        state.over = true;
        state.copies.clear();
        self.room.notify_all();
    }

    /// Returns whether the checkpoint has ended, written or not.
    pub(crate) fn is_over(&self) -> bool {
        self.state.lock().over
    }
}

/// Ends a checkpoint when this is dropped.
pub(crate) struct EndOnDrop(pub(crate) Arc<Snapshot>);

impl Drop for EndOnDrop {
    fn drop(&mut self) {
        self.0.end();
    }
}

#[cfg(test)]
impl Snapshot {
    /// Returns the bytes of the copies that wait to be written.
    pub(crate) fn copied_bytes(&self) -> usize {
        self.state.lock().copied_bytes
    }

    /// Returns the number of copies that wait to be written.
    pub(crate) fn copies(&self) -> usize {
        self.state.lock().copies.len()
    }
}
