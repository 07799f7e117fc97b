//! The container of a part: safetensors, tensors after a header of JSON.

use std::collections::BTreeMap;
use std::fmt::Write;

use bytes::Bytes;
use serde::Deserialize;

/// The number of bytes that hold the length of the header.
const LENGTH: usize = size_of::<u64>();
/// The largest header that safetensors allows.
const MAX_HEADER: u64 = 100_000_000;
/// The key of Flambeau's metadata in the header.
pub(super) const KEY: &str = "flambeau";

/// The types of elements, as safetensors names them.
pub(super) const F32: &str = "F32";
pub(super) const U64: &str = "U64";
pub(super) const U32: &str = "U32";
pub(super) const U8: &str = "U8";

/// Returns the number of bytes of an element, or `None` if no part has this type.
fn element_bytes(dtype: &str) -> Option<u64> {
    match dtype {
        U8 => Some(1),
        F32 | U32 => Some(4),
        U64 => Some(8),
        _ => None,
    }
}

/// A tensor in a header.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Tensor {
    pub(super) dtype: String,
    pub(super) shape: Vec<u64>,
    pub(super) data_offsets: (u64, u64),
}

#[derive(Debug, Deserialize)]
pub(super) struct Header {
    #[serde(rename = "__metadata__", default)]
    pub(super) metadata: BTreeMap<String, String>,
    #[serde(flatten)]
    pub(super) tensors: BTreeMap<String, Tensor>,
}

/// Splits a safetensors file into header and data.
pub(super) fn split(bytes: &Bytes) -> Result<(Header, Bytes), String> {
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

/// Checks that the tensors are of known types and fill the data without gaps.
pub(super) fn check_offsets(tensors: &BTreeMap<String, Tensor>, length: u64) -> Result<(), String> {
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
        let mut shape = tensor.shape.iter();
        let bytes = element_bytes(&tensor.dtype)
            .and_then(|size| shape.try_fold(size, |n, d| n.checked_mul(*d)));
        if bytes != Some(end - start) {
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

/// A safetensors header being written.
pub(super) struct HeaderText {
    text: String,
    /// The offset at which the next tensor begins.
    pub(super) offset: u64,
}

impl HeaderText {
    pub(super) fn new(contents: Option<&str>) -> Self {
        let text = match contents {
            Some(contents) => format!(r#"{{"__metadata__":{{"{KEY}":{}}}"#, quoted(contents)),
            None => "{".to_owned(),
        };
        Self { text, offset: 0 }
    }

    pub(super) fn tensor(&mut self, name: &str, dtype: &str, shape: &[u64], bytes: u64) {
        let comma = if self.text.len() > 1 { "," } else { "" };
        let shape: Vec<String> = shape.iter().map(u64::to_string).collect();
        let end = self.offset + bytes;
        // Writing to a string cannot fail.
        let _ = write!(
            self.text,
            r#"{comma}{}:{{"dtype":"{dtype}","shape":[{}],"data_offsets":[{},{end}]}}"#,
            quoted(name),
            shape.join(","),
            self.offset
        );
        self.offset = end;
    }

    /// Returns the length of the header, followed by the header, padded so that the data is aligned.
    pub(super) fn finish(mut self) -> Vec<u8> {
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
