//! The description of a checkpoint, and its files with their checksums.

mod files;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use shared_proto::blocks::{BlockId, VariableKind, VariableSpec};
use shared_proto::table::TableSpec;

use crate::error::CheckpointError;
use crate::format::FORMAT;

/// The first version of the format in which each variable has its own number of slots.
const FORMAT_OF_OWN_SLOTS: u32 = 3;

/// The manifest of a checkpoint: `manifest.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// The version of the format.
    pub format: u32,
    /// The checkpoint's number, which grows within a run, from 0.
    pub number: u64,
    /// The id of the run that wrote the checkpoint; empty in format 1.
    #[serde(default)]
    pub run: String,
    /// The name of the job.
    pub job: String,
    /// The job, as the text of its TOML file.
    pub job_toml: String,
    /// `sync`, `bounded` or `async`.
    pub mode: String,
    /// The epoch of the shard map in which the checkpoint was written.
    pub epoch: u64,
    /// Sync mode: the number of committed steps. Otherwise, the min clock when the checkpoint was begun.
    pub clock: u64,
    /// The number of finished steps, summed over the workers; in sync mode, the number of committed steps.
    pub steps: u64,
    /// The number of samples trained on.
    pub samples: u64,
    /// The time at which the checkpoint was begun, in seconds since 1970-01-01 00:00 UTC.
    pub began: u64,
    /// The variables, sorted by name. The variable number in a block id is an index into this list.
    pub variables: Vec<SavedVariable>,
    /// The tables, sorted by name. Their numbers in block ids follow those of the variables.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tables: Vec<TableSpec>,
    /// The number of elements in each block but the last of a variable.
    pub block_elements: u64,
    /// Formats 1 and 2: the number of slots that each variable has. Since format 3, each variable has a number of its
    /// own. `None` once the manifest is read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slots: Option<u32>,
    /// The number of shards that have written the checkpoint.
    pub shards: u32,
    /// The checkpoint's files, and those of earlier checkpoints that it builds on.
    pub files: Vec<FileEntry>,
    /// The progress of the training, for the coordinator.
    pub progress: serde_json::Value,
    /// SHA-256 of this manifest's text as it is with this field empty, in hexadecimal. In all formats
    /// it is the last field and stands on a line of its own, so that any program can check it.
    pub checksum: String,
}

/// A variable.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedVariable {
    /// The variable's name, as in the model.
    pub name: String,
    /// Elements along each dimension, outermost first.
    pub shape: Vec<u64>,
    /// The way in which the variable changes. Formats 1 and 2 have only trained variables.
    #[serde(default)]
    pub kind: VariableKind,
    /// The number of arrays that the variable's optimizer keeps beside the weights of each block.
    #[serde(default)]
    pub slots: u32,
}

/// A file of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// The file's name within the checkpoint.
    pub name: String,
    /// The file's size in bytes.
    pub bytes: u64,
    /// SHA-256 of the file's content, in hexadecimal.
    pub sha256: String,
    /// The blocks in the file.
    pub blocks: Vec<BlockRange>,
    /// Those of the blocks that are incomplete: buckets of which the file has only the rows that have changed since an
    /// earlier checkpoint.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub changes: Vec<BlockRange>,
    /// The number of the earlier checkpoint that stores the file; `None` for a file in the checkpoint's own folder.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<u64>,
}

/// Consecutive blocks of a variable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BlockRange {
    /// The variable's number.
    pub variable: u32,
    /// The index of the first block.
    pub first: u32,
    /// The index of the last block, which is included.
    pub last: u32,
}

/// The text of a manifest before its checksum, and after it.
const BEFORE_CHECKSUM: &[u8] = b"\n  \"checksum\": \"";
const AFTER_CHECKSUM: &[u8] = b"\"\n}\n";
/// The number of digits of a SHA-256 in hexadecimal.
const DIGITS: usize = 64;

/// The one field that all formats have.
#[derive(Deserialize)]
struct AnyFormat {
    format: u64,
}

impl Manifest {
    /// Encodes the manifest as a file, with its checksum, in the newest format.
    ///
    /// # Errors
    /// [`CheckpointError::Damaged`] if it would be refused when read.
    pub fn to_bytes(&self) -> Result<Bytes, CheckpointError> {
        let refused = |reason| CheckpointError::damaged("the manifest to be written", reason);
        self.check().map_err(refused)?;
        let empty = Self {
            format: FORMAT,
            checksum: String::new(),
            ..self.clone()
        };
        let mut text =
            serde_json::to_vec_pretty(&empty).map_err(|error| refused(error.to_string()))?;
        text.push(b'\n');
        let checksum = sha256(&text);
        let place = text.len() - AFTER_CHECKSUM.len();
        text.splice(place..place, checksum.into_bytes());
        Ok(text.into())
    }

