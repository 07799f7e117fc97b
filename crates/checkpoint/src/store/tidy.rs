//! Lists the checkpoints of a store and deletes those of a run that are not kept.

use std::collections::BTreeSet;

use shared_proto::planted;
use shared_proto::task::boxed;

use super::{MANIFEST, Store};
use crate::error::CheckpointError;
use crate::format::{folder_name, number_of};
use crate::manifest::FileEntry;

/// A checkpoint of which at least one file exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listed {
    /// The checkpoint's number.
    pub number: u64,
    /// True if it has a manifest. Otherwise it is being written, or its writer died.
    pub complete: bool,
}

impl Store {
    /// Returns the name of a part that a shard writes. It contains the run's id.
    pub fn part_name(&self, shard: u32, part: usize) -> String {
        match self.run.as_str() {
            "" => format!("shard-{shard}-part-{part:04}.safetensors"),
            run => format!("shard-{shard}-part-{part:04}-{run}.safetensors"),
        }
    }

    /// Returns whether a file in a checkpoint's folder may belong to this run: it is one of the run's parts, or a
    /// manifest. The name of a manifest does not contain the run's id, but the names of the parts beside it do. The
    /// name of a partial file is that of the file, with more characters after it.
    fn may_be_own(&self, name: &str) -> bool {
        name.starts_with(MANIFEST) || run_of(name) == Some(&self.run) || planted!(DeletesOthers)
    }

    /// Lists all checkpoints of which at least one file exists, by number.
    ///
    /// # Errors
    /// If the store cannot be read.
    #[boxed]
    pub async fn list(&self) -> Result<Vec<Listed>, CheckpointError> {
        let folders = self.folders().await?;
        let mut numbers: Vec<u64> = folders.iter().filter_map(|name| number_of(name)).collect();
        numbers.sort_unstable();
        let mut listed = Vec::new();
        for number in numbers {
            let files = self.files.list(&folder_name(number)).await?;
            listed.push(Listed {
                number,
                complete: files.iter().any(|(name, _)| name == MANIFEST),
            });
        }
        Ok(listed)
    }

    /// Removes the complete checkpoints of this run, except the newest `keep` ones (at least one) and those that they
    /// need. Also removes the run's unfinished checkpoints that are older than the newest complete one. Leaves the
    /// checkpoints of other runs alone. Returns the numbers of the removed checkpoints.
    ///
    /// # Errors
    /// If the store cannot be read or written to.
    #[boxed]
    pub async fn prune(&self, keep: usize) -> Result<Vec<u64>, CheckpointError> {
        let own = self.own().await?;
        let complete: Vec<u64> = own
            .iter()
            .filter(|o| o.complete)
            .map(|o| o.number)
            .collect();
        let Some(newest) = complete.last() else {
            return Ok(Vec::new());
        };
        let kept = &complete[complete.len().saturating_sub(keep.max(1))..];
        let Some(needed) = self.needed_by(&complete, kept).await? else {
            return Ok(Vec::new());
        };
        let surplus = |own: &Own| own.number < *newest && !needed.contains(&own.number);
        self.remove_all(own.iter().filter(|own| surplus(own))).await
    }

    /// Returns the checkpoints that must stay so that the checkpoints `kept` can be read: `kept` and those that they
    /// build on. If `kept` has several, also the newest checkpoint that shares no file with the last of them, and those
    /// that it builds on, so that one damaged file leaves a checkpoint to go back to. Returns `None` if the manifest of
    /// a kept checkpoint is damaged, because it is then unknown what that checkpoint builds on.
    async fn needed_by(
        &self,
        complete: &[u64],
        kept: &[u64],
    ) -> Result<Option<BTreeSet<u64>>, CheckpointError> {
        let mut needed = BTreeSet::new();
        let mut of_last: Option<BTreeSet<u64>> = None;
        let mut has_another = kept.len() < 2;
        for number in complete.iter().rev() {
            let wanted = kept.contains(number);
            if !wanted && has_another {
                break;
            }
            let mut folders = match self.manifest(*number).await {
                Ok(manifest) => manifest.builds_on(),
                Err(CheckpointError::Damaged { .. }) if !wanted => continue,
                Err(error @ CheckpointError::Damaged { .. }) => {
                    tracing::warn!(
                        "no checkpoint is deleted, because it is not known what is still needed: {error}"
                    );
                    return Ok(None);
                }
                Err(error) => return Err(error),
            };
            folders.insert(*number);
            let last = of_last.get_or_insert_with(|| folders.clone());
            let shares_nothing = folders.is_disjoint(last);
            if wanted || shares_nothing {
                needed.extend(folders);
            }
            has_another |= shares_nothing;
        }
        Ok(Some(needed))
    }

