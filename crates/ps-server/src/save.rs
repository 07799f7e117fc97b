//! Writes a checkpoint of a shard while training continues. Blocks are written one by one. An update of a block
//! that is being written leaves the old values to the writer and continues with a copy (see `Block`).
//!
//! In sync mode a checkpoint is of one step on all shards. A commit that comes before the writer has finished copies the
//! blocks that are not written yet, up to a limit, and then waits for the store. Copies are written first, so that
//! each file makes room for the waiting commit.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use checkpoint::{CheckpointError, FileEntry, SavedBlock, encode};
use daemon::Offload;
use parking_lot::{Condvar, Mutex};
use shared_proto::blocks::BlockId;
use shared_proto::job::NonFinite;
use shared_proto::payload;
use shared_proto::view::{CheckpointOrder, Commit, View};

use crate::block::Block;
use crate::counters::Counters;
use crate::store::Store;

/// The bytes of weights and slots in one file, as a rule, and so in memory for writing at a time.
const FILE_BYTES: usize = 16 << 20;

/// The longest time that a commit waits for room before the checkpoint is given up.
const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// A checkpoint of a shard that is being written.
pub(crate) struct Saving {
    pub(crate) order: CheckpointOrder,
    /// The most bytes of copies that commits may make.
    most_copied: usize,
    /// The job's setting for NaN and infinity, which decides whether checkpoints may have such values.
    non_finite: NonFinite,
    state: Mutex<State>,
    room: Condvar,
}

#[derive(Default)]
struct State {
    reached: HashSet<BlockId>,
    copies: BTreeMap<BlockId, SavedBlock>,
    copied_bytes: usize,
    /// True once no copies are needed any more.
    over: bool,
}

fn is_finite(block: &SavedBlock) -> bool {
    let mut values = [&block.weights, &block.slots].into_iter();
    values.all(|values| payload::all_finite(payload::elements(values)))
}

fn size(block: &SavedBlock) -> usize {
    block.weights.len() + block.slots.len()
}

