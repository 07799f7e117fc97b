use proptest::prelude::*;
use safetensors::SafeTensors;
use shared_proto::table::Changes;

use super::*;
use crate::suite::{block, manifest};

fn any_bytes(length: usize) -> impl Strategy<Value = Bytes> {
    prop::collection::vec(any::<u8>(), length).prop_map(Bytes::from)
}

fn any_watermark() -> impl Strategy<Value = Watermark> {
    let role = prop_oneof![Just(Role::Coordinator), Just(Role::Ps), Just(Role::Worker)];
    (role, any::<u32>(), any::<[u64; 6]>()).prop_map(|(role, index, [g, s, c, v, t, b])| {
        Watermark {
            task: Task {
                id: TaskId { role, index },
                generation: Generation(g),
            },
            sequence: Sequence(s),
            clock: Clock(c),
            version: Version(v),
            taken: t,
            before: Sequence(b),
        }
    })
}

fn any_dense() -> impl Strategy<Value = SavedValues> {
    (0usize..9, 0usize..=3).prop_flat_map(|(elements, slots)| {
        let both = (any_bytes(4 * elements), any_bytes(4 * elements * slots));
        both.prop_map(|(weights, slots)| SavedValues::Dense { weights, slots })
    })
}

fn any_rows() -> impl Strategy<Value = SavedValues> {
    let sizes = (0usize..9, 1usize..5, any::<bool>(), 0usize..9);
    sizes.prop_flat_map(|(rows, width, history, counts)| {
        let parts = (
            any_bytes(8 * rows),
            any_bytes(4 * width * rows),
            any_bytes(if history { 8 * rows } else { 0 }),
            any_bytes(counts),
            any::<(u64, u32)>(),
            prop::option::of((
                any::<u64>(),
                (0usize..4).prop_flat_map(|rows| any_bytes(8 * rows)),
            )),
        );
        parts.prop_map(
            |(ids, numbers, history, counts, (updates, time), changes)| {
                SavedValues::Rows(SavedRows {
                    ids,
                    history,
                    numbers,
                    counts,
                    updates,
                    time,
                    changes: changes.map(|(since, removed)| Changes { since, removed }),
                })
            },
        )
    })
}

fn any_blocks() -> impl Strategy<Value = Vec<SavedBlock>> {
    let id = (any::<u32>(), any::<u32>());
    prop::collection::btree_set(id, 0..5).prop_flat_map(|ids| {
        ids.into_iter()
            .map(|(variable, index)| {
                let watermarks = prop::collection::vec(any_watermark(), 0..4);
                let values = prop_oneof![any_dense(), any_rows()];
                (watermarks, values, any::<u64>()).prop_map(move |(watermarks, values, version)| {
                    SavedBlock {
                        id: BlockId { variable, index },
                        version: Version(version),
                        watermarks,
                        values,
                    }
                })
            })
            .collect::<Vec<_>>()
    })
}

fn sample() -> Bytes {
    encode(&[block(0, 0, 3, 2, 1), block(3, 1, 2, 2, 7)])
}

/// Returns a file with this header and so many bytes of data.
fn file(header: &str, data: usize) -> Bytes {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.resize(file.len() + data, 0);
    file.into()
}

/// Returns the reason why a file with one block of two elements and this header is refused.
fn refusal(header: &str, data: usize) -> String {
    decode(&file(header, data), "a.safetensors")
        .unwrap_err()
        .to_string()
}

