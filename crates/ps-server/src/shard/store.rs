//! The blocks that a shard holds according to the shard map of an epoch.

use std::cmp::Ordering;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, OnceLock};

use dashmap::DashMap;
use optimizer::VariableRule;
use parking_lot::{Mutex, RwLock};
use shared_proto::blocks::{BlockId, PlacedTable, PlacedVariable, ShardMap, Source};
use shared_proto::ids::{Clock, Task};
use shared_proto::job::Job;
use shared_proto::planted;
use shared_proto::protocol::MAX_MESSAGE_BYTES;
use shared_proto::refusal::{Reason, Refusal};
use shared_proto::table::read_ids;
use shared_proto::values::Values;
use shared_proto::view::Commit;
use shared_proto::wire;
use table::disk::RowFile;
use table::rows::Rows;

use super::block::{Block, BucketStorage, Wanted};
use super::snapshot::Snapshot;
use crate::row_settings::RowStorage;

/// A shard in one epoch of the shard map.
pub(crate) struct Store {
    pub(crate) shard: u32,
    pub(crate) map: ShardMap,
    rules: Rules,
    /// The blocks. Consecutive epochs share them while the values come from the same source.
    pub(crate) blocks: Arc<Blocks>,
}

/// The rules of all variables and tables, by number.
#[derive(Clone)]
pub(crate) struct Rules(Arc<[VariableRule]>);

impl Rules {
    /// Returns the rules of a map's variables and tables in a job.
    pub(crate) fn new(map: &ShardMap, job: &Job) -> Self {
        let rule = |v: &PlacedVariable| VariableRule::new(job, &v.spec, map.total_updates);
        let of_table =
            |table: &PlacedTable| VariableRule::of_table(job, &table.spec, map.total_updates);
        let variables = map.variables.iter().map(rule);
        Self(variables.chain(map.tables.iter().map(of_table)).collect())
    }

    /// Returns the rule by which a block's variable changes. The block is one of the map's.
    pub(crate) fn of_block(&self, id: BlockId) -> &VariableRule {
        &self.0[id.variable as usize]
    }
}

/// The options for the rows of each table.
pub(crate) struct TableStorage {
    /// The files for rows that do not fit into memory, by the number of the table in the shard map.
    files: HashMap<u32, Arc<RowFile>>,
    hottest_ids: usize,
}

impl TableStorage {
    /// Makes a file for each table of a map, if there is a limit on memory.
    pub(crate) fn new(map: &ShardMap, rows: &RowStorage) -> Self {
        let tables = map.tables.iter().enumerate();
        let file = |(table, placed): (usize, &PlacedTable)| {
            let disk = rows.disk.as_ref()?;
            Some((map.number_of_table(table), Rows::file(&placed.spec, disk)))
        };
        Self {
            files: tables.filter_map(file).collect(),
            hottest_ids: rows.hottest_ids,
        }
    }

    /// Returns the options for the rows of a bucket.
    pub(crate) fn of_block(&self, id: BlockId) -> BucketStorage<'_> {
        BucketStorage {
            file: self.files.get(&id.variable),
            hottest_ids: self.hottest_ids,
        }
    }
}

/// Blocks, and the state that concerns all of them.
pub(crate) struct Blocks {
    pub(crate) by_id: DashMap<BlockId, Mutex<Block>>,
    /// The number of blocks that take updates.
    updated: usize,
    /// Locked for writing while a step is committed, and for reading while a pull is answered: a pull sees all of
    /// a step or nothing of it.
    pub(crate) committing: RwLock<()>,
    /// The checkpoint that is being written.
    pub(crate) snapshot: Mutex<Option<Arc<Snapshot>>>,
    /// Sync mode: the newest commit that the values include. It stays with the values when this server registers again.
    pub(crate) committed: Mutex<Option<Commit>>,
    /// The first block of which an update has made a value NaN or infinite.
    pub(crate) non_finite: OnceLock<BlockId>,
    /// Sync mode: the step that each worker stages, and the number of blocks that hold its gradient.
    staged: Mutex<BTreeMap<Task, (Clock, usize)>>,
}

impl Blocks {
    /// `updated` is the number of blocks that take updates.
    fn new(blocks: impl Iterator<Item = (BlockId, Block)>, updated: usize) -> Self {
        Self {
            by_id: blocks.map(|(id, block)| (id, Mutex::new(block))).collect(),
            updated,
            committing: RwLock::new(()),
            snapshot: Mutex::new(None),
            committed: Mutex::default(),
            non_finite: OnceLock::new(),
            staged: Mutex::default(),
        }
    }