    /// Reads a manifest that [`to_bytes`](Self::to_bytes) has made; `what` names it in errors. Any
    /// bytes may be given.
    ///
    /// # Errors
    /// [`CheckpointError::Damaged`] if the text is not as it was written, or if the files do not have each block once;
    /// [`CheckpointError::Newer`] if a newer release has written it.
    pub fn read(bytes: &[u8], what: &str) -> Result<Self, CheckpointError> {
        check_sum(bytes).map_err(|reason| CheckpointError::damaged(what, reason))?;
        Self::parse(bytes, what)
    }

    /// Reads a manifest as [`read`](Self::read) does, without verifying the checksum.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn parse(bytes: &[u8], what: &str) -> Result<Self, CheckpointError> {
        let wrong = |error: serde_json::Error| CheckpointError::damaged(what, error.to_string());
        // The fields of a newer format are no damage, so its number is checked first.
        let AnyFormat { format } = serde_json::from_slice(bytes).map_err(wrong)?;
        if format > u64::from(FORMAT) {
            return Err(CheckpointError::Newer {
                file: what.to_owned(),
                format,
            });
        }
        let mut manifest: Self = serde_json::from_slice(bytes).map_err(wrong)?;
        match (manifest.slots.take(), manifest.format) {
            (Some(slots), ..FORMAT_OF_OWN_SLOTS) => {
                for variable in &mut manifest.variables {
                    variable.slots = slots;
                }
            }
            (None, FORMAT_OF_OWN_SLOTS..) => {}
            (slots, format) => {
                let why = format!("slots is {slots:?} in format {format}");
                return Err(CheckpointError::damaged(what, why));
            }
        }
        manifest
            .check()
            .map_err(|reason| CheckpointError::damaged(what, reason))?;
        Ok(manifest)
    }

    /// Returns the number of elements of a block; `None` if there is no such block.
    pub fn elements(&self, id: BlockId) -> Option<u64> {
        let variable = self.variables.get(id.variable as usize)?;
        let start = u64::from(id.index).checked_mul(self.block_elements)?;
        match variable.elements().checked_sub(start)? {
            0 => None,
            rest => Some(rest.min(self.block_elements)),
        }
    }

    /// Returns whether the checkpoint has tables.
    pub fn has_tables(&self) -> bool {
        !self.tables.is_empty()
    }

    /// Returns whether blocks with this variable's number are buckets of a table.
    pub fn is_table(&self, variable: u32) -> bool {
        let variables = self.variables.len();
        (variables..variables + self.tables.len()).contains(&(variable as usize))
    }

    /// Returns the size of all files in bytes, including those in the folders of earlier checkpoints.
    pub fn bytes(&self) -> u64 {
        sum_of_bytes(self.files.iter())
    }

    /// Returns the size in bytes of the files in the checkpoint's own folder.
    pub fn own_bytes(&self) -> u64 {
        sum_of_bytes(self.own_files())
    }

    /// Checks that the manifest is consistent in itself.
    fn check(&self) -> Result<(), String> {
        if self.block_elements == 0 {
            return Err("block_elements is 0".to_owned());
        }
        for (i, variable) in self.variables.iter().enumerate() {
            let name = &variable.name;
            if i > 0 && self.variables[i - 1].name >= *name {
                return Err(format!("variable {name:?} is not in the order of names"));
            }
            // Weights and slots together have to fit into memory's address range.
            let arrays = u64::from(variable.slots) + 1;
            let bytes = variable
                .shape
                .iter()
                .try_fold(arrays * size_of::<f32>() as u64, |n, d| n.checked_mul(*d));
            let blocks = variable.elements().div_ceil(self.block_elements);
            if !matches!(bytes, Some(1..)) || blocks > u64::from(u32::MAX) {
                return Err(format!(
                    "variable {name:?} of shape {:?} is empty or too large",
                    variable.shape
                ));
            }
        }
        for (i, table) in self.tables.iter().enumerate() {
            table.check().map_err(|refusal| refusal.message)?;
            if i > 0 && self.tables[i - 1].name >= table.name {
                return Err(format!(
                    "table {:?} is not in the order of names",
                    table.name
                ));
            }
        }
        self.check_files()
    }
}

