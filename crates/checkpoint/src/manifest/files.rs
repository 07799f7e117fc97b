//! The files of a checkpoint: its own, and those of earlier checkpoints on which it builds.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use shared_proto::blocks::BlockId;

use super::{BlockRange, FileEntry, Manifest, is_file_name};

impl Manifest {
    /// Returns the number of the checkpoint that stores a file.
    pub fn folder_of(&self, file: &FileEntry) -> u64 {
        file.checkpoint.unwrap_or(self.number)
    }

    /// Returns the numbers of the earlier checkpoints that store files of this one.
    pub fn builds_on(&self) -> BTreeSet<u64> {
        self.files
            .iter()
            .filter_map(|file| file.checkpoint)
            .collect()
    }

    /// Returns the files that the next checkpoint needs if it stores only the changed rows of the buckets in `changes`:
    /// the files of this and of earlier checkpoints that have the unchanged rows.
    ///
    /// # Errors
    /// If the ranges are not of tables, or name a bucket twice.
    pub fn files_under(&self, changes: &[BlockRange]) -> Result<Vec<FileEntry>, String> {
        let files = self.files.iter().map(|file| (self.folder_of(file), file));
        Ok(files_under(files.collect(), self.buckets(changes)?).0)
    }

    /// Describes a block for people, as in `bucket 3 of table "item"`.
    pub fn describe(&self, id: BlockId) -> String {
        let number = id.variable as usize;
        let table = number.checked_sub(self.variables.len());
        match (
            self.variables.get(number),
            table.and_then(|table| self.tables.get(table)),
        ) {
            (Some(variable), _) => format!("block {} of variable {:?}", id.index, variable.name),
            (None, Some(table)) => format!("bucket {} of table {:?}", id.index, table.name),
            (None, None) => format!("block {} of variable number {number}", id.index),
        }
    }

