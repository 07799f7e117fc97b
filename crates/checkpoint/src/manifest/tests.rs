use super::*;
use crate::suite::manifest;

const WHAT: &str = "run/checkpoint-000000000012/manifest.json";

fn text() -> Vec<u8> {
    manifest(12, 2, 5).to_bytes().unwrap().to_vec()
}

/// Returns the reason why a manifest with this change and the right checksum is refused.
fn refusal(change: impl FnOnce(&mut Manifest)) -> String {
    let mut changed = manifest(12, 2, 5);
    change(&mut changed);
    let refused = changed.to_bytes().unwrap_err();
    let text = serde_json::to_vec(&changed).unwrap();
    let message = Manifest::parse(&text, WHAT).unwrap_err().to_string();
    let (_, reason) = message.split_once(" is damaged: ").unwrap();
    assert!(refused.to_string().ends_with(reason), "{refused}");
    assert!(message.starts_with(WHAT));
    reason.to_owned()
}

#[test]
fn what_is_written_is_read() {
    let read = Manifest::read(&text(), WHAT).unwrap();
    let checksum = read.checksum.clone();
    let written = manifest(12, 2, 5);
    assert_eq!(
        Manifest {
            checksum: String::new(),
            ..read.clone()
        },
        written
    );
    assert_eq!(checksum.len(), 64);
    assert_eq!(read.to_bytes().unwrap(), text());
}

#[test]
fn the_checksum_is_that_of_the_text_without_it() {
    let text = String::from_utf8(text()).unwrap();
    let checksum = Manifest::read(text.as_bytes(), WHAT).unwrap().checksum;
    let empty = text.replace(&checksum, "");
    assert_eq!(sha256(empty.as_bytes()), checksum);
}

#[test]
fn every_truncation_and_every_altered_byte_is_found() {
    let text = text();
    for end in 0..text.len() {
        let error = Manifest::read(&text[..end], WHAT).unwrap_err();
        assert!(error.to_string().contains("truncated"), "{end}: {error}");
    }
    for place in 0..text.len() {
        for flip in [0x01, 0x20, 0xff] {
            let mut altered = text.clone();
            altered[place] ^= flip;
            let error = Manifest::read(&altered, WHAT).unwrap_err();
            assert!(error.is_damaged(), "{place}: {error}");
            let _ = Manifest::parse(&altered, WHAT);
        }
    }
}

/// Returns a manifest as format 2 has it.
fn of_format_2() -> serde_json::Value {
    let mut value = serde_json::to_value(manifest(12, 2, 5)).unwrap();
    value["format"] = 2.into();
    value["slots"] = 2.into();
    for variable in value["variables"].as_array_mut().unwrap() {
        let variable = variable.as_object_mut().unwrap();
        variable.remove("slots").unwrap();
        variable.remove("kind").unwrap();
    }
    value
}

#[test]
fn format_1_has_no_run() {
    let mut value = of_format_2();
    value["format"] = 1.into();
    value.as_object_mut().unwrap().remove("run").unwrap();
    let read = Manifest::parse(value.to_string().as_bytes(), WHAT).unwrap();
    assert_eq!((read.format, read.run.as_str()), (1, ""));
}

#[test]
fn format_2_has_one_number_of_slots() {
    let read = Manifest::parse(of_format_2().to_string().as_bytes(), WHAT).unwrap();
    assert_eq!(read.variables, manifest(12, 2, 5).variables);
    for (format, slots) in [(2, None), (3, Some(2))] {
        let mut value = of_format_2();
        value["format"] = format.into();
        value["slots"] = slots.into();
        let refused = Manifest::parse(value.to_string().as_bytes(), WHAT).unwrap_err();
        assert!(refused.to_string().contains("slots is"), "{refused}");
    }
}

#[test]
fn a_newer_format_is_said_to_be_one_whatever_its_fields() {
    let mut value = serde_json::to_value(manifest(12, 2, 5)).unwrap();
    value["format"] = 6.into();
    value["a_new_field"] = true.into();
    let error = Manifest::parse(value.to_string().as_bytes(), WHAT).unwrap_err();
    assert_eq!(
        error.to_string(),
        format!("{WHAT} was written by a newer release: format 6, this program reads 5")
    );
    assert!(!error.is_retryable() && !error.is_damaged());
}

