//! Reads the rows of an incremental checkpoint, and of the earlier ones that it builds on.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashSet};

use shared_proto::blocks::BlockId;
use shared_proto::table::{SavedRows, ids_of_bytes};

use crate::manifest::{FileEntry, Manifest};
use crate::part::{SavedBlock, SavedValues};

/// Takes the blocks of a checkpoint's files, the newest files first, and keeps the newest version of each row. A bucket
/// may come several times, each time with other rows.
#[derive(Debug, Default)]
pub struct NewestFirst {
    buckets: BTreeMap<BlockId, Bucket>,
}

/// A bucket of which some rows are read.
#[derive(Debug, Default)]
struct Bucket {
    /// The number of the checkpoint with the rows that are not read yet; `None` once all rows are read.
    rest_in: Option<u64>,
    /// The ids of the rows that are read already, and of rows that were removed.
    newer: HashSet<u64>,
}

/// The part of a block that no newer file has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// A block, or the newest rows of a bucket.
    Newest(SavedBlock),
    /// Older rows of a bucket of which newer rows have come before. None of these rows has come yet.
    Older(BlockId, SavedRows),
}

impl Piece {
    /// Returns the rows; `None` for a dense block.
    pub fn into_rows(self) -> Option<SavedRows> {
        match self {
            Self::Older(_, rows) => Some(rows),
            Self::Newest(block) => match block.values {
                SavedValues::Rows(rows) => Some(rows),
                SavedValues::Dense { .. } => None,
            },
        }
    }
}

impl NewestFirst {
    /// Returns the files of a checkpoint in the order in which to read them.
    pub fn files(manifest: &Manifest) -> Vec<&FileEntry> {
        let mut files: Vec<&FileEntry> = manifest.files.iter().collect();
        files.sort_by_key(|file| Reverse(manifest.folder_of(file)));
        files
    }

    /// Takes a block of a file. Returns the block, or those of its rows that no newer file has. Returns `None` if the
    /// checkpoint does not need the block.
    ///
    /// # Errors
    /// If the rows on which a bucket's changes build are of another checkpoint than the changes say.
    pub fn take(
        &mut self,
        manifest: &Manifest,
        file: &FileEntry,
        block: SavedBlock,
    ) -> Result<Option<Piece>, String> {
        let SavedValues::Rows(mut rows) = block.values else {
            // An earlier checkpoint's dense blocks are in the newest one's files again.
            return Ok(file.checkpoint.is_none().then_some(Piece::Newest(block)));
        };
        let changes = rows.changes.take();
        let rest_in = changes.as_ref().map(|changes| changes.since);
        let mut newer: HashSet<u64> = HashSet::new();
        if let Some(changes) = &changes {
            newer.extend(ids_of_bytes(&rows.ids));
            newer.extend(ids_of_bytes(&changes.removed));
        }
        let id = block.id;
        let Some(bucket) = self.buckets.get_mut(&id) else {
            if file.checkpoint.is_some() {
                return Ok(None);
            }
            self.buckets.insert(id, Bucket { rest_in, newer });
            let values = SavedValues::Rows(rows);
            return Ok(Some(Piece::Newest(SavedBlock { values, ..block })));
        };
        let Some(expected) = bucket.rest_in else {
            return Ok(None);
        };
        let folder = manifest.folder_of(file);
        if folder != expected {
            return Err(format!(
                "{} has changes since checkpoint {expected}, but the manifest names rows of checkpoint {folder}",
                manifest.describe(id)
            ));
        }
        let rest = rows.retained(|id| !bucket.newer.contains(&id));
        bucket.rest_in = rest_in;
        match rest_in {
            Some(_) => bucket.newer.extend(newer),
            None => bucket.newer = HashSet::new(),
        }
        Ok(Some(Piece::Older(id, rest)))
    }

    /// Checks, after all files are read, that no rows are missing.
    ///
    /// # Errors
    /// If a bucket's changes build on rows that have not come.
    pub fn finish(self, manifest: &Manifest) -> Result<(), String> {
        let mut buckets = self.buckets.iter();
        match buckets.find_map(|(id, bucket)| Some((id, bucket.rest_in?))) {
            Some((id, since)) => Err(format!(
                "{} has changes since checkpoint {since}, but the manifest names no rows of it",
                manifest.describe(*id)
            )),
            None => Ok(()),
        }
    }
}
