//! The rows of a table that differ between two checkpoints.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};

use ::checkpoint::{
    BlockRange, CheckpointError, FileEntry, Manifest, NewestFirst, Piece, SavedBlock, SavedValues,
    Store,
};
use shared_proto::blocks::BlockId;
use shared_proto::table::{SavedRows, ids_of_bytes};

use super::entry::Entry;
use super::parts::Parts;
use crate::error::CommandError;

/// A table in a checkpoint that is compared with an earlier one.
pub(super) struct Difference<'a> {
    pub(super) store: &'a Store,
    pub(super) now: &'a Manifest,
    /// The index of the table in block ids.
    pub(super) variable: u32,
}

/// A bucket whose changes are read, from the newest checkpoint backwards.
struct Followed {
    /// The number of the checkpoint that has the next older changes of the bucket, or all of its rows.
    next: u64,
    /// The ids of the rows that newer changes set or remove.
    newer: HashSet<u64>,
}

impl Difference<'_> {
    /// Writes all rows. Memory holds one of the checkpoint's files, and the ids of the rows that incremental
    /// checkpoints have.
    pub(super) async fn all(&self, parts: &mut Parts<'_>) -> Result<(), CommandError> {
        let place = self.store.checkpoint_location(self.now.number);
        let damaged = |why| CheckpointError::damaged(&place, why);
        let mut reading = NewestFirst::default();
        for file in NewestFirst::files(self.now) {
            if !self.has_table(file) {
                continue;
            }
            for block in self.blocks(self.now, file).await? {
                let piece = reading.take(self.now, file, block).map_err(damaged)?;
                if let Some(rows) = piece.and_then(Piece::into_rows) {
                    parts.add(&rows).await?;
                }
            }
        }
        Ok(reading.finish(self.now).map_err(damaged)?)
    }

    /// Writes the changes since checkpoint `since` of the same run, if the current checkpoint builds on it. Returns
    /// false if it does not; the caller then discards `parts`.
    pub(super) async fn by_chain(
        &self,
        since: u64,
        parts: &mut Parts<'_>,
    ) -> Result<bool, CommandError> {
        let files = NewestFirst::files(self.now);
        let newer = files
            .into_iter()
            .filter(|file| self.now.folder_of(file) > since && self.has_table(file));
        let newer: Vec<&FileEntry> = newer.collect();
        // For most checkpoints that do not build on it, the manifest shows it.
        if newer
            .iter()
            .any(|file| self.count(&file.changes) < self.count(&file.blocks))
        {
            return Ok(false);
        }
        let mut buckets: BTreeMap<u32, Followed> = BTreeMap::new();
        for file in newer {
            let folder = self.now.folder_of(file);
            for block in self.blocks(self.now, file).await? {
                let bucket = buckets.entry(block.id.index).or_insert(Followed {
                    next: folder,
                    newer: HashSet::new(),
                });
                let SavedValues::Rows(rows) = block.values else {
                    return Ok(false);
                };
                let Some(changes) = &rows.changes else {
                    return Ok(false);
                };
                if bucket.next != folder {
                    return Ok(false);
                }
                let newer = &mut bucket.newer;
                parts.add(&rows.retained(|id| !newer.contains(&id))).await?;
                newer.extend(ids_of_bytes(&rows.ids));
                let removed = ids_of_bytes(&changes.removed);
                parts.remove(removed.into_iter().filter(|id| newer.insert(*id)));
                bucket.next = changes.since;
            }
        }
        let all = buckets.len() == self.buckets().len();
        Ok(all && buckets.values().all(|bucket| bucket.next == since))
    }

    /// Writes the rows that differ from those of the previous export, by comparing all rows of both checkpoints.
    /// Returns false if the earlier checkpoint is gone or has other variables or tables; the caller then discards
    /// `parts`. Memory holds the buckets of one of the current checkpoint's own files, with all of their rows. For an
    /// incremental checkpoint, this may be the whole table.
    pub(super) async fn by_comparison(
        &self,
        before: &Entry,
        parts: &mut Parts<'_>,
    ) -> Result<bool, CommandError> {
        let earlier = match self.store.manifest(before.checkpoint).await {
            Ok(earlier) if before.is_of(&earlier) => earlier,
            Ok(_) | Err(CheckpointError::NotFound(_) | CheckpointError::Damaged { .. }) => {
                return Ok(false);
            }
            Err(error) => return Err(error.into()),
        };
        // Block ids name tables by their place among all of them.
        if earlier.variables.len() != self.now.variables.len() || earlier.tables != self.now.tables
        {
            return Ok(false);
        }
        for buckets in self.groups() {
            let old = match self.rows(&earlier, &buckets).await {
                Ok(old) => old,
                // It was deleted meanwhile.
                Err(CommandError::Checkpoint(
                    CheckpointError::Damaged { .. } | CheckpointError::NotFound(_),
                )) => return Ok(false),
                Err(error) => return Err(error),
            };
            // Each piece is dropped once its rows are hashed.
            let mut old: HashMap<u64, u64> = old
                .into_iter()
                .flat_map(|rows| hashes(&rows, before.dimension).collect::<Vec<_>>())
                .collect();
            for rows in self.rows(self.now, &buckets).await? {
                let changed = hashes(&rows, before.dimension);
                let changed = changed.filter(|(id, hash)| old.remove(id) != Some(*hash));
                let changed: HashSet<u64> = changed.map(|(id, _)| id).collect();
                parts
                    .add(&rows.retained(|id| changed.contains(&id)))
                    .await?;
            }
            parts.remove(old.into_keys());
        }
        Ok(true)
    }

    /// Returns the rows of some buckets of a checkpoint.
    async fn rows(
        &self,
        manifest: &Manifest,
        buckets: &BTreeSet<u32>,
    ) -> Result<Vec<SavedRows>, CommandError> {
        let mut rows = Vec::new();
        let wanted = |id: BlockId| id.variable == self.variable && buckets.contains(&id.index);
        let add = |_, saved| {
            rows.push(saved);
            Ok::<_, CommandError>(())
        };
        let read = self.store.read_rows(manifest, wanted, add, |_| {});
        read.await?;
        Ok(rows)
    }

    /// Returns the table's blocks in a file.
    async fn blocks(
        &self,
        manifest: &Manifest,
        file: &FileEntry,
    ) -> Result<impl Iterator<Item = SavedBlock>, CommandError> {
        let variable = self.variable;
        let blocks = self.store.read_file(manifest, file).await?.into_iter();
        Ok(blocks.filter(move |block| block.id.variable == variable))
    }

    /// Returns the table's buckets in each of the checkpoint's own files, without files that have none.
    fn groups(&self) -> impl Iterator<Item = BTreeSet<u32>> {
        let own = self
            .now
            .files
            .iter()
            .filter(|file| file.checkpoint.is_none());
        let groups = own.map(|file| self.indices(file).collect::<BTreeSet<u32>>());
        groups.filter(|buckets| !buckets.is_empty())
    }

    fn buckets(&self) -> BTreeSet<u32> {
        self.groups().flatten().collect()
    }

    /// Returns the table's buckets in a file.
    fn indices(&self, file: &FileEntry) -> impl Iterator<Item = u32> {
        let ranges = file.blocks.iter();
        ranges
            .filter(|range| range.variable == self.variable)
            .flat_map(|range| range.first..=range.last)
    }

    fn has_table(&self, file: &FileEntry) -> bool {
        self.indices(file).next().is_some()
    }

    /// Returns the number of the table's buckets in ranges.
    fn count(&self, ranges: &[BlockRange]) -> usize {
        let of_table = ranges
            .iter()
            .filter(|range| range.variable == self.variable);
        of_table
            .map(|range| (range.first..=range.last).count())
            .sum()
    }
}

/// Returns the id of each row with a hash of its values.
fn hashes(rows: &SavedRows, dimension: u32) -> impl Iterator<Item = (u64, u64)> {
    let ids = ids_of_bytes(&rows.ids);
    let width = rows
        .numbers
        .len()
        .checked_div(ids.len())
        .unwrap_or(0)
        .max(1);
    // The optimizer's state follows the values of a row.
    let values = width.min(dimension as usize * size_of::<f32>());
    let rows = rows.numbers.chunks_exact(width).map(move |row| {
        let mut hasher = DefaultHasher::new();
        row[..values].hash(&mut hasher);
        hasher.finish()
    });
    ids.into_iter().zip(rows.collect::<Vec<u64>>())
}
