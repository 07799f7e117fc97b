//! One suite over all kinds of stores, and the checkpoints that it and other tests use.

mod corpus;
mod increments;
mod locations;
mod owners;
mod s3;
mod stores;

use bytes::Bytes;
use shared_proto::blocks::{BlockId, VariableKind};
use shared_proto::ids::{Clock, Generation, Sequence, Task, TaskId, Version};

use crate::format::FORMAT;
use crate::manifest::{FileEntry, Manifest, SavedVariable};
use crate::part::{SavedBlock, SavedValues, Watermark, encode};
use crate::store::{Claim, Store};

/// Elements in a block of [`manifest`].
const BLOCK_ELEMENTS: u64 = 4;

/// Returns numbers that differ from each other and from those of other seeds.
fn numbers(count: u64, seed: u64) -> Bytes {
    let number = |i| (seed * 1000 + i) as f32 / 8.0;
    (0..count).flat_map(|i| number(i).to_le_bytes()).collect()
}

/// A block with two watermarks.
pub(crate) fn block(variable: u32, index: u32, elements: u64, slots: u32, seed: u64) -> SavedBlock {
    let mark = |worker: u32| Watermark {
        task: Task {
            id: TaskId::worker(worker),
            generation: Generation(1),
        },
        sequence: Sequence(seed + u64::from(worker)),
        clock: Clock(seed),
        version: Version(seed * 2),
        taken: 1,
        before: Sequence(0),
    };
    SavedBlock {
        id: BlockId { variable, index },
        version: Version(seed * 2 + 1),
        watermarks: vec![mark(0), mark(1)],
        values: SavedValues::Dense {
            weights: numbers(elements, seed),
            slots: numbers(elements * u64::from(slots), seed + 1),
        },
    }
}

/// The blocks of a small model, file by file.
pub(crate) fn files(slots: u32, seed: u64) -> Vec<(&'static str, Vec<SavedBlock>)> {
    let block = |variable, index, elements| block(variable, index, elements, slots, seed);
    vec![
        (
            "shard-0-part-0000.safetensors",
            vec![block(0, 0, 3), block(1, 1, 4), block(1, 2, 2)],
        ),
        (
            "shard-1-part-0000.safetensors",
            vec![block(1, 0, 4), block(2, 0, 1)],
        ),
    ]
}

/// The manifest of [`files`], without a checksum.
pub(crate) fn manifest(number: u64, slots: u32, seed: u64) -> Manifest {
    let variable = |name: &str, shape: &[u64]| SavedVariable {
        name: name.to_owned(),
        shape: shape.to_vec(),
        kind: VariableKind::Trained,
        slots,
    };
    Manifest {
        format: FORMAT,
        number,
        run: String::new(),
        job: "digits".to_owned(),
        job_toml: "name = \"digits\"\n".to_owned(),
        mode: "sync".to_owned(),
        epoch: 1,
        clock: seed,
        steps: seed,
        samples: seed * 32,
        began: 1_790_000_000,
        variables: vec![
            variable("fc.bias", &[3]),
            variable("fc.weight", &[2, 5]),
            variable("scale", &[]),
        ],
        tables: Vec::new(),
        block_elements: BLOCK_ELEMENTS,
        slots: None,
        shards: 2,
        files: files(slots, seed)
            .into_iter()
            .map(|(name, blocks)| {
                let ids: Vec<BlockId> = blocks.iter().map(|block| block.id).collect();
                FileEntry::new(name, &encode(&blocks), ids)
            })
            .collect(),
        // Some JSON parsers do not return exactly this number.
        progress: serde_json::json!({"data_epoch": 2, "loss": 0.10000000000000002}),
        checksum: String::new(),
    }
}

/// A run's claim to a store.
pub(crate) fn claim(run: &str, term: u64) -> Claim {
    Claim {
        term,
        run: run.to_owned(),
        process: format!("{run}'s"),
        job: "digits".to_owned(),
        since: 1_790_000_000,
        coordinator: "alpha (127.0.0.1:7070)".to_owned(),
    }
}

/// Writes a checkpoint as a run does.
pub(crate) async fn save(store: &Store, number: u64) -> Manifest {
    save_files(store, number).await;
    let manifest = manifest(number, 2, number);
    store.write_manifest(manifest).await.unwrap()
}

/// Writes the files of a checkpoint without its manifest, like a writer that dies before the end.
pub(crate) async fn save_files(store: &Store, number: u64) {
    for (name, blocks) in files(2, number) {
        let content = encode(&blocks);
        store.write_file(number, name, content).await.unwrap();
    }
}
