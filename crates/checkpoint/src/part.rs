//! Blocks to safetensors and back. Pure: no files, no clock, no threads.
//!
//! Each block has a tensor of its weights, named `variable.index`, and, if the optimizer keeps slots, a tensor
//! of them, named `variable.index.slots`, with a row for each slot. The header's metadata has all other data of the
//! blocks as JSON, under the key `flambeau`.

use std::collections::BTreeMap;
use std::fmt::Write;

use bytes::Bytes;
use serde::Deserialize;
use shared_proto::blocks::BlockId;
use shared_proto::ids::{Clock, Generation, Role, Sequence, Task, TaskId, Version};
use shared_proto::planted;

use crate::error::CheckpointError;
use crate::manifest::{FORMAT, Manifest};

/// The last message that a block has taken from a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// The worker, in one of its generations.
    pub task: Task,
    /// The number of the message.
    pub sequence: Sequence,
    /// The number of the message that the block took before this one; 0 if there is none.
    pub before: Sequence,
    /// The worker's clock in the message.
    pub clock: Clock,
    /// The version of the block that the message made.
    pub version: Version,
    /// The number of messages that the block has taken from the worker in this generation.
    pub taken: u64,
}

/// A block as it is saved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavedBlock {
    /// The block's id.
    pub id: BlockId,
    /// Its version.
    pub version: Version,
    /// The last message taken from each worker, so that none is applied twice after a restore.
    pub marks: Vec<Mark>,
    /// Its weights, as little-endian `f32`.
    pub weights: Bytes,
    /// The optimizer's slots: arrays of the weights' length, one after the other.
    pub slots: Bytes,
}

/// The length of a header's length.
const LENGTH: usize = size_of::<u64>();
/// The largest header that safetensors allows.
const MAX_HEADER: u64 = 100_000_000;
/// The key of Flambeau's metadata in the header.
const KEY: &str = "flambeau";

/// A tensor in a header.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Tensor {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