    /// Describes everything that a message may change, for comparison.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn describe(&self) -> String {
        let blocks = self.by_id.iter();
        let blocks: BTreeMap<_, _> = blocks
            .map(|block| (*block.key(), format!("{:?}", block.lock())))
            .collect();
        let (committed, staged) = (self.committed.lock(), self.staged.lock());
        format!("{blocks:?} {committed:?} {staged:?} {:?}", self.non_finite)
    }

    /// Notes that one more block has a worker's gradient of a step.
    pub(crate) fn note_staged(&self, task: Task, clock: Clock) {
        let mut staged = self.staged.lock();
        let (of, count) = staged.entry(task).or_insert((clock, 0));
        match clock.cmp(of) {
            Ordering::Equal => *count += 1,
            Ordering::Greater => (*of, *count) = (clock, 1),
            // A push of an earlier step that is sent again leaves the count of the newest one alone.
            Ordering::Less => {}
        }
    }

    /// Returns whether all blocks that take updates have a worker's gradient of a step.
    pub(crate) fn all_staged(&self, task: Task, clock: Clock) -> bool {
        match self.staged.lock().get(&task) {
            Some((of, count)) => *of == clock && *count == self.updated,
            None => self.updated == 0,
        }
    }

    /// Clears the counts of staged gradients after a commit.
    pub(crate) fn none_staged(&self) {
        self.staged.lock().clear();
    }
}

impl Store {
    /// Returns a shard without values, which the initialiser sends later.
    pub(crate) fn empty(shard: u32, map: ShardMap, job: &Job, rows: &RowStorage) -> Self {
        let rules = Rules::new(&map, job);
        let tables = TableStorage::new(&map, rows);
        let block = |id: BlockId| match map.table(id) {
            Ok(Some(spec)) => (id, Block::of_table(spec, id.index, tables.of_block(id))),
            _ => (id, Block::empty()),
        };
        let blocks = map.blocks_of(shard).map(block).collect();
        Self::of_blocks(shard, map, blocks, rules)
    }

    /// Returns a shard with these blocks, under the rules of the map's variables.
    pub(crate) fn of_blocks(
        shard: u32,
        map: ShardMap,
        blocks: Vec<(BlockId, Block)>,
        rules: Rules,
    ) -> Self {
        let updated = map.blocks_of(shard).filter(|id| map.takes_updates(*id));
        Self {
            shard,
            rules,
            blocks: Arc::new(Blocks::new(blocks.into_iter(), updated.count())),
            map,
        }
    }

    /// Returns a shard that shares this one's values, under another epoch's map.
    pub(crate) fn under(&self, map: ShardMap) -> Self {
        Self {
            shard: self.shard,
            rules: self.rules.clone(),
            blocks: Arc::clone(&self.blocks),
            map,
        }
    }

    /// Returns the rule by which a block's variable changes. The block is one of the map's.
    pub(crate) fn rule(&self, id: BlockId) -> &VariableRule {
        self.rules.of_block(id)
    }

    /// Records that a block has values that are NaN or infinite, and logs the first one.
    pub(crate) fn found_non_finite(&self, id: BlockId) {
        if self.blocks.non_finite.set(id).is_ok() {
            tracing::error!(
                "an update has made values of {} NaN or infinite; lower the learning rate, or set clip_norm",
                self.map.describe(id)
            );
        }
    }

    /// Returns the name of the first variable or table in which an update has made a value NaN or infinite; empty if
    /// there is none.
    pub(crate) fn non_finite(&self) -> String {
        let id = self.blocks.non_finite.get();
        let name = id.and_then(|id| self.map.name(*id));
        name.unwrap_or_default().to_owned()
    }

    /// Returns the counts of each table, summed over its buckets here.
    pub(crate) fn tables(&self) -> Vec<wire::TableReport> {
        let mut tables = vec![wire::TableReport::default(); self.map.tables.len()];
        for block in &self.blocks.by_id {
            let table = (block.key().variable as usize).checked_sub(self.map.variables.len());
            let Some(sum) = table.and_then(|table| tables.get_mut(table)) else {
                continue;
            };
            if let Some(of) = block.lock().row_counts() {
                sum.rows += of.rows;
                sum.bytes += of.bytes;
                sum.created += of.created;
                sum.refused += of.refused;
                sum.evicted += of.evicted;
                sum.on_disk += of.on_disk;
            }
        }
        tables
    }