fn sum_of_bytes<'a>(mut files: impl Iterator<Item = &'a FileEntry>) -> u64 {
    files
        .try_fold(0u64, |sum, file| sum.checked_add(file.bytes))
        .unwrap_or(u64::MAX)
}

impl SavedVariable {
    /// Returns the entry of a variable with this number of slots.
    pub fn new(spec: &VariableSpec, slots: usize) -> Self {
        Self {
            name: spec.name.clone(),
            shape: spec.shape.iter().map(|size| *size as u64).collect(),
            kind: spec.kind,
            slots: slots as u32,
        }
    }

    /// Returns the number of elements.
    pub fn elements(&self) -> u64 {
        self.shape
            .iter()
            .fold(1, |product, size| product.saturating_mul(*size))
    }
}

impl From<&SavedVariable> for VariableSpec {
    fn from(variable: &SavedVariable) -> Self {
        Self {
            name: variable.name.clone(),
            shape: variable.shape.iter().map(|size| *size as usize).collect(),
            kind: variable.kind,
        }
    }
}

impl FileEntry {
    /// Returns the entry of a file with this content and these blocks.
    pub fn new(name: &str, content: &Bytes, blocks: impl IntoIterator<Item = BlockId>) -> Self {
        Self {
            name: name.to_owned(),
            bytes: content.len() as u64,
            sha256: sha256(content),
            blocks: ranges(blocks),
            changes: Vec::new(),
            checkpoint: None,
        }
    }

    /// Checks that this is the file's content.
    pub(crate) fn check(&self, content: &[u8]) -> Result<(), String> {
        let length = content.len() as u64;
        if length < self.bytes {
            return Err(format!("truncated: {length} of {} bytes", self.bytes));
        }
        if length > self.bytes {
            return Err(format!("altered: {length} bytes instead of {}", self.bytes));
        }
        if sha256(content) != self.sha256 {
            return Err("altered: its checksum is another".to_owned());
        }
        Ok(())
    }
}

impl BlockRange {
    /// Returns the id of the first block.
    fn first_id(self) -> BlockId {
        BlockId {
            variable: self.variable,
            index: self.first,
        }
    }

    /// Returns the id of the last block, or of the first block if the range is reversed.
    fn last_id(self) -> BlockId {
        BlockId {
            variable: self.variable,
            index: self.last.max(self.first),
        }
    }

    /// Returns the ids of the blocks in the range.
    pub fn ids(self) -> impl Iterator<Item = BlockId> {
        let variable = self.variable;
        (self.first..=self.last).map(move |index| BlockId { variable, index })
    }
}

/// Returns blocks as sorted ranges. A block that is given twice makes a range of its own.
pub(crate) fn ranges(blocks: impl IntoIterator<Item = BlockId>) -> Vec<BlockRange> {
    let mut blocks: Vec<BlockId> = blocks.into_iter().collect();
    blocks.sort_unstable();
    let mut ranges: Vec<BlockRange> = Vec::new();
    for BlockId { variable, index } in blocks {
        match ranges.last_mut() {
            Some(range)
                if range.variable == variable && range.last.checked_add(1) == Some(index) =>
            {
                range.last = index;
            }
            _ => ranges.push(BlockRange {
                variable,
                first: index,
                last: index,
            }),
        }
    }
    ranges
}

/// Returns whether a file of a checkpoint may have this name: a plain name that leads nowhere else.
pub(crate) fn is_file_name(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    !name.is_empty() && name.len() <= 200 && name.chars().all(plain) && !name.starts_with('.')
}

/// Returns whether a manifest's text matches the checksum in it.
fn check_sum(text: &[u8]) -> Result<(), String> {
    let truncated = || {
        format!(
            "truncated: {} bytes, the checksum not among them",
            text.len()
        )
    };
    let rest = text.strip_suffix(AFTER_CHECKSUM).ok_or_else(truncated)?;
    let (rest, checksum) = rest.split_last_chunk::<DIGITS>().ok_or_else(truncated)?;
    if !rest.ends_with(BEFORE_CHECKSUM) {
        return Err(truncated());
    }
    let mut hash = Sha256::new();
    hash.update(rest);
    hash.update(AFTER_CHECKSUM);
    if hexadecimal(&hash.finalize()).as_bytes() == checksum {
        Ok(())
    } else {
        Err("altered: its checksum is another".to_owned())
    }
}

/// Returns the SHA-256 of bytes, in hexadecimal.
pub fn sha256(bytes: &[u8]) -> String {
    hexadecimal(&Sha256::digest(bytes))
}

/// Returns bytes as lower-case hexadecimal digits.
pub fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests;
