//! The fuzzer's first inputs, replayed.

use std::path::Path;

use bytes::Bytes;

use super::{files, manifest};
use crate::manifest::Manifest;
use crate::part::{decode, encode};

const CORPUS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fuzz/corpus/decode");

#[test]
fn the_corpus_is_decoded_or_refused() {
    let (mut parts, mut manifests, mut refused) = (0, 0, 0);
    for entry in std::fs::read_dir(Path::new(CORPUS)).unwrap() {
        let bytes = Bytes::from(std::fs::read(entry.unwrap().path()).unwrap());
        let manifest = Manifest::parse(&bytes, "corpus");
        let _ = Manifest::read(&bytes, "corpus");
        match (decode(&bytes, "corpus"), manifest) {
            (Ok(blocks), _) => {
                parts += 1;
                let first = blocks.iter().find(|block| !block.weights.is_empty());
                let slots = first.map_or(0, |b| (b.slots.len() / b.weights.len()) as u32);
                let again = decode(&encode(&blocks, slots), "again").unwrap();
                assert_eq!(again, blocks);
            }
            (_, Ok(_)) => manifests += 1,
            _ => refused += 1,
        }
    }
    assert!(
        parts >= 2 && manifests >= 1 && refused >= 4,
        "{parts} {manifests} {refused}"
    );
}

#[test]
#[ignore = "writes the corpus anew"]
fn write_the_corpus() {
    let write = |name: &str, content: &[u8]| {
        std::fs::create_dir_all(CORPUS).unwrap();
        std::fs::write(Path::new(CORPUS).join(name), content).unwrap();
    };
    let part = |slots| encode(&files(slots, 1)[0].1, slots);
    write("part-without-slots", &part(0));
    write("part-with-slots", &part(2));
    write("part-truncated", &part(1)[..200]);
    let mut altered = part(1).to_vec();
    altered[0] = 0xff;
    write("part-with-long-header", &altered);
    let text = String::from_utf8_lossy(&part(1)).replace("[0,12]", "[8,20]");
    write("part-with-gap", text.as_bytes());
    let whole = manifest(12, 2, 5).to_bytes().unwrap();
    write("manifest", &whole);
    write("manifest-truncated", &whole[..whole.len() / 2]);
    let mut without_file = manifest(12, 2, 5);
    without_file.files.pop();
    write(
        "manifest-without-file",
        &serde_json::to_vec(&without_file).unwrap(),
    );
    // Sizes whose sum does not fit into 64 bits.
    let tensor = |i: u64| {
        let (start, end) = (i << 60, (i + 1) << 60);
        format!(
            r#","0.{i}":{{"dtype":"F32","shape":[{}],"data_offsets":[{start},{end}]}}"#,
            1u64 << 58
        )
    };
    let tensors: String = (0..15).map(tensor).collect();
    let header = format!(r#"{{"__metadata__":{{"flambeau":"{{}}"}}{tensors}}}"#);
    let length = (header.len() as u64).to_le_bytes();
    write(
        "part-of-huge-tensors",
        &[&length, header.as_bytes()].concat(),
    );
    write("empty", &[]);
}