    /// Removes the unfinished checkpoints of this run for which `given_up` returns true, unless complete checkpoints
    /// build on their files. Returns the numbers of the removed checkpoints.
    ///
    /// # Errors
    /// If the store cannot be read or written to.
    pub async fn sweep(&self, given_up: impl Fn(u64) -> bool) -> Result<Vec<u64>, CheckpointError> {
        let own = self.own().await?;
        let mut needed = BTreeSet::new();
        for complete in own.iter().filter(|own| own.complete) {
            match self.manifest(complete.number).await {
                Ok(manifest) => needed.extend(manifest.builds_on()),
                Err(error @ CheckpointError::Damaged { .. }) => {
                    tracing::warn!(
                        "nothing is deleted, because it is not known what is still needed: {error}"
                    );
                    return Ok(Vec::new());
                }
                Err(error) => return Err(error),
            }
        }
        let unfinished =
            |own: &&Own| !own.complete && given_up(own.number) && !needed.contains(&own.number);
        self.remove_all(own.iter().filter(unfinished)).await
    }

    /// Removes a file of a checkpoint that has no manifest.
    ///
    /// # Errors
    /// If the store cannot be written to.
    #[boxed]
    pub async fn remove_file(&self, number: u64, name: &str) -> Result<(), CheckpointError> {
        self.files
            .remove(&folder_name(number), &[name.to_owned()])
            .await
    }

    /// Lists the checkpoints of this run by number. A checkpoint counts if each file in its folder may belong to
    /// this run.
    async fn own(&self) -> Result<Vec<Own>, CheckpointError> {
        let folders = self.folders().await?;
        let mut numbers: Vec<u64> = folders.iter().filter_map(|name| number_of(name)).collect();
        numbers.sort_unstable();
        let mut own = Vec::new();
        for number in numbers {
            let files = self.files.list(&folder_name(number)).await?;
            let mut files: Vec<String> = files.into_iter().map(|(name, _)| name).collect();
            if files.iter().all(|name| self.may_be_own(name)) {
                // The manifest goes first: half a removal leaves no checkpoint.
                files.sort_by_key(|name| name != MANIFEST);
                own.push(Own {
                    number,
                    complete: files.first().is_some_and(|name| name == MANIFEST),
                    files,
                });
            }
        }
        Ok(own)
    }

    async fn remove_all(
        &self,
        which: impl DoubleEndedIterator<Item = &Own>,
    ) -> Result<Vec<u64>, CheckpointError> {
        let mut removed = Vec::new();
        // The newest first, so that no checkpoint with a manifest lacks a file that it builds on.
        for own in which.rev() {
            self.files
                .remove(&folder_name(own.number), &own.files)
                .await?;
            removed.push(own.number);
        }
        removed.reverse();
        Ok(removed)
    }

    /// Deletes files of a checkpoint that is given up, because they take room that the next attempt needs. The
    /// coordinator later deletes the files that remain.
    #[boxed]
    pub async fn remove_files(&self, number: u64, files: &[FileEntry]) {
        for file in files {
            if let Err(error) = self.remove_file(number, &file.name).await {
                tracing::debug!(file = file.name, "not deleted: {error}");
                break;
            }
        }
    }
}

/// Returns the run's id in the name of a part, which is empty for parts of earlier releases. Returns `None` for other
/// files.
fn run_of(name: &str) -> Option<&str> {
    let (_, rest) = name.strip_prefix("shard-")?.split_once("-part-")?;
    let (rest, _) = rest.split_once(".safetensors")?;
    Some(rest.split_once('-').map_or("", |(_, run)| run))
}

/// A checkpoint of this run.
struct Own {
    number: u64,
    complete: bool,
    /// The names of the files, the manifest first.
    files: Vec<String>,
}
