//! The blocks that a shard holds, by the shard map of an epoch.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use dashmap::DashMap;
use parking_lot::{Mutex, RwLock};
use shared_proto::blocks::{BlockId, ShardMap, Source};
use shared_proto::ids::{Clock, Task};
use shared_proto::payload::Elements;
use shared_proto::refusal::{Reason, Refusal};
use shared_proto::transport::MAX_MESSAGE_BYTES;
use shared_proto::view::Commit;
use shared_proto::wire;

use crate::block::Block;
use crate::save::Saving;

/// A shard in one epoch of the shard map.
pub(crate) struct Store {
    pub(crate) shard: u32,
    pub(crate) map: ShardMap,
    /// The same in consecutive epochs, while the values come from the same source.
    pub(crate) blocks: Arc<Blocks>,
}

/// Blocks, and what goes over all of them.
pub(crate) struct Blocks {
    pub(crate) by_id: DashMap<BlockId, Mutex<Block>>,
    /// Held while a step is committed, and shared while a pull is answered: a pull sees all of a
    /// step or nothing of it.
    pub(crate) committing: RwLock<()>,
    /// The checkpoint that is being written.
    pub(crate) saving: Mutex<Option<Arc<Saving>>>,
    /// Sync mode: the newest step that the values have. It stays with them when this server registers again.
    pub(crate) committed: Mutex<Option<Commit>>,
    /// Sync mode: the step that each worker stages, and in how many blocks it has.
    staged: Mutex<BTreeMap<Task, (Clock, usize)>>,
}

impl Blocks {
    fn new(blocks: impl Iterator<Item = (BlockId, Block)>) -> Self {
        Self {
            by_id: blocks.map(|(id, block)| (id, Mutex::new(block))).collect(),
            committing: RwLock::new(()),
            saving: Mutex::new(None),
            committed: Mutex::default(),
            staged: Mutex::default(),
        }
    }

    /// Notes that a worker has staged its gradient of a step in so many more blocks. Returns whether it is
    /// staged in all of them.
    pub(crate) fn staged(&self, task: Task, clock: Clock, blocks: usize) -> bool {
        let mut staged = self.staged.lock();
        let (of, count) = staged.entry(task).or_insert((clock, 0));
        if *of != clock {
            (*of, *count) = (clock, 0);
        }
        *count += blocks;
        *count == self.by_id.len()
    }

    /// Nothing is staged any more.
    pub(crate) fn none_staged(&self) {
        self.staged.lock().clear();
    }
}

impl Store {
    /// A shard whose values are yet to come from the initialiser.
    pub(crate) fn empty(shard: u32, map: ShardMap) -> Self {
        let blocks = Blocks::new(map.blocks_of(shard).map(|id| (id, Block::default())));
        Self::with(shard, map, Arc::new(blocks))
    }

    /// A shard with the values of a checkpoint.
    pub(crate) fn loaded(shard: u32, map: ShardMap, blocks: Vec<(BlockId, Block)>) -> Self {
        Self::with(shard, map, Arc::new(Blocks::new(blocks.into_iter())))
    }

    /// The same values under another epoch's map.
    pub(crate) fn under(&self, map: ShardMap) -> Self {
        Self::with(self.shard, map, Arc::clone(&self.blocks))
    }

    fn with(shard: u32, map: ShardMap, blocks: Arc<Blocks>) -> Self {
        Self { shard, map, blocks }
    }

    /// Where its values come from.
    pub(crate) fn source(&self) -> Option<&Source> {
        self.map.sources.get(self.shard as usize)
    }

    /// Blocks, and bytes of weights and slots.
    pub(crate) fn size(&self) -> (usize, usize) {
        let blocks = &self.blocks.by_id;
        (
            blocks.len(),
            blocks.iter().map(|block| block.lock().bytes()).sum(),
        )
    }

    /// A pull names each block once, and no more than fits into a message.
    pub(crate) fn check_pull(&self, pull: &wire::Pull) -> Result<(), Refusal> {
        let mut named = HashSet::with_capacity(pull.blocks.len());
        let mut bytes = 0;
        for known in &pull.blocks {
            let id = BlockId::read(known.block)?;
            bytes += self.map.range(id)?.len() * size_of::<f32>();
            if !named.insert(id) {
                return Err(self.twice(id));
            }
        }
        if bytes > MAX_MESSAGE_BYTES {
            return Err(Refusal::new(
                Reason::Oversized,
                format!(
                    "a pull asks for {bytes} bytes; a message has {MAX_MESSAGE_BYTES} at the most, so ask for fewer blocks at a time"
                ),
            ));
        }
        Ok(())
    }

    pub(crate) fn twice(&self, id: BlockId) -> Refusal {
        let block = self.map.describe(id);
        Refusal::new(
            Reason::Malformed,
            format!("{block} is named twice in one message; once is enough"),
        )
    }

    pub(crate) fn version(&self, id: BlockId, block: &Block) -> wire::BlockVersion {
        wire::BlockVersion {
            block: Some(id.into()),
            epoch: self.map.epoch.0,
            version: block.version().0,
        }
    }

    /// The values sent for a block: of the right size and kind, all finite.
    pub(crate) fn read_values(
        &self,
        id: BlockId,
        payload: Option<&wire::Payload>,
    ) -> Result<Elements, Refusal> {
        let expected = self.map.range(id)?.len();
        let named = |refusal: Refusal| {
            Refusal::new(
                refusal.reason,
                format!("{} {refusal}", self.map.describe(id)),
            )
        };
        let values = Elements::read(payload, expected).map_err(named)?;
        if !values.all_finite() {
            return Err(named(Refusal::new(
                Reason::NonFinite,
                "holds NaN or infinity; lower the learning rate, clip gradients, or look at the data",
            )));
        }
        Ok(values)
    }
}

/// A refusal for what has no values.
pub(crate) fn not_initialized(what: &str) -> Refusal {
    Refusal::new(
        Reason::NotInitialized,
        format!("{what} has no values yet; an initialiser is at work, ask again"),
    )
}