impl Saving {
    pub(crate) fn new(order: CheckpointOrder, most_copied: usize, non_finite: NonFinite) -> Self {
        Self {
            order,
            most_copied,
            non_finite,
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

    /// Waits until there is room for a copy of a block, if it needs one. The caller holds no block's lock.
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
    pub(crate) fn copy_before_write(&self, id: BlockId, block: &Block) {
        let mut state = self.state.lock();
        if !state.over && state.reached.insert(id) {
            let saved = block.save(id);
            state.copied_bytes += size(&saved);
            state.copies.insert(id, saved);
        }
    }

    /// Returns the next block to write: one that was copied, else the next of those that remain.
    fn next(&self, remaining: &mut impl Iterator<Item = BlockId>) -> Option<BlockId> {
        let copied = self.state.lock().copies.keys().next().copied();
        copied.or_else(|| remaining.next())
    }

    /// Returns the block as it is in the checkpoint.
    fn reach(&self, id: BlockId, block: &Block) -> SavedBlock {
        let mut state = self.state.lock();
        state.reached.insert(id);
        match state.copies.remove(&id) {
            Some(saved) => {
                state.copied_bytes -= size(&saved);
                self.room.notify_all();
                saved
            }
            None => block.save(id),
        }
    }

    /// Ends the checkpoint, written or not, so that commits no longer wait for it.
    pub(crate) fn end(&self) {
        let mut state = self.state.lock();
        state.over = true;
        state.copies.clear();
        self.room.notify_all();
    }

    /// Writes the shard's files.
    ///
    /// # Errors
    /// If the store cannot be written or already has that checkpoint, or if a block has no values or has values
    /// that must not be written.
    pub(crate) async fn write(
        &self,
        store: &Store,
        to: &checkpoint::Store,
        slots: u32,
        offload: Offload,
        counters: &Counters,
    ) -> Result<Vec<FileEntry>, CheckpointError> {
        let refused = |reason: String| CheckpointError::Storage {
            place: to.checkpoint_location(self.order.number),
            reason,
        };
        match to.manifest(self.order.number).await {
            Err(CheckpointError::NotFound(_)) => {}
            Ok(_) => return Err(refused("it is whole already".to_owned())),
            Err(error) => return Err(error),
        }
        match to.owner().await? {
            Some(other) if other.run != to.run() => return Err(to.taken(&other)),
            _ => {}
        }
        let mut files = Vec::new();
        let written = self.write_files(store, to, slots, (offload, counters), &mut files);
        match written.await {
            Ok(()) => Ok(files),
            Err(error) => {
                // The files would take room that the next attempt needs. The coordinator deletes those that remain.
                for file in &files {
                    if let Err(error) = to.remove_file(self.order.number, &file.name).await {
                        tracing::debug!(file = file.name, "not deleted: {error}");
                        break;
                    }
                }
                Err(error)
            }
        }
    }

    /// Writes the shard's files, and adds each one to `files` once it is written.
    async fn write_files(
        &self,
        store: &Store,
        to: &checkpoint::Store,
        slots: u32,
        (offload, counters): (Offload, &Counters),
        files: &mut Vec<FileEntry>,
    ) -> Result<(), CheckpointError> {
        let refused = |reason: String| CheckpointError::Storage {
            place: to.checkpoint_location(self.order.number),
            reason,
        };
        let refuses = self.non_finite == NonFinite::Fail;
        let mut ids = store.map.blocks_of(store.shard);
        let mut written = HashSet::new();
        loop {
            let (mut blocks, mut bytes) = (Vec::new(), 0);
            while bytes < FILE_BYTES
                && let Some(id) = self.next(&mut ids)
            {
                if let Some(block) = store.blocks.by_id.get(&id)
                    && written.insert(id)
                {
                    let saved = self.reach(id, &block.lock());
                    if saved.weights.is_empty() {
                        let id = store.map.describe(id);
                        return Err(refused(format!("{id} has no values here")));
                    }
                    bytes += size(&saved);
                    blocks.push(saved);
                }
            }
            if blocks.is_empty() {
                return Ok(());
            }
            let name = to.part_name(store.shard, files.len());
            let (file, content) = offload
                .run(move || {
                    let wrong = refuses.then(|| blocks.iter().find(|block| !is_finite(block)));
                    if let Some(block) = wrong.flatten() {
                        return Err(block.id);
                    }
                    let content = encode(&blocks, slots);
                    let ids = blocks.iter().map(|block| block.id);
                    Ok((FileEntry::of(&name, &content, ids), content))
                })
                .await
                .map_err(|id| {
                    let id = store.map.describe(id);
                    refused(format!("{id} has values that are NaN or infinite"))
                })?;
            let bytes = content.len();
            to.write_file(self.order.number, &file.name, content)
                .await?;
            counters.wrote(bytes);
            files.push(file);
            if self.state.lock().over {
                return Err(refused(format!(
                    "too slow: a step had waited for it for {LONGEST_WAIT:?}"
                )));
            }
        }
    }
}

/// Ends a checkpoint when this is dropped.
pub(crate) struct EndOnDrop(pub(crate) Arc<Saving>);

impl Drop for EndOnDrop {
    fn drop(&mut self) {
        self.0.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use checkpoint::decode;
    use optimizer::{Rule, rule};
    use shared_proto::blocks::{PlacedShard, PlacedVariable, ShardMap, Source, VariableSpec};
    use shared_proto::ids::{
        Clock, Epoch, Generation, Origin, Role, RunId, Sequence, Task, TaskId, Version,
    };
    use shared_proto::job::{Momentum, Optimizer};
    use shared_proto::payload::{self, Dtype, Elements};

    const BLOCKS: usize = 40;
    const ELEMENTS: usize = 1 << 17;

    fn worker() -> Task {
        Task {
            id: TaskId {
                role: Role::Worker,
                index: 0,
            },
            generation: Generation(1),
        }
    }

    fn elements(value: f32) -> Elements {
        Elements::of(payload::to_bytes(&vec![value; ELEMENTS]), Dtype::F32)
    }

    fn momentum() -> Box<dyn Rule> {
        rule(&Optimizer::Momentum(Momentum::default()))
    }

    fn store() -> Store {
        let map = ShardMap {
            epoch: Epoch(1),
            shards: vec![PlacedShard {
                address: String::new(),
                server: worker(),
                source: Source::initializer(Epoch(1)),
            }],
            variables: vec![PlacedVariable {
                spec: VariableSpec {
                    name: "w".to_owned(),
                    shape: vec![BLOCKS, ELEMENTS],
                },
                shards: vec![0; BLOCKS],
            }],
            block_elements: ELEMENTS,
            total_updates: 1,
        };
        let store = Store::empty(0, map);
        for block in &store.blocks.by_id {
            block.lock().initialize(&elements(0.0), &*momentum());
        }
        store
    }

    /// Commits a step in all blocks, as `Shard::commit` does. Returns the most bytes of copies.
    fn commit(store: &Store, saving: &Saving, step: u64) -> usize {
        let mut most = 0;
        for entry in &store.blocks.by_id {
            saving.wait_for_room(*entry.key());
            let mut block = entry.lock();
            saving.copy_before_write(*entry.key(), &block);
            most = most.max(saving.state.lock().copied_bytes);
            let origin = Origin {
                job: String::new(),
                run: RunId::default(),
                task: worker(),
                epoch: Epoch(1),
                clock: Clock(step),
                sequence: Sequence(step + 1),
            };
            block.stage(&origin, &View::default(), elements(1.0));
            let commit = Commit {
                step: Clock(step),
                contributors: vec![(worker(), 1)],
            };
            let rule = momentum();
            block
                .commit(&commit, &*rule, |_| 1.0, &mut Vec::new())
                .unwrap();
        }
        most
    }

    #[tokio::test]
    async fn what_is_whole_and_what_has_no_values_is_not_written() {
        let dir = tempfile::tempdir().unwrap();
        let to = checkpoint::Store::open(dir.path().to_str().unwrap()).unwrap();
        let order = CheckpointOrder {
            number: 3,
            epoch: Epoch(1),
            clock: Clock(0),
        };
        let write = async |store: &Store| {
            let saving = Saving::new(order, usize::MAX, NonFinite::Fail);
            let counters = Counters::new();
            let written = saving.write(store, &to, 1, Offload::Threads, &counters);
            let written = written.await.map_err(|error| error.to_string())?;
            let bytes: u64 = written.iter().map(|file| file.bytes).sum();
            assert_eq!(
                counters.report(0, String::new(), false).checkpoint_bytes,
                bytes
            );
            Ok::<_, String>(written)
        };
        let full = store();
        let empty = Store::empty(0, full.map.clone());
        let refused = write(&empty).await.unwrap_err();
        assert!(refused.contains("has no values"), "{refused}");
        let files = write(&full).await.unwrap();
        let manifest = checkpoint::Manifest {
            format: checkpoint::FORMAT,
            number: order.number,
            run: String::new(),
            job: "j".to_owned(),
            job_toml: String::new(),
            mode: "sync".to_owned(),
            epoch: 1,
            clock: 0,
            steps: 0,
            samples: 0,
            began: 0,
            variables: vec![checkpoint::SavedVariable {
                name: "w".to_owned(),
                shape: vec![BLOCKS as u64, ELEMENTS as u64],
            }],
            block_elements: ELEMENTS as u64,
            slots: 1,
            shards: 1,
            files,
            progress: serde_json::Value::Null,
            checksum: String::new(),
        };
        to.write_manifest(manifest).await.unwrap();
        let refused = write(&full).await.unwrap_err();
        assert!(refused.contains("whole already"), "{refused}");
    }

    #[tokio::test]
    async fn values_that_are_not_finite_are_written_only_where_the_job_goes_on_with_them() {
        let dir = tempfile::tempdir().unwrap();
        let to = checkpoint::Store::open(dir.path().to_str().unwrap()).unwrap();
        let store = store();
        let id = store.map.blocks_of(0).last().unwrap();
        let entry = store.blocks.by_id.get(&id).unwrap();
        entry
            .lock()
            .initialize(&elements(f32::INFINITY), &*momentum());
        drop(entry);
        for (number, non_finite, is_written) in
            [(3, NonFinite::Fail, false), (4, NonFinite::Skip, true)]
        {
            let order = CheckpointOrder {
                number,
                epoch: Epoch(1),
                clock: Clock(0),
            };
            let (saving, counters) = (Saving::new(order, usize::MAX, non_finite), Counters::new());
            let written = saving.write(&store, &to, 1, Offload::Threads, &counters);
            let written = written.await.map_err(|error| error.to_string());
            assert_eq!(written.is_ok(), is_written);
            if let Err(refused) = written {
                let named = refused.contains("variable \"w\"") && refused.contains("infinite");
                assert!(named, "{refused}");
            }
        }
    }

    /// Commits overtake the writer of 40 blocks, of which they may copy four, or all.
    #[tokio::test(flavor = "multi_thread")]
    async fn a_checkpoint_is_of_one_step_while_commits_go_on() {
        for blocks in [4, BLOCKS] {
            let most_copied = blocks * 2 * ELEMENTS * size_of::<f32>();
            assert_eq!(overtake(most_copied).await, most_copied);
        }
    }

    /// Makes three commits, and starts the writer once they have copied as much as they may. Checks
    /// that the checkpoint is of the step before. Returns the most bytes of copies.
    async fn overtake(most_copied: usize) -> usize {
        let store = Arc::new(store());
        let order = CheckpointOrder {
            number: 3,
            epoch: Epoch(1),
            clock: Clock(1),
        };
        let none = Saving::new(order, most_copied, NonFinite::Fail);
        none.end();
        commit(&store, &none, 0);
        let saving = Arc::new(Saving::new(order, most_copied, NonFinite::Fail));
        let (others, training) = (Arc::clone(&store), Arc::clone(&saving));
        let training = tokio::task::spawn_blocking(move || {
            let most = (1..4).map(|step| commit(&others, &training, step)).max();
            most.unwrap()
        });
        while saving.state.lock().copied_bytes < most_copied {
            tokio::task::yield_now().await;
        }
        let dir = tempfile::tempdir().unwrap();
        let to = checkpoint::Store::open(dir.path().to_str().unwrap()).unwrap();
        let files = saving
            .write(&store, &to, 1, Offload::Threads, &Counters::new())
            .await
            .unwrap();
        let most = training.await.unwrap();
        assert!(files.len() > 1);
        let mut blocks = 0;
        for file in &files {
            let path = dir.path().join("checkpoint-000000000003").join(&file.name);
            for saved in decode(&std::fs::read(path).unwrap().into(), &file.name).unwrap() {
                blocks += 1;
                assert_eq!(saved.version, Version(1));
                assert_eq!(saved.weights, payload::to_bytes(&vec![-1.0; ELEMENTS]));
                assert_eq!(saved.slots, payload::to_bytes(&vec![1.0; ELEMENTS]));
            }
        }
        assert_eq!(blocks, BLOCKS);
        assert!(saving.state.lock().copies.is_empty());
        most
    }
}