#[test]
fn an_unknown_field_is_refused() {
    let mut value = serde_json::to_value(manifest(12, 2, 5)).unwrap();
    value["extra"] = true.into();
    let error = Manifest::parse(value.to_string().as_bytes(), WHAT).unwrap_err();
    assert!(
        error.to_string().contains("unknown field `extra`"),
        "{error}"
    );
}

#[test]
fn files_have_each_block_once() {
    assert_eq!(
        refusal(|m| {
            m.files.pop();
        }),
        "block 0 of variable \"fc.weight\" is in no file"
    );
    assert_eq!(
        refusal(|m| m.files[0].blocks[1].last = 1),
        "block 2 of variable \"fc.weight\" is in no file"
    );
    assert_eq!(
        refusal(|m| m.files[1].blocks[0].last = 1),
        "block 1 of variable \"fc.weight\" is twice"
    );
    assert_eq!(
        refusal(|m| m.files[0].blocks[1].last = u32::MAX),
        "variable \"fc.weight\" has 3 blocks, but 1 to 4294967295 are named"
    );
    assert_eq!(
        refusal(|m| m.files[1].blocks[1].variable = 9),
        "block 0 of variable \"scale\" is in no file"
    );
    assert_eq!(
        refusal(|m| {
            m.variables.pop();
        }),
        "file \"shard-1-part-0000.safetensors\" has blocks of variable 2, which is not there"
    );
}

#[test]
fn what_makes_no_sense_is_refused_by_name() {
    assert_eq!(refusal(|m| m.block_elements = 0), "block_elements is 0");
    assert!(refusal(|m| m.variables[1].shape = vec![u64::MAX, 2]).contains("too large"));
    assert!(refusal(|m| m.variables[1].shape = vec![1 << 61]).contains("too large"));
    assert!(refusal(|m| m.variables[1].shape = vec![1 << 40]).contains("too large"));
    assert!(refusal(|m| m.variables[1].shape = vec![5, 0]).contains("empty"));
    assert!(refusal(|m| m.variables.swap(0, 1)).contains("order of names"));
    assert!(refusal(|m| m.files[1].name = m.files[0].name.clone()).contains("named twice"));
    for name in [
        "../probe",
        "",
        "a/b",
        "/etc/passwd",
        ".hidden",
        "a\\b",
        "a%2fb",
    ] {
        assert!(
            refusal(|m| m.files[0].name = name.to_owned()).contains("no name of a file"),
            "{name}"
        );
    }
}

#[test]
fn ranges_are_of_consecutive_blocks() {
    let id = |variable, index| BlockId { variable, index };
    let range = |variable, first, last| BlockRange {
        variable,
        first,
        last,
    };
    let blocks = [id(1, 4), id(0, u32::MAX), id(1, 3), id(0, 0), id(1, 6)];
    let found = ranges(blocks);
    let expected = [
        range(0, 0, 0),
        range(0, u32::MAX, u32::MAX),
        range(1, 3, 4),
        range(1, 6, 6),
    ];
    assert_eq!(found, expected);
    let ids: Vec<_> = range(1, 3, 4).ids().collect();
    assert_eq!(ids, [id(1, 3), id(1, 4)]);
    assert_ne!(ranges([id(0, 1), id(0, 1)]), ranges([id(0, 1)]));
}

#[test]
fn a_blocks_size_follows_from_its_variable() {
    let manifest = manifest(12, 2, 5);
    let size = |variable, index| manifest.elements(BlockId { variable, index });
    assert_eq!(
        [size(1, 0), size(1, 1), size(1, 2)],
        [Some(4), Some(4), Some(2)]
    );
    assert_eq!(size(2, 0), Some(1));
    assert_eq!([size(1, 3), size(3, 0), size(1, u32::MAX)], [None; 3]);
}