#[test]
fn rows_of_other_shapes_are_refused() {
    let rows = |count: usize| SavedRows {
        ids: vec![1; 8 * count].into(),
        history: vec![2; 8 * count].into(),
        numbers: vec![3; 12 * count].into(),
        counts: vec![4; 5].into(),
        updates: 6,
        time: 7,
        changes: None,
    };
    let mut block = block(0, 0, 3, 2, 1);
    block.values = SavedValues::Rows(rows(2));
    let file = encode(&[block]);
    for (from, to, said) in [
        (
            r#""0.0.ids":{"dtype":"U64","shape":[2]"#,
            r#""0.0.ids":{"dtype":"U64","shape":[2,1]"#,
            "ids [2, 1]",
        ),
        (
            r#""0.0.ids":{"dtype":"U64","shape":[2]"#,
            r#""0.0.ids":{"dtype":"F32","shape":[4]"#,
            "U64 was expected",
        ),
        (
            r#""dtype":"U32","shape":[2,2]"#,
            r#""dtype":"U32","shape":[4,1]"#,
            "expected [2, 2]",
        ),
        (r#""0.0.ids""#, r#""0.0.idz""#, "missing"),
        (
            r#""dtype":"U8","shape":[5]"#,
            r#""dtype":"U9","shape":[5]"#,
            "is U9",
        ),
    ] {
        let mut changed = file.to_vec();
        let mut windows = file.windows(from.len());
        let place = windows.position(|part| part == from.as_bytes()).unwrap();
        changed.splice(place..place + from.len(), to.bytes());
        let grown = to.len() as i64 - from.len() as i64;
        let length = i64::from_le_bytes(*changed.first_chunk().unwrap()) + grown;
        changed[..8].copy_from_slice(&length.to_le_bytes());
        let error = decode(&changed.into(), "a").unwrap_err().to_string();
        assert!(error.contains(said), "{error}");
    }
}

const CONTENTS: &str = r#""__metadata__":{"flambeau":"{\"format\":1,\"slots\":0,\"blocks\":[{\"variable\":0,\"index\":0,\"version\":1,\"marks\":[]}]}"}"#;

proptest! {
    #[test]
    fn what_is_encoded_is_decoded(blocks in any_blocks()) {
        let file = encode(&blocks);
        prop_assert_eq!(&encode(&blocks), &file);
        prop_assert_eq!(decode(&file, "a.safetensors").unwrap(), blocks);
    }

    #[test]
    fn any_bytes_are_decoded_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = decode(&bytes.into(), "a.safetensors");
    }

    #[test]
    fn any_header_is_decoded_or_refused(
        offsets in prop::collection::vec((any::<u64>(), any::<u64>(), any::<u64>()), 1..4),
    ) {
        let tensor = |(i, (start, end, size)): (usize, &(u64, u64, u64))| {
            format!(r#","0.{i}":{{"dtype":"F32","shape":[{size}],"data_offsets":[{start},{end}]}}"#)
        };
        let tensors: String = offsets.iter().enumerate().map(tensor).collect();
        refusal(&format!("{{{CONTENTS}{tensors}}}"), 8);
    }
}

#[test]
fn weights_and_slots_share_the_files_memory() {
    let file = sample();
    let within = |part: &Bytes| file.as_ptr_range().contains(&part.as_ptr());
    for block in decode(&file, "a.safetensors").unwrap() {
        assert!(block.values.numbers().into_iter().all(within));
    }
}

#[test]
fn others_read_it_as_safetensors() {
    let (first, second) = (block(0, 0, 3, 2, 1), block(12, 1, 2, 2, 7));
    let file = encode(&[first.clone(), second.clone()]);
    let tensors = SafeTensors::deserialize(&file).unwrap();
    assert_eq!(tensors.len(), 4);
    for block in [first, second] {
        let [own_weights, own_slots] = block.values.numbers();
        let elements = own_weights.len() / 4;
        let weights = tensors.tensor(&name(block.id)).unwrap();
        assert_eq!(weights.shape(), [elements]);
        assert_eq!(weights.data(), own_weights);
        let slots = tensors
            .tensor(&format!("{}.slots", name(block.id)))
            .unwrap();
        assert_eq!(slots.shape(), [2, elements]);
        assert_eq!(slots.data(), own_slots);
        assert_eq!(slots.dtype(), safetensors::Dtype::F32);
    }
    assert_eq!(u64::from_le_bytes(*file.first_chunk().unwrap()) % 8, 0);
}

#[test]
fn a_models_header_is_that_of_safetensors() {
    use safetensors::tensor::TensorView;
    let manifest = manifest(1, 0, 1);
    let data = [0; 40];
    let views = manifest.variables.iter().map(|variable| {
        let shape: Vec<usize> = variable.shape.iter().map(|size| *size as usize).collect();
        let bytes = &data[..variable.elements() as usize * 4];
        let view = TensorView::new(safetensors::Dtype::F32, shape, bytes).unwrap();
        (variable.name.clone(), view)
    });
    let whole = safetensors::serialize(views, None).unwrap();
    let header = weights_header(&manifest);
    assert_eq!(header, whole[..header.len()]);
    assert_eq!(whole.len() - header.len(), 4 * (3 + 10 + 1));
}

#[test]
fn a_truncated_file_is_refused_wherever_it_ends() {
    let file = sample();
    for end in 0..file.len() {
        let error = decode(&file.slice(..end), "a.safetensors").unwrap_err();
        let message = error.to_string();
        assert!(
            message.starts_with("a.safetensors is damaged") && message.contains("truncated"),
            "{end}: {message}"
        );
    }
}

#[test]
fn no_altered_byte_makes_it_panic() {
    let file = sample();
    for place in 0..file.len() {
        for flip in [0x01, 0x10, 0x80, 0xff] {
            let mut altered = file.to_vec();
            altered[place] ^= flip;
            let _ = decode(&altered.into(), "a.safetensors");
        }
    }
}

#[test]
fn what_makes_no_sense_is_refused_by_name() {
    let weights = r#""0.0":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}"#;
    assert!(decode(&file(&format!("{{{CONTENTS},{weights}}}"), 8), "a").is_ok());
    let huge = "18446744073709551608";
    let half = "9223372036854775808";
    let cases = [
        (format!("{{{weights}}}"), "no \"flambeau\""),
        (format!("{{{CONTENTS}}}"), "8 bytes belong to no tensor"),
        (
            format!("{{{CONTENTS},{}}}", weights.replace("F32", "F16")),
            "is F16 of shape",
        ),
        (
            format!("{{{CONTENTS},{}}}", weights.replace("[2]", "[1,2]")),
            "has shape [1, 2]",
        ),
        (
            format!("{{{CONTENTS},{}}}", weights.replace("0.0", "0.1")),
            "\"0.0\" is missing",
        ),
        (
            format!("{{{CONTENTS},{}}}", weights.replace("[0,8]", "[4,8]")),
            "0 was expected as the start",
        ),
        (
            format!("{{{CONTENTS},{}}}", weights.replace("[2]", "[3]")),
            "of shape [3] in 8 bytes",
        ),
        (
            format!(
                "{{{CONTENTS},{}}}",
                weights.replace("8]", &format!("{huge}]"))
            ),
            "truncated",
        ),
        (
            format!(
                "{{{CONTENTS},{}}}",
                weights.replace("[2]", &format!("[{half},{half}]"))
            ),
            "of shape",
        ),
        (
            format!(
                "{{{CONTENTS},{weights},{}}}",
                r#""x":{"dtype":"F32","shape":[0],"data_offsets":[8,8]}"#
            ),
            "\"x\" is of no block",
        ),
        (
            format!(
                "{{{},{weights}}}",
                CONTENTS.replace("slots\\\":0", "slots\\\":1")
            ),
            "\"0.0.slots\" is missing",
        ),
        (
            format!("{{{},{weights}}}", CONTENTS.replace("version", "vision")),
            "unknown field `vision`",
        ),
    ];
    for (header, expected) in cases {
        let message = refusal(&header, 8);
        assert!(message.contains(expected), "{message} for {header}");
    }
    let mut long = sample().to_vec();
    long[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    let error = decode(&long.into(), "a").unwrap_err();
    assert!(error.to_string().contains("at most 100000000"), "{error}");
}

#[test]
fn a_newer_format_is_said_to_be_one() {
    let header = CONTENTS.replace("format\\\":1", "new\\\":[],\\\"format\\\":6");
    assert_eq!(
        refusal(&format!("{{{header}}}"), 0),
        "a.safetensors was written by a newer release: format 6, this program reads 5"
    );
}