#[derive(Debug, Deserialize)]
struct Header {
    #[serde(rename = "__metadata__", default)]
    metadata: BTreeMap<String, String>,
    #[serde(flatten)]
    tensors: BTreeMap<String, Tensor>,
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
    slots: u32,
    blocks: Vec<ContentsBlock>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ContentsBlock {
    variable: u32,
    index: u32,
    version: u64,
    marks: Vec<ContentsMark>,
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

/// Encodes blocks as one safetensors file. The same blocks always give the same bytes.
///
/// `slots` is the number of arrays that each block has beside its weights. A block with another
/// number makes a file that [`decode`] refuses.
pub fn encode(blocks: &[SavedBlock], slots: u32) -> Bytes {
    let contents = contents(blocks, slots);
    let mut header = HeaderText::new(Some(&contents));
    for block in blocks {
        let elements = (block.weights.len() / size_of::<f32>()) as u64;
        let name = name(block.id);
        header.tensor(&name, &[elements], block.weights.len() as u64);
        if slots > 0 {
            let shape = [u64::from(slots), elements];
            header.tensor(&format!("{name}.slots"), &shape, block.slots.len() as u64);
        }
    }
    let data = header.offset;
    let mut file = header.finish();
    file.reserve_exact(data as usize);
    for block in blocks {
        file.extend_from_slice(&block.weights);
        if slots > 0 {
            file.extend_from_slice(&block.slots);
        }
    }
    file.into()
}

/// Returns the beginning of a safetensors file that has the variables alone, under their own names and
/// shapes, like a run's `model.safetensors`. The weights follow it in the manifest's order.
pub fn weights_header(manifest: &Manifest) -> Bytes {
    let mut header = HeaderText::new(None);
    for variable in &manifest.variables {
        let bytes = variable.elements() * size_of::<f32>() as u64;
        header.tensor(&variable.name, &variable.shape, bytes);
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
        blocks.push(take(&mut tensors, &data, block, contents.slots).map_err(damaged)?);
    }
    match tensors.keys().next() {
        Some(name) => Err(damaged(format!("its tensor {name:?} is of no block"))),
        None => Ok(blocks),
    }
}

/// Splits a safetensors file into header and data.
fn split(bytes: &Bytes) -> Result<(Header, Bytes), String> {
    let truncated = || format!("truncated: {} bytes, the header not whole", bytes.len());
    let length = bytes.first_chunk::<LENGTH>().ok_or_else(truncated)?;
    let length = u64::from_le_bytes(*length);
    if length > MAX_HEADER {
        return Err(format!(
            "a header of {length} bytes; at most {MAX_HEADER} are allowed"
        ));
    }
    let end = LENGTH + length as usize;
    let header = bytes.get(LENGTH..end).ok_or_else(truncated)?;
    let header =
        serde_json::from_slice(header).map_err(|error| format!("its header is wrong: {error}"))?;
    Ok((header, bytes.slice(end..)))
}

/// Checks that the tensors are `f32` and fill the data without gaps.
fn check_offsets(tensors: &BTreeMap<String, Tensor>, length: u64) -> Result<(), String> {
    let mut sorted: Vec<(&String, &Tensor)> = tensors.iter().collect();
    sorted.sort_by_key(|(_, tensor)| tensor.data_offsets);
    let mut filled = 0;
    for (name, tensor) in sorted {
        let (start, end) = tensor.data_offsets;
        if start != filled || end < start {
            return Err(format!(
                "its tensor {name:?} lies at {start} to {end}; {filled} was expected as the start"
            ));
        }
        if end > length {
            return Err(format!(
                "truncated: its tensor {name:?} ends at {end} of {length} bytes"
            ));
        }
        let bytes = tensor
            .shape
            .iter()
            .try_fold(size_of::<f32>() as u64, |n, d| n.checked_mul(*d));
        if tensor.dtype != "F32" || bytes != Some(end - start) {
            return Err(format!(
                "its tensor {name:?} is {} of shape {:?} in {} bytes",
                tensor.dtype,
                tensor.shape,
                end - start
            ));
        }
        filled = end;
    }
    if filled == length {
        Ok(())
    } else {
        Err(format!("{} bytes belong to no tensor", length - filled))
    }
}

/// Takes a block's tensors. They have been checked to lie within the data.
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
    let name = name(id);
    let mut slice = |name: &str| {
        let tensor = tensors
            .remove(name)
            .ok_or_else(|| format!("its tensor {name:?} is missing or named twice"))?;
        let (start, end) = tensor.data_offsets;
        Ok::<_, String>((tensor.shape, data.slice(start as usize..end as usize)))
    };
    let (shape, weights) = slice(&name)?;
    let &[elements] = shape.as_slice() else {
        return Err(format!("its tensor {name:?} has shape {shape:?}"));
    };
    let slots = if slots == 0 {
        Bytes::new()
    } else {
        let name = format!("{name}.slots");
        let (shape, bytes) = slice(&name)?;
        if shape != [u64::from(slots), elements] {
            return Err(format!(
                "its tensor {name:?} has shape {shape:?}; expected [{slots}, {elements}]"
            ));
        }
        bytes
    };
    Ok(SavedBlock {
        id,
        version: Version(block.version),
        marks: block.marks.into_iter().map(Mark::from).collect(),
        weights,
        slots,
    })
}

fn name(id: BlockId) -> String {
    format!("{}.{}", id.variable, id.index)
}

/// Returns the JSON text about the blocks. It has digits and plain words alone, so nothing is escaped.
/// It is written by hand because the order in a map of `serde_json` depends on a feature.
fn contents(blocks: &[SavedBlock], slots: u32) -> String {
    let mark = |m: &Mark| {
        let Task { id, generation } = m.task;
        format!(
            r#"{{"role":"{}","index":{},"generation":{generation},"sequence":{},"clock":{},"version":{},"taken":{},"before":{}}}"#,
            id.role, id.index, m.sequence, m.clock, m.version, m.taken, m.before
        )
    };
    let block = |b: &SavedBlock| {
        let marks = b.marks.iter();
        let marks = marks.filter(|_| !planted!(MarksNotSaved));
        let marks: Vec<String> = marks.map(mark).collect();
        format!(
            r#"{{"variable":{},"index":{},"version":{},"marks":[{}]}}"#,
            b.id.variable,
            b.id.index,
            b.version,
            marks.join(",")
        )
    };
    let blocks: Vec<String> = blocks.iter().map(block).collect();
    format!(
        r#"{{"format":{FORMAT},"slots":{slots},"blocks":[{}]}}"#,
        blocks.join(",")
    )
}

/// A safetensors header being written.
struct HeaderText {
    text: String,
    /// The offset at which the next tensor begins.
    offset: u64,
}

impl HeaderText {
    fn new(contents: Option<&str>) -> Self {
        let text = match contents {
            Some(contents) => format!(r#"{{"__metadata__":{{"{KEY}":{}}}"#, quoted(contents)),
            None => "{".to_owned(),
        };
        Self { text, offset: 0 }
    }

    fn tensor(&mut self, name: &str, shape: &[u64], bytes: u64) {
        let comma = if self.text.len() > 1 { "," } else { "" };
        let shape: Vec<String> = shape.iter().map(u64::to_string).collect();
        let end = self.offset + bytes;
        // Writing to a string cannot fail.
        let _ = write!(
            self.text,
            r#"{comma}{}:{{"dtype":"F32","shape":[{}],"data_offsets":[{},{end}]}}"#,
            quoted(name),
            shape.join(","),
            self.offset
        );
        self.offset = end;
    }

    /// Returns the header after its length, padded so that the data is aligned.
    fn finish(mut self) -> Vec<u8> {
        self.text.push('}');
        let length = self.text.len().next_multiple_of(LENGTH);
        let mut file = (length as u64).to_le_bytes().to_vec();
        file.extend_from_slice(self.text.as_bytes());
        file.resize(LENGTH + length, b' ');
        file
    }
}

/// Quotes a text as a JSON string.
fn quoted(text: &str) -> serde_json::Value {
    text.into()
}

impl From<ContentsMark> for Mark {
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
