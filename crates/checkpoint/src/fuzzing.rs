//! The driver of the fuzz target `decode` for checkpoints.

use bytes::Bytes;

use crate::manifest::Manifest;
use crate::part::{decode as decode_part, encode};

/// The kind of checkpoint file that the bytes represent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum File {
    /// Blocks.
    Part,
    /// A manifest.
    Manifest,
    /// Neither.
    Refused,
}

/// Decodes bytes as a file of a checkpoint. Checks that a decoded file can be encoded and decoded again.
pub fn decode(bytes: &[u8]) -> File {
    if let Ok(blocks) = decode_part(&Bytes::copy_from_slice(bytes), "fuzzed") {
        let again = decode_part(&encode(&blocks), "again");
        assert_eq!(again.expect("what was encoded"), blocks);
        return File::Part;
    }
    // With its checksum few inputs would go any further.
    let _ = Manifest::read(bytes, "fuzzed");
    let Ok(manifest) = Manifest::parse(bytes, "fuzzed") else {
        return File::Refused;
    };
    let written = manifest.to_bytes().expect("it was accepted");
    Manifest::read(&written, "again").expect("what was written");
    File::Manifest
}
