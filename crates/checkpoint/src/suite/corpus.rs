//! The inputs of the fuzz target `decode`, replayed and written.

use std::path::Path;

use fuzz_input::replay;

use super::{files, manifest};
use crate::fuzzing::{File, decode};
use crate::part::encode;

const CORPUS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/decode");

#[test]
fn the_corpus_is_decoded_or_refused() {
    let found = std::cell::RefCell::new(Vec::new());
    let files = replay("decode", |bytes| found.borrow_mut().push(decode(bytes)));
    // Those of the corpus come first.
    let found = &found.borrow()[..files];
    let count = |kind| found.iter().filter(|file| **file == kind).count();
    assert!(count(File::Part) >= 2 && count(File::Manifest) >= 1 && count(File::Refused) >= 4);
}

#[test]
#[ignore = "writes the corpus anew"]
fn write_the_corpus() {
    let write = |name: &str, content: &[u8]| {
        std::fs::create_dir_all(CORPUS).unwrap();
        std::fs::write(Path::new(CORPUS).join(name), content).unwrap();
    };
    let part = |slots| encode(&files(slots, 1)[0].1);
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
    // The sum of these sizes does not fit into 64 bits.
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
