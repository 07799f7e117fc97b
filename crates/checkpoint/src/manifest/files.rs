//! The files of a checkpoint: its own, and those of earlier checkpoints on which it builds.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use shared_proto::blocks::BlockId;

use super::{BlockRange, FileEntry, Manifest, is_file_name};

impl Manifest {
    /// Returns the number of the checkpoint in whose folder a file is.
    pub fn folder_of(&self, file: &FileEntry) -> u64 {
        file.checkpoint.unwrap_or(self.number)
    }

    /// Returns the numbers of the earlier checkpoints in whose folders files of this one are.
    pub fn builds_on(&self) -> BTreeSet<u64> {
        self.files
            .iter()
            .filter_map(|file| file.checkpoint)
            .collect()
    }

    /// Finds the files on which the changed rows of some buckets build: those with the same buckets, of this checkpoint
    /// and then of those that it builds on, down to one with all rows. Returns them as files of earlier checkpoints.
    pub fn files_under(&self, buckets: BTreeSet<BlockId>) -> Vec<FileEntry> {
        let files = self.files.iter().map(|file| (self.folder_of(file), file));
        files_under(files.collect(), buckets).0
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

    /// Checks that the files contain each block of each variable and table exactly once.
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

    /// Checks that the rows on which changes build are in the files of earlier checkpoints.
    fn check_changes(&self) -> Result<(), String> {
        for file in &self.files {
            let name = &file.name;
            if let Some(earlier) = file.checkpoint.filter(|earlier| *earlier >= self.number) {
                return Err(format!(
                    "file {name:?} is of checkpoint {earlier}, which is not an earlier one"
                ));
            }
            for range in &file.changes {
                let table = (range.variable as usize).checked_sub(self.variables.len());
                let table = table.and_then(|table| self.tables.get(table));
                let within = |range: &BlockRange, of: &BlockRange| {
                    of.variable == range.variable
                        && of.first <= range.first
                        && range.last <= of.last
                };
                let in_table = table.is_some_and(|table| range.last < table.buckets);
                if !in_table
                    || range.last < range.first
                    || !file.blocks.iter().any(|of| within(range, of))
                {
                    return Err(format!(
                        "file {name:?} has changes of buckets {} to {} of number {}, which are none of its own",
                        range.first, range.last, range.variable
                    ));
                }
            }
        }
        let changed = self.own_files().flat_map(|file| &file.changes);
        let changed: BTreeSet<BlockId> = changed.flat_map(|range| range.ids()).collect();
        let earlier = self
            .files
            .iter()
            .filter_map(|file| Some((file.checkpoint?, file)));
        match files_under(earlier.collect(), changed).1.first() {
            Some(id) => Err(format!(
                "bucket {} of number {} has changes alone; no file has all its rows",
                id.index, id.variable
            )),
            None => Ok(()),
        }
    }
}

/// Finds the files on which changes of some buckets build, among files with the numbers of their checkpoints. Returns them,
/// and the buckets of which none has all rows.
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
