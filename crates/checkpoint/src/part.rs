//! Blocks to safetensors and back, and the check that they are those of the manifest. Pure: no files, no clock, no
//! threads.
//!
//! A block of a variable has a tensor of its weights, named `variable.index`. If the optimizer keeps slots, it also has
//! a tensor of them, named `variable.index.slots`, with a row for each slot. A bucket of a table has a tensor of its
//! rows' values and optimizer state, named `variable.index`, and one of their ids, `variable.index.ids`. If the table
//! evicts rows, the bucket also has `variable.index.history`, and if the table counts gradients,
//! `variable.index.counts`. A bucket of which only the changed rows are saved has `variable.index.removed`: the ids of
//! removed rows. The header's metadata has all other data of the blocks as JSON, under the key `flambeau`.

mod container;
mod tensors;

use std::collections::BTreeMap;

use bytes::Bytes;
use serde::Deserialize;
use shared_proto::blocks::BlockId;
use shared_proto::ids::{Clock, Generation, Role, Sequence, Task, TaskId, Version};
use shared_proto::payload;
use shared_proto::planted;
use shared_proto::table::SavedRows;

use container::{F32, HeaderText, KEY, Tensor, check_offsets, split};
use tensors::{slots_of, take_dense, take_rows, tensors_of};

use crate::error::CheckpointError;
use crate::format::FORMAT;
use crate::manifest::{FileEntry, Manifest, ranges};

/// The approximate number of bytes of weights and slots in one file, and so in memory while the file is written.
pub const FILE_BYTES: usize = 16 << 20;

/// A watermark: the last message that a block has taken from a worker, with the number of the one before. By these two,
/// the block recognises messages that are sent again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Watermark {
    /// The worker, in one of its generations.
    pub task: Task,
    /// The number of the message.
    pub sequence: Sequence,
    /// The number of the message that the block took before this one; 0 if there is none.
    pub before: Sequence,
    /// The worker's clock in the message.
    pub clock: Clock,
    /// The version of the block that the message made or, in sync mode, to which the message's gradient was staged.
    pub version: Version,
    /// The number of messages that the block has taken from the worker in this generation.
    pub taken: u64,
}

/// A block as it is saved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavedBlock {
    /// The block's id.
    pub id: BlockId,
    /// The block's version.
    pub version: Version,
    /// The last message taken from each worker, so that none is applied twice after a restore.
    pub watermarks: Vec<Watermark>,
    /// The block's values, with the optimizer's state.
    pub values: SavedValues,
}

/// The values of a block as they are saved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SavedValues {
    /// Consecutive elements of a variable.
    Dense {
        /// The weights, as little-endian `f32`.
        weights: Bytes,
        /// The optimizer's slots: arrays of the weights' length, one after the other.
        slots: Bytes,
    },
    /// The rows of a table's bucket.
    Rows(SavedRows),
}

impl SavedValues {
    /// Returns all values and the optimizer state, as little-endian `f32`.
    pub fn numbers(&self) -> [&Bytes; 2] {
        static NONE: Bytes = Bytes::new();
        match self {
            Self::Dense { weights, slots } => [weights, slots],
            Self::Rows(rows) => [&rows.numbers, &NONE],
        }
    }

    /// Returns whether all values and the optimizer state are finite.
    pub fn all_finite(&self) -> bool {
        let mut numbers = self.numbers().into_iter();
        numbers.all(|numbers| payload::all_finite(payload::elements(numbers)))
    }

    /// Returns whether these are only the rows of a bucket that have changed since an earlier checkpoint.
    pub fn has_changes(&self) -> bool {
        matches!(self, Self::Rows(rows) if rows.changes.is_some())
    }

    /// Returns the weights of a dense block; `None` for rows.
    pub fn weights(&self) -> Option<&Bytes> {
        match self {
            Self::Dense { weights, .. } => Some(weights),
            Self::Rows(_) => None,
        }
    }
}