    /// Returns the ids of the buckets in these ranges.
    ///
    /// # Errors
    /// If a range is not of a table, or a bucket is named twice. No more buckets are looked at than the tables have.
    fn buckets<'a>(
        &self,
        ranges: impl IntoIterator<Item = &'a BlockRange>,
    ) -> Result<BTreeSet<BlockId>, String> {
        let mut buckets = BTreeSet::new();
        for range in ranges {
            let table = (range.variable as usize).checked_sub(self.variables.len());
            let table = table.and_then(|table| self.tables.get(table));
            if table.is_none_or(|table| range.last < range.first || range.last >= table.buckets) {
                return Err(format!(
                    "buckets {} to {} of table number {} are named, which are not there",
                    range.first, range.last, range.variable
                ));
            }
            for id in range.ids() {
                if !buckets.insert(id) {
                    return Err(format!("{} is named twice", self.describe(id)));
                }
            }
        }
        Ok(buckets)
    }

    /// Returns the name and the number of blocks of each variable, then of each table.
    fn block_counts(&self) -> impl Iterator<Item = (&str, u64)> {
        let variables = self.variables.iter().map(|variable| {
            let blocks = variable.elements().div_ceil(self.block_elements);
            (variable.name.as_str(), blocks)
        });
        let tables = self.tables.iter();
        variables.chain(tables.map(|table| (table.name.as_str(), u64::from(table.buckets))))
    }

    /// Checks that the checkpoint's own files contain each block of each variable and table exactly once, and that the
    /// files of earlier checkpoints fit them.
    pub(super) fn check_files(&self) -> Result<(), String> {
        let names = self
            .files
            .iter()
            .map(|file| (file.checkpoint, file.name.as_str()));
        let mut names: Vec<(Option<u64>, &str)> = names.collect();
        names.sort_unstable();
        if let Some((_, name)) = names.iter().find(|(_, name)| !is_file_name(name)) {
            return Err(format!("{name:?} is no name of a file of a checkpoint"));
        }
        if let Some(twice) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(format!("file {:?} is named twice", twice[0].1));
        }
        let mut ranges: Vec<(&BlockRange, &str)> = self
            .own_files()
            .flat_map(|file| file.blocks.iter().map(|range| (range, file.name.as_str())))
            .collect();
        ranges.sort_by_key(|(range, _)| (range.variable, range.first));
        let mut ranges = ranges.into_iter().peekable();
        for (number, (name, blocks)) in (0u32..).zip(self.block_counts()) {
            let mut next = 0;
            while let Some((range, _)) = ranges.next_if(|(range, _)| range.variable == number) {
                let (first, last) = (u64::from(range.first), u64::from(range.last));
                if last < first || last >= blocks {
                    return Err(format!(
                        "variable {name:?} has {blocks} blocks, but {first} to {last} are named"
                    ));
                }
                if first != next {
                    let (what, block) = if first < next {
                        ("twice", first)
                    } else {
                        ("in no file", next)
                    };
                    return Err(format!("block {block} of variable {name:?} is {what}"));
                }
                next = last + 1;
            }
            if next != blocks {
                return Err(format!("block {next} of variable {name:?} is in no file"));
            }
        }
        match ranges.next() {
            Some((range, file)) => Err(format!(
                "file {file:?} has blocks of variable {}, which is not there",
                range.variable
            )),
            None => self.check_changes(),
        }
    }

    /// Checks the entries of files of earlier checkpoints. For each bucket of which the checkpoint's own files have
    /// only the changed rows, one of those files must have all rows.
    fn check_changes(&self) -> Result<(), String> {
        let counts: Vec<u64> = self.block_counts().map(|(_, blocks)| blocks).collect();
        for file in &self.files {
            let name = &file.name;
            if let Some(earlier) = file.checkpoint.filter(|earlier| *earlier >= self.number) {
                return Err(format!(
                    "file {name:?} is of checkpoint {earlier}, which is not an earlier one"
                ));
            }
            let is_there = |range: &&BlockRange| {
                let count = counts.get(range.variable as usize).copied();
                range.first <= range.last && count.is_some_and(|n| u64::from(range.last) < n)
            };
            if let Some(range) = file.blocks.iter().find(|range| !is_there(range)) {
                return Err(format!(
                    "file {name:?} has blocks {} to {} of variable number {}, which are not there",
                    range.first, range.last, range.variable
                ));
            }
            let of_file = |error| format!("file {name:?}: {error}");
            let changed = self.buckets(&file.changes).map_err(of_file)?;
            let is_within = |id: &BlockId| {
                let mut blocks = file.blocks.iter();
                blocks.any(|of| {
                    of.variable == id.variable && (of.first..=of.last).contains(&id.index)
                })
            };
            if let Some(id) = changed.iter().find(|id| !is_within(id)) {
                let id = self.describe(*id);
                return Err(format!(
                    "file {name:?} has changes of {id}, which is not in it"
                ));
            }
        }
        let changed = self.buckets(self.own_files().flat_map(|file| &file.changes))?;
        let earlier = self
            .files
            .iter()
            .filter_map(|file| Some((file.checkpoint?, file)));
        match files_under(earlier.collect(), changed).1.first() {
            Some(id) => Err(format!(
                "the files have changes of {}, but none has all its rows",
                self.describe(*id)
            )),
            None => Ok(()),
        }
    }

    /// Returns the files in the checkpoint's own folder.
    pub(super) fn own_files(&self) -> impl Iterator<Item = &FileEntry> {
        self.files.iter().filter(|file| file.checkpoint.is_none())
    }
}

/// Returns the files that are needed to read all rows of `buckets`: for each bucket, the files with rows of it, from
/// the newest one back to one with all its rows. Also returns the buckets of which no file has all rows. Each file of
/// `files` comes with the number of the checkpoint that stores it.
fn files_under(
    mut files: Vec<(u64, &FileEntry)>,
    mut buckets: BTreeSet<BlockId>,
) -> (Vec<FileEntry>, BTreeSet<BlockId>) {
    files.sort_by_key(|(folder, _)| Reverse(*folder));
    let mut found = Vec::new();
    for of_folder in files.chunk_by(|a, b| a.0 == b.0) {
        let mut whole: BTreeSet<BlockId> = BTreeSet::new();
        for (folder, file) in of_folder {
            let held = |ranges: &[BlockRange]| -> BTreeSet<BlockId> {
                let within = |range: &BlockRange| buckets.range(range.first_id()..=range.last_id());
                ranges.iter().flat_map(within).copied().collect()
            };
            let of_file = held(&file.blocks);
            if of_file.is_empty() {
                continue;
            }
            whole.extend(of_file.difference(&held(&file.changes)));
            found.push(FileEntry {
                checkpoint: Some(*folder),
                ..(*file).clone()
            });
        }
        buckets.retain(|id| !whole.contains(id));
    }
    (found, buckets)
}
