//! Writes a checkpoint of a shard while training continues (see `Snapshot`).

use std::collections::HashSet;

use checkpoint::{CheckpointError, FILE_BYTES, FileEntry, SavedBlock, encode};
use daemon::Offload;
use shared_proto::blocks::BlockId;

use crate::counters::Counters;
use crate::shard::snapshot::{LONGEST_WAIT, Snapshot};
use crate::shard::store::Store;
use crate::shard::{RowsLost, SharedBlock};

/// The task of writing a shard's part of a checkpoint.
pub(crate) struct Saving<'a> {
    pub(crate) snapshot: &'a Snapshot,
    pub(crate) store: &'a Store,
    pub(crate) to: &'a checkpoint::Store,
    /// True if values that are NaN or infinite must not be written.
    pub(crate) only_finite: bool,
    pub(crate) offload: Offload,
    pub(crate) counters: &'a Counters,
    /// Called with the reason if rows on disk cannot be read.
    pub(crate) on_loss: &'a (dyn Fn(RowsLost) + Send + Sync),
}

/// The reason why blocks cannot be saved.
enum Unsaved {
    Lost(RowsLost),
    NotFinite(BlockId),
}

impl Saving<'_> {
    /// Writes the shard's files, and returns their entries. If it fails, removes the files that it has written.
    ///
    /// # Errors
    /// If the store cannot be written to or already has this checkpoint; if a block has no values, has values that must
    /// not be written, or has lost rows; or if a step has waited too long for the checkpoint.
    pub(crate) async fn write(&self) -> Result<Vec<FileEntry>, CheckpointError> {
        let (to, number) = (self.to, self.snapshot.order.number);
        to.check_writable(number).await?;
        let mut files = Vec::new();
        match self.write_files(&mut files).await {
            Ok(()) => Ok(files),
            Err(error) => {
                to.remove_files(number, &files).await;
                Err(error)
            }
        }
    }

    /// Writes the shard's files, and adds each one to `files` once it is written.
    async fn write_files(&self, files: &mut Vec<FileEntry>) -> Result<(), CheckpointError> {
        let (store, to, number) = (self.store, self.to, self.snapshot.order.number);
        let mut ids = store.map.blocks_of(store.shard);
        let mut written = HashSet::new();
        loop {
            let (mut blocks, mut bytes) = (Vec::new(), 0);
            while bytes < FILE_BYTES
                && let Some(id) = self.snapshot.next(&mut ids)
            {
                if let Some(block) = store.blocks.by_id.get(&id)
                    && written.insert(id)
                {
                    let mut shared = self.snapshot.reach(id, &mut block.lock());
                    shared.build_on(self.snapshot.order.base);
                    if !shared.initialized() {
                        let id = store.map.describe(id);
                        return Err(self.refused(format!("{id} has no values here")));
                    }
                    bytes += shared.saved_bytes();
                    blocks.push(shared);
                }
            }
            if blocks.is_empty() {
                return Ok(());
            }
            let name = to.part_name(store.shard, files.len());
            let only_finite = self.only_finite;
            let (file, content) = self
                .offload
                .run(move || {
                    let blocks = blocks.iter().map(SharedBlock::to_saved);
                    let blocks: Vec<SavedBlock> =
                        blocks.collect::<Result<_, _>>().map_err(Unsaved::Lost)?;
                    let wrong =
                        only_finite.then(|| blocks.iter().find(|block| !block.values.all_finite()));
                    if let Some(block) = wrong.flatten() {
                        return Err(Unsaved::NotFinite(block.id));
                    }
                    let content = encode(&blocks);
                    Ok((FileEntry::of_blocks(&name, &content, &blocks), content))
                })
                .await
                .map_err(|unsaved| match unsaved {
                    Unsaved::Lost(lost) => {
                        (self.on_loss)(lost.clone());
                        self.refused(lost.to_string())
                    }
                    Unsaved::NotFinite(id) => {
                        let id = store.map.describe(id);
                        self.refused(format!("{id} has values that are NaN or infinite"))
                    }
                })?;
            let bytes = content.len();
            to.write_file(number, &file.name, content).await?;
            self.counters.wrote(bytes);
            files.push(file);
            if self.snapshot.is_over() {
                return Err(self.refused(format!(
                    "too slow: a step had waited for it for {LONGEST_WAIT:?}"
                )));
            }
        }
    }

    fn refused(&self, reason: String) -> CheckpointError {
        CheckpointError::Storage {
            place: self.to.checkpoint_location(self.snapshot.order.number),
            reason,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::row_settings::RowStorage;
    use crate::shard::Limit;
    use checkpoint::decode;
    use optimizer::VariableRule;
    use shared_proto::blocks::{
        PlacedShard, PlacedVariable, ShardMap, ShardServer, Source, VariableKind, VariableSpec,
    };
    use shared_proto::ids::{
        Clock, Epoch, Generation, Origin, RunNumber, Sequence, Task, TaskId, Version,
    };
    use shared_proto::job::{Job, Momentum, Optimizer};
    use shared_proto::payload::{self, Elements};
    use shared_proto::view::{CheckpointOrder, Commit, View};
    use std::sync::Arc;

    const BLOCKS: usize = 40;
    const ELEMENTS: usize = 1 << 17;

    fn worker() -> Task {
        Task {
            id: TaskId::worker(0),
            generation: Generation(1),
        }
    }

    fn elements(value: f32) -> Elements {
        Elements::from(vec![value; ELEMENTS])
    }

    fn job() -> Job {
        let mut job = Job {
            optimizer: Optimizer::Momentum(Momentum::default()),
            ..Job::default()
        };
        *job.optimizer.learning_rate_mut() = 1.0;
        job
    }

    fn momentum() -> VariableRule {
        VariableRule::new(&job(), &VariableSpec::default(), 1)
    }

    fn store() -> Store {
        let map = ShardMap {
            epoch: Epoch(1),
            shards: vec![PlacedShard {
                server: ShardServer::Lost(worker()),
                source: Source::initializer(Epoch(1)),
            }],
            variables: vec![PlacedVariable {
                spec: VariableSpec {
                    name: "w".to_owned(),
                    shape: vec![BLOCKS, ELEMENTS],
                    ..VariableSpec::default()
                },
                shards: vec![0; BLOCKS],
            }],
            tables: Vec::new(),
            block_elements: ELEMENTS,
            total_updates: 1,
        };
        let store = Store::empty(0, map, &job(), &RowStorage::default());
        for block in &store.blocks.by_id {
            let rule = store.rule(*block.key());
            block.lock().initialize(&elements(0.0), rule);
        }
        store
    }

    fn saving<'a>(
        snapshot: &'a Snapshot,
        store: &'a Store,
        to: &'a checkpoint::Store,
        only_finite: bool,
        counters: &'a Counters,
    ) -> Saving<'a> {
        Saving {
            snapshot,
            store,
            to,
            only_finite,
            offload: Offload::Threads,
            counters,
            on_loss: &|lost| panic!("{lost}"),
        }
    }

    /// Commits a step in all blocks, as `Shard::commit` does. Returns the most bytes of copies.
    fn commit(store: &Store, snapshot: &Snapshot, step: u64) -> usize {
        let mut most = 0;
        for entry in &store.blocks.by_id {
            snapshot.wait_for_room(*entry.key());
            let mut block = entry.lock();
            snapshot.copy_before_write(*entry.key(), &mut block);
            most = most.max(snapshot.copied_bytes());
            let origin = Origin {
                job: String::new(),
                run: RunNumber::default(),
                task: worker(),
                epoch: Epoch(1),
                clock: Clock(step),
                sequence: Sequence(step + 1),
            };
            block.stage(&origin, &View::default(), elements(1.0).into());
            let commit = Commit {
                step: Clock(step),
                contributors: vec![(worker(), 1)],
                clip_factor: None,
            };
            block
                .commit(&commit, &momentum(), 1.0, Limit::OFF, &mut Vec::new())
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
            base: None,
        };
        let write = async |store: &Store| {
            let (snapshot, counters) = (Snapshot::new(order, usize::MAX), Counters::new());
            let written = saving(&snapshot, store, &to, true, &counters).write().await;
            let written = written.map_err(|error| error.to_string())?;
            let bytes: u64 = written.iter().map(|file| file.bytes).sum();
            assert_eq!(
                counters
                    .report(0, String::new(), Vec::new(), false)
                    .checkpoint_bytes,
                bytes
            );
            Ok::<_, String>(written)
        };
        let full = store();
        let empty = Store::empty(0, full.map.clone(), &job(), &RowStorage::default());
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
                kind: VariableKind::Trained,
                slots: 1,
            }],
            tables: Vec::new(),
            block_elements: ELEMENTS as u64,
            slots: None,
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
        let infinite = elements(f32::INFINITY);
        entry.lock().initialize(&infinite, store.rule(id));
        drop(entry);
        for (number, only_finite) in [(3, true), (4, false)] {
            let order = CheckpointOrder {
                number,
                epoch: Epoch(1),
                clock: Clock(0),
                base: None,
            };
            let (snapshot, counters) = (Snapshot::new(order, usize::MAX), Counters::new());
            let written = saving(&snapshot, &store, &to, only_finite, &counters)
                .write()
                .await;
            let written = written.map_err(|error| error.to_string());
            assert_eq!(written.is_ok(), !only_finite);
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
            base: None,
        };
        let none = Snapshot::new(order, most_copied);
        none.end();
        commit(&store, &none, 0);
        let snapshot = Arc::new(Snapshot::new(order, most_copied));
        let (others, training) = (Arc::clone(&store), Arc::clone(&snapshot));
        let training = tokio::task::spawn_blocking(move || {
            let most = (1..4).map(|step| commit(&others, &training, step)).max();
            most.unwrap()
        });
        let before_writing = loop {
            let copied = snapshot.copied_bytes();
            if copied >= most_copied {
                break copied;
            }
            tokio::task::yield_now().await;
        };
        let dir = tempfile::tempdir().unwrap();
        let to = checkpoint::Store::open(dir.path().to_str().unwrap()).unwrap();
        let counters = Counters::new();
        let files = saving(&snapshot, &store, &to, true, &counters)
            .write()
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
                let [weights, slots] = saved.values.numbers();
                assert_eq!(*weights, payload::to_bytes(&vec![-1.0; ELEMENTS]));
                assert_eq!(*slots, payload::to_bytes(&vec![1.0; ELEMENTS]));
            }
        }
        assert_eq!(blocks, BLOCKS);
        assert_eq!(snapshot.copies(), 0);
        // The writer may take a copy before the commits have looked at their number.
        most.max(before_writing)
    }
}