/// The one field that all formats have.
#[derive(Deserialize)]
struct AnyFormat {
    format: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Contents {
    #[serde(rename = "format")]
    _format: u64,
    /// Formats 1 and 2: the number of slots that each block has.
    slots: Option<u32>,
    blocks: Vec<ContentsBlock>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ContentsBlock {
    variable: u32,
    index: u32,
    version: u64,
    slots: Option<u32>,
    marks: Vec<ContentsMark>,
    /// Only for buckets of tables.
    rows: Option<ContentsRows>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ContentsRows {
    updates: u64,
    time: u32,
    /// The number of the checkpoint since which the rows have changed; `None` if these are all rows.
    since: Option<u64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ContentsMark {
    role: SavedRole,
    index: u32,
    generation: u64,
    sequence: u64,
    clock: u64,
    version: u64,
    #[serde(default)]
    taken: u64,
    #[serde(default)]
    before: u64,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum SavedRole {
    Coordinator,
    Ps,
    Worker,
}

/// Encodes blocks as one safetensors file. The same blocks always give the same bytes. [`decode`] refuses the file if
/// the slots of a block are not a whole number of arrays.
pub fn encode(blocks: &[SavedBlock]) -> Bytes {
    let contents = contents(blocks);
    let mut header = HeaderText::new(Some(&contents));
    for block in blocks {
        let name = name(block.id);
        for tensor in tensors_of(block) {
            let name = format!("{name}{}", tensor.suffix);
            let bytes = tensor.bytes.len() as u64;
            header.tensor(&name, tensor.dtype, &tensor.shape, bytes);
        }
    }
    let data = header.offset;
    let mut file = header.finish();
    file.reserve_exact(data as usize);
    for tensor in blocks.iter().flat_map(tensors_of) {
        file.extend_from_slice(tensor.bytes);
    }
    file.into()
}

impl FileEntry {
    /// Returns the entry of a file with this content, which [`encode`] has made of these blocks.
    pub fn of_blocks(name: &str, content: &Bytes, blocks: &[SavedBlock]) -> Self {
        let changed = blocks.iter().filter(|block| block.values.has_changes());
        Self {
            changes: ranges(changed.map(|block| block.id)),
            ..Self::new(name, content, blocks.iter().map(|block| block.id))
        }
    }
}

/// Returns the beginning of a safetensors file that has only the variables, under their own names and shapes, like a
/// run's `model.safetensors`. The caller must append the weights in the manifest's order.
pub fn weights_header(manifest: &Manifest) -> Bytes {
    let mut header = HeaderText::new(None);
    for variable in &manifest.variables {
        let bytes = variable.elements() * size_of::<f32>() as u64;
        header.tensor(&variable.name, F32, &variable.shape, bytes);
    }
    header.finish().into()
}

/// Decodes a file that [`encode`] has made; `what` names it in errors. Weights and slots share the
/// file's memory. Any bytes may be given: everything in them is checked before it is used.
///
/// # Errors
/// [`CheckpointError::Damaged`] or [`CheckpointError::Newer`].
pub fn decode(bytes: &Bytes, what: &str) -> Result<Vec<SavedBlock>, CheckpointError> {
    let damaged = |reason: String| CheckpointError::damaged(what, reason);
    let (header, data) = split(bytes).map_err(damaged)?;
    let mut tensors = header.tensors;
    check_offsets(&tensors, data.len() as u64).map_err(damaged)?;
    let contents = header
        .metadata
        .get(KEY)
        .ok_or_else(|| damaged(format!("its metadata has no {KEY:?}")))?;
    let wrong = |error| damaged(format!("its metadata is wrong: {error}"));
    let AnyFormat { format } = serde_json::from_str(contents).map_err(wrong)?;
    if format > u64::from(FORMAT) {
        return Err(CheckpointError::Newer {
            file: what.to_owned(),
            format,
        });
    }
    let contents: Contents = serde_json::from_str(contents).map_err(wrong)?;
    let mut blocks = Vec::new();
    for block in contents.blocks {
        let slots = block.slots.or(contents.slots);
        let slots = slots.ok_or_else(|| damaged("a block has no number of slots".to_owned()))?;
        blocks.push(take(&mut tensors, &data, block, slots).map_err(damaged)?);
    }
    match tensors.keys().next() {
        Some(name) => Err(damaged(format!("its tensor {name:?} is of no block"))),
        None => Ok(blocks),
    }
}

/// Checks that a file's blocks are those that its entry names, each of the right size. Does not
/// check that the numbers are finite.
pub(crate) fn check_blocks(
    blocks: &[SavedBlock],
    manifest: &Manifest,
    file: &FileEntry,
) -> Result<(), String> {
    let found = ranges(blocks.iter().map(|block| block.id));
    if found != file.blocks {
        return Err("its blocks are not those that the manifest names".to_owned());
    }
    let changed = blocks.iter().filter(|block| block.values.has_changes());
    if ranges(changed.map(|block| block.id)) != file.changes {
        return Err(
            "the buckets of which it has only changes are not those that the manifest names"
                .to_owned(),
        );
    }
    for block in blocks {
        check_block(block, manifest)?;
    }
    Ok(())
}

/// Checks that a block has the size that the manifest gives it.
fn check_block(block: &SavedBlock, manifest: &Manifest) -> Result<(), String> {
    let BlockId { variable, index } = block.id;
    let (weights, slots) = match (&block.values, manifest.is_table(variable)) {
        (SavedValues::Dense { weights, slots }, false) => (weights, slots),
        (SavedValues::Rows(_), true) => return Ok(()),
        (SavedValues::Dense { .. }, true) => {
            return Err(format!(
                "bucket {index} of table {variable} has dense values"
            ));
        }
        (SavedValues::Rows(_), false) => {
            return Err(format!("block {index} of variable {variable} has rows"));
        }
    };
    let expected = manifest
        .elements(block.id)
        .map(|n| n * size_of::<f32>() as u64);
    if expected != Some(weights.len() as u64) {
        return Err(format!(
            "block {index} of variable {variable} has {} bytes of weights; {} were expected",
            weights.len(),
            expected.unwrap_or_default()
        ));
    }
    let variable_slots = manifest
        .variables
        .get(variable as usize)
        .map_or(0, |v| v.slots);
    let expected = weights.len() as u64 * u64::from(variable_slots);
    if expected != slots.len() as u64 {
        return Err(format!(
            "block {index} of variable {variable} has {} bytes of slots; {expected} were expected",
            slots.len()
        ));
    }
    Ok(())
}

/// Takes a block's tensors. The caller must have checked that they lie within the data.
fn take(
    tensors: &mut BTreeMap<String, Tensor>,
    data: &Bytes,
    block: ContentsBlock,
    slots: u32,
) -> Result<SavedBlock, String> {
    let id = BlockId {
        variable: block.variable,
        index: block.index,
    };
    let watermarks = block.marks.into_iter().map(Watermark::from).collect();
    let values = match block.rows {
        None => take_dense(tensors, data, &name(id), slots)?,
        Some(rows) => SavedValues::Rows(take_rows(tensors, data, &name(id), &rows)?),
    };
    Ok(SavedBlock {
        id,
        version: Version(block.version),
        watermarks,
        values,
    })
}

fn name(id: BlockId) -> String {
    format!("{}.{}", id.variable, id.index)
}

/// Returns the JSON text about the blocks. It has only digits and plain words, so nothing is escaped. It is written by
/// hand because the order in a map of `serde_json` depends on a feature.
fn contents(blocks: &[SavedBlock]) -> String {
    let mark = |m: &Watermark| {
        let Task { id, generation } = m.task;
        format!(
            r#"{{"role":"{}","index":{},"generation":{generation},"sequence":{},"clock":{},"version":{},"taken":{},"before":{}}}"#,
            id.role, id.index, m.sequence, m.clock, m.version, m.taken, m.before
        )
    };
    let block = |b: &SavedBlock| {
        let marks = b.watermarks.iter();
        let marks = marks.filter(|_| !planted!(MarksNotSaved));
        let marks: Vec<String> = marks.map(mark).collect();
        let rows = match &b.values {
            SavedValues::Dense { .. } => String::new(),
            SavedValues::Rows(rows) => {
                let since = rows.changes.as_ref();
                let since = since.map_or(String::new(), |of| format!(r#","since":{}"#, of.since));
                format!(
                    r#","rows":{{"updates":{},"time":{}{since}}}"#,
                    rows.updates, rows.time
                )
            }
        };
        format!(
            r#"{{"variable":{},"index":{},"version":{},"slots":{},"marks":[{}]{rows}}}"#,
            b.id.variable,
            b.id.index,
            b.version,
            slots_of(b),
            marks.join(",")
        )
    };
    let blocks: Vec<String> = blocks.iter().map(block).collect();
    format!(r#"{{"format":{FORMAT},"blocks":[{}]}}"#, blocks.join(","))
}

impl From<ContentsMark> for Watermark {
    fn from(mark: ContentsMark) -> Self {
        let role = match mark.role {
            SavedRole::Coordinator => Role::Coordinator,
            SavedRole::Ps => Role::Ps,
            SavedRole::Worker => Role::Worker,
        };
        Self {
            task: Task {
                id: TaskId {
                    role,
                    index: mark.index,
                },
                generation: Generation(mark.generation),
            },
            sequence: Sequence(mark.sequence),
            clock: Clock(mark.clock),
            version: Version(mark.version),
            taken: mark.taken,
            before: Sequence(mark.before),
        }
    }
}

#[cfg(test)]
mod tests;
