//! The tensors of a block: their names, types and shapes.

use std::collections::BTreeMap;

use bytes::Bytes;
use shared_proto::table::{Changes, SavedRows};

use super::container::{F32, Tensor, U8, U32, U64};
use super::{ContentsRows, SavedBlock, SavedValues};

/// The ends of the names of a block's tensors.
const SLOTS: &str = ".slots";
const IDS: &str = ".ids";
const HISTORY: &str = ".history";
const COUNTS: &str = ".counts";
const REMOVED: &str = ".removed";

/// A tensor to be written.
pub(super) struct TensorOf<'a> {
    /// The end of the tensor's name, after the name of the block.
    pub(super) suffix: &'static str,
    pub(super) dtype: &'static str,
    pub(super) shape: Vec<u64>,
    pub(super) bytes: &'a Bytes,
}

/// Returns the tensors of a block.
pub(super) fn tensors_of(block: &SavedBlock) -> Vec<TensorOf<'_>> {
    let tensor = |suffix, dtype, shape: &[u64], bytes| TensorOf {
        suffix,
        dtype,
        shape: shape.to_vec(),
        bytes,
    };
    let mut tensors = Vec::new();
    match &block.values {
        SavedValues::Dense { weights, slots } => {
            let elements = (weights.len() / size_of::<f32>()) as u64;
            tensors.push(tensor("", F32, &[elements], weights));
            let count = slots_of(block);
            if count > 0 {
                tensors.push(tensor(SLOTS, F32, &[count, elements], slots));
            }
        }
        SavedValues::Rows(rows) => {
            let count = (rows.ids.len() / size_of::<u64>()) as u64;
            let numbers = (rows.numbers.len() / size_of::<f32>()) as u64;
            let width = numbers.checked_div(count).unwrap_or(0);
            tensors.push(tensor("", F32, &[count, width], &rows.numbers));
            tensors.push(tensor(IDS, U64, &[count], &rows.ids));
            if let Some(changes) = &rows.changes {
                let removed = (changes.removed.len() / size_of::<u64>()) as u64;
                tensors.push(tensor(REMOVED, U64, &[removed], &changes.removed));
            }
            if !rows.history.is_empty() {
                tensors.push(tensor(HISTORY, U32, &[count, 2], &rows.history));
            }
            if !rows.counts.is_empty() {
                tensors.push(tensor(
                    COUNTS,
                    U8,
                    &[rows.counts.len() as u64],
                    &rows.counts,
                ));
            }
        }
    }
    tensors
}

/// Returns the number of slots of a block: arrays beside its weights.
pub(super) fn slots_of(block: &SavedBlock) -> u64 {
    match &block.values {
        SavedValues::Dense { weights, slots } => (slots.len() / weights.len().max(1)) as u64,
        SavedValues::Rows(_) => 0,
    }
}

/// Takes the tensors of a dense block: its weights and its slots.
pub(super) fn take_dense(
    tensors: &mut BTreeMap<String, Tensor>,
    data: &Bytes,
    name: &str,
    slots: u32,
) -> Result<SavedValues, String> {
    let (shape, weights) = take_tensor(tensors, data, name, F32)?;
    let &[elements] = shape.as_slice() else {
        return Err(format!("its tensor {name:?} has shape {shape:?}"));
    };
    let slots = if slots == 0 {
        Bytes::new()
    } else {
        let name = format!("{name}{SLOTS}");
        let (shape, bytes) = take_tensor(tensors, data, &name, F32)?;
        if shape != [u64::from(slots), elements] {
            return Err(format!(
                "its tensor {name:?} has shape {shape:?}; expected [{slots}, {elements}]"
            ));
        }
        bytes
    };
    Ok(SavedValues::Dense { weights, slots })
}

/// Takes the tensors of a bucket of a table.
pub(super) fn take_rows(
    tensors: &mut BTreeMap<String, Tensor>,
    data: &Bytes,
    name: &str,
    contents: &ContentsRows,
) -> Result<SavedRows, String> {
    let (shape, numbers) = take_tensor(tensors, data, name, F32)?;
    let (ids_shape, ids) = take_tensor(tensors, data, &format!("{name}{IDS}"), U64)?;
    let (&[count, _], &[ids_count]) = (shape.as_slice(), ids_shape.as_slice()) else {
        return Err(format!(
            "its tensor {name:?} has shape {shape:?}, and that of its ids {ids_shape:?}"
        ));
    };
    if count != ids_count {
        return Err(format!(
            "its tensor {name:?} has {count} rows, but {ids_count} ids"
        ));
    }
    let history = format!("{name}{HISTORY}");
    let history = match tensors.contains_key(&history) {
        true => {
            let (shape, bytes) = take_tensor(tensors, data, &history, U32)?;
            if shape != [count, 2] {
                return Err(format!(
                    "its tensor {history:?} has shape {shape:?}; expected [{count}, 2]"
                ));
            }
            bytes
        }
        false => Bytes::new(),
    };
    let counts = format!("{name}{COUNTS}");
    let counts = match tensors.contains_key(&counts) {
        true => take_tensor(tensors, data, &counts, U8)?.1,
        false => Bytes::new(),
    };
    let changes = match contents.since {
        Some(since) => {
            let (_, removed) = take_tensor(tensors, data, &format!("{name}{REMOVED}"), U64)?;
            Some(Changes { since, removed })
        }
        None => None,
    };
    Ok(SavedRows {
        ids,
        history,
        numbers,
        counts,
        updates: contents.updates,
        time: contents.time,
        changes,
    })
}

/// Takes a tensor of this type. Returns its shape and its bytes.
fn take_tensor(
    tensors: &mut BTreeMap<String, Tensor>,
    data: &Bytes,
    name: &str,
    dtype: &str,
) -> Result<(Vec<u64>, Bytes), String> {
    let tensor = tensors
        .remove(name)
        .ok_or_else(|| format!("its tensor {name:?} is missing or named twice"))?;
    if tensor.dtype != dtype {
        return Err(format!(
            "its tensor {name:?} is {}; {dtype} was expected",
            tensor.dtype
        ));
    }
    let (start, end) = tensor.data_offsets;
    Ok((tensor.shape, data.slice(start as usize..end as usize)))
}