    /// Returns the buckets of a table that this shard holds, in ascending order. `number` is the table's number in the
    /// shard map.
    pub(crate) fn buckets(
        &self,
        number: u32,
        table: &PlacedTable,
    ) -> impl Iterator<Item = BlockId> {
        let all = (0..table.spec.buckets).map(move |index| BlockId {
            variable: number,
            index,
        });
        all.filter(|id| self.blocks.by_id.contains_key(id))
    }

    /// Returns a block with a value that is NaN or infinite, if there is one.
    pub(crate) fn block_not_finite(&self) -> Option<String> {
        let mut blocks = self.blocks.by_id.iter();
        let id = *blocks.find(|block| !block.lock().is_finite())?.key();
        Some(self.map.describe(id))
    }

    /// Returns the source of the values.
    pub(crate) fn source(&self) -> Option<&Source> {
        let shard = self.map.shards.get(self.shard as usize)?;
        Some(&shard.source)
    }

    /// Returns the number of blocks, and the number of bytes of their weights and slots.
    pub(crate) fn size(&self) -> (usize, usize) {
        let blocks = &self.blocks.by_id;
        (
            blocks.len(),
            blocks.iter().map(|block| block.lock().bytes()).sum(),
        )
    }

    /// Reads the blocks that a pull wants. Refuses a pull that names a block twice, or that asks for more values than
    /// fit into a message.
    pub(crate) fn read_pull(&self, pull: &wire::Pull) -> Result<Vec<(BlockId, Wanted)>, Refusal> {
        let mut named = HashSet::with_capacity(pull.blocks.len());
        let mut wants = Vec::with_capacity(pull.blocks.len());
        let mut elements = 0;
        for wanted in &pull.blocks {
            let id = BlockId::read(wanted.block)?;
            let mut want = Wanted {
                average: wanted.average,
                look_ahead: wanted.look_ahead,
                ids: Vec::new(),
            };
            match self.map.table(id)? {
                None => elements += self.map.range(id)?.len(),
                Some(spec) => {
                    let ids = read_ids(&wanted.ids, spec, id.index);
                    want.ids = ids.map_err(|refusal| self.map.about(id, refusal))?;
                    elements += want.ids.len() * spec.dimension as usize;
                }
            }
            if !named.insert(id) {
                return Err(self.twice(id));
            }
            wants.push((id, want));
        }
        let bytes = elements * size_of::<f32>();
        if bytes > MAX_MESSAGE_BYTES {
            return Err(Refusal::new(
                Reason::Oversized,
                format!(
                    "a pull asks for {bytes} bytes; a message has {MAX_MESSAGE_BYTES} at the most, so ask for fewer blocks or rows at a time"
                ),
            ));
        }
        Ok(wants)
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

    /// Reads the values sent for a block: they must have its size and a known type, and be finite.
    pub(crate) fn read_values(
        &self,
        id: BlockId,
        payload: Option<&wire::Payload>,
    ) -> Result<Values, Refusal> {
        let values = self.map.read_values(id, payload)?;
        if !values.elements().all_finite() && !planted!(TakesNonFinite) {
            let what = "holds NaN or infinity; lower the learning rate, clip gradients, or look at the data";
            return Err(self.map.about(id, Refusal::new(Reason::NonFinite, what)));
        }
        Ok(values)
    }
}

/// Returns the refusal of a message that needs values before there are any.
pub(crate) fn not_initialized(what: &str) -> Refusal {
    Refusal::new(
        Reason::NotInitialized,
        format!("{what} has no values yet; an initialiser is at work, ask again"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use shared_proto::ids::{Generation, TaskId};

    #[test]
    fn a_push_of_an_earlier_step_does_not_hide_that_all_blocks_hold_the_newest() {
        let id = |index| BlockId { variable: 0, index };
        let blocks = Blocks::new((0..2).map(|index| (id(index), Block::empty())), 2);
        let id = TaskId::worker(0);
        let worker = Task {
            id,
            generation: Generation(1),
        };
        blocks.note_staged(worker, Clock(4));
        assert!(!blocks.all_staged(worker, Clock(4)));
        blocks.note_staged(worker, Clock(4));
        assert!(blocks.all_staged(worker, Clock(4)));
        blocks.note_staged(worker, Clock(5));
        assert!(!blocks.all_staged(worker, Clock(5)));
        // The push is sent again after a stream broke.
        blocks.note_staged(worker, Clock(4));
        assert!(!blocks.all_staged(worker, Clock(4)));
        blocks.note_staged(worker, Clock(5));
        assert!(blocks.all_staged(worker, Clock(5)));
    }
}
