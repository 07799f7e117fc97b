//! Any bytes as a file of a checkpoint, and as its manifest: decoded or refused, never a panic.
//! `cargo +nightly fuzz run decode` in `crates/checkpoint`.

#![no_main]

use bytes::Bytes;
use checkpoint::{Manifest, decode, encode};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let file = Bytes::copy_from_slice(bytes);
    if let Ok(blocks) = decode(&file, "fuzzed") {
        let with_slots = blocks.iter().find(|block| !block.weights.is_empty());
        // Blocks without elements do not tell how many slots there are.
        if let Some(block) = with_slots {
            let slots = (block.slots.len() / block.weights.len()) as u32;
            let again = decode(&encode(&blocks, slots), "again").expect("what was encoded");
            assert_eq!(again, blocks);
        }
    }
    // With its checksum few inputs would go any further.
    let _ = Manifest::read(bytes, "fuzzed");
    if let Ok(manifest) = Manifest::parse(bytes, "fuzzed") {
        let written = manifest.to_bytes().expect("it was accepted");
        Manifest::read(&written, "again").expect("what was written");
    }
});
