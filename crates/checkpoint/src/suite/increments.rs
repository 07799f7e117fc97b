//! Checkpoints that have only the changed rows of a table: together with those that they build on they have each row once.

use std::collections::BTreeMap;

use proptest::prelude::*;
use shared_proto::blocks::BlockId;
use shared_proto::ids::Version;
use shared_proto::job::Adagrad;
use shared_proto::payload::LeF32;
use shared_proto::table::{Capacity, Eviction, EvictionOrder, RowOptimizer, TableSpec};
use table::bucket::Bucket;
use table::rows::SharedRow;

use super::manifest;
use super::stores::in_memory;
use crate::error::CheckpointError;
use crate::format::folder_name;
use crate::manifest::{BlockRange, FileEntry, Manifest};
use crate::newest_first::{NewestFirst, Piece};
use crate::part::{SavedBlock, SavedValues, encode};
use crate::store::Store;

const BUCKET: BlockId = BlockId {
    variable: 3,
    index: 0,
};

/// A table of one bucket, from which the oldest rows are evicted.
fn spec() -> TableSpec {
    TableSpec {
        name: "item".to_owned(),
        dimension: 2,
        buckets: 1,
        optimizer: RowOptimizer::Adagrad(Adagrad::default()),
        seed: 3,
        eviction: Eviction {
            capacity: Some(Capacity {
                rows: 60,
                order: EvictionOrder::Oldest,
            }),
            ..Eviction::default()
        },
        ..TableSpec::default()
    }
}

/// Writes a checkpoint of a model with this bucket. It builds on `base` if the bucket knows what has changed since then.
async fn save(
    store: &Store,
    number: u64,
    bucket: &mut Bucket,
    base: Option<&Manifest>,
) -> Manifest {
    let mut shared = bucket.share(number);
    shared.build_on(base.map(|base| base.number));
    let saved = SavedBlock {
        id: BUCKET,
        version: Version(number),
        watermarks: Vec::new(),
        values: SavedValues::Rows(shared.to_bytes().unwrap()),
    };
    super::save_files(store, number).await;
    let mut manifest = Manifest {
        tables: vec![spec()],
        ..manifest(number, 2, number)
    };
    let (name, content) = (
        "shard-0-part-0001.safetensors",
        encode(std::slice::from_ref(&saved)),
    );
    let file = FileEntry::of_blocks(name, &content, &[saved]);
    store.write_file(number, name, content).await.unwrap();
    let changes = file.changes.clone();
    manifest.files.push(file);
    if let Some(base) = base {
        manifest.files.extend(base.files_under(&changes).unwrap());
    }
    store.write_manifest(manifest).await.unwrap()
}

/// Reads the bucket of a checkpoint.
async fn load(store: &Store, manifest: &Manifest) -> Result<Bucket, CheckpointError> {
    let mut reading = NewestFirst::default();
    let mut bucket = None;
    let damaged = |why: String| CheckpointError::damaged("bucket", why);
    for file in NewestFirst::files(manifest) {
        for block in store.read_file(manifest, file).await? {
            match reading.take(manifest, file, block).map_err(damaged)? {
                Some(Piece::Newest(block)) => {
                    if let SavedValues::Rows(rows) = &block.values {
                        assert_eq!(block.version, Version(manifest.number));
                        bucket = Some(Bucket::of_bytes(&spec(), 0, rows).map_err(damaged)?);
                    }
                }
                Some(Piece::Older(id, rows)) => {
                    assert_eq!(id, BUCKET);
                    let bucket = bucket.as_mut().expect("the newest come first");
                    bucket.add(&spec(), &rows).map_err(damaged)?;
                }
                None => {}
            }
        }
    }
    reading.finish(manifest).map_err(damaged)?;
    Ok(bucket.unwrap())
}

/// Returns all that a bucket holds: its updates, and the words of each row by id.
fn contents(bucket: &mut Bucket) -> (u64, u32, BTreeMap<u64, Vec<u32>>) {
    let shared = bucket.share(u64::MAX);
    let mut rows = BTreeMap::new();
    let add = |row: SharedRow| {
        let history = [row.history.last, row.history.updates];
        let numbers = row.numbers.iter().map(|number| number.to_bits());
        rows.insert(row.id, history.into_iter().chain(numbers).collect());
    };
    shared.rows.visit(false, add).unwrap();
    (shared.updates, shared.time, rows)
}

fn update(bucket: &mut Bucket, ids: &[u64]) {
    let gradients = vec![LeF32::from(0.5); 2 * ids.len()];
    bucket.update(ids, &gradients, 0.1.into(), 0).unwrap();
}

#[derive(Clone, Debug)]
enum Event {
    Update(Vec<u64>),
    /// A checkpoint, which is given up before its manifest is written if this is true.
    Checkpoint(bool),
    /// The server is replaced by one that loads the newest checkpoint.
    Restore,
}

fn any_event() -> impl Strategy<Value = Event> {
    let ids = prop::collection::btree_set(0u64..90, 1..7);
    prop_oneof![
        6 => ids.prop_map(|ids| Event::Update(ids.into_iter().collect())),
        3 => prop::bool::weighted(0.2).prop_map(Event::Checkpoint),
        1 => Just(Event::Restore),
    ]
}

proptest! {
    #[test]
    fn a_checkpoint_has_the_rows_that_the_bucket_had(
        events in prop::collection::vec(any_event(), 1..60),
        chain in 0usize..4,
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let store = in_memory();
        // The twin is never saved, so nothing is expected of what has changed in it.
        let (mut bucket, mut twin) = (Bucket::new(&spec(), 0), Bucket::new(&spec(), 0));
        let mut newest: Option<Manifest> = None;
        for (number, event) in (0..).zip(events) {
            match event {
                Event::Update(ids) => {
                    update(&mut bucket, &ids);
                    update(&mut twin, &ids);
                }
                Event::Checkpoint(true) => drop(bucket.share(number)),
                Event::Checkpoint(false) => {
                    let base = newest.as_ref().filter(|base| base.builds_on().len() < chain);
                    let manifest = runtime.block_on(save(&store, number, &mut bucket, base));
                    prop_assert!(manifest.builds_on().len() <= chain);
                    let mut loaded = runtime.block_on(load(&store, &manifest)).unwrap();
                    prop_assert_eq!(contents(&mut loaded), contents(&mut twin));
                    newest = Some(manifest);
                }
                Event::Restore => if let Some(manifest) = &newest {
                    bucket = runtime.block_on(load(&store, manifest)).unwrap();
                    twin = runtime.block_on(load(&store, manifest)).unwrap();
                },
            }
        }
    }
}

/// Writes a checkpoint of all rows, and two that build on it. Returns their manifests.
async fn chain(store: &Store) -> [Manifest; 3] {
    let mut bucket = Bucket::new(&spec(), 0);
    let all: Vec<u64> = (0..50).collect();
    update(&mut bucket, &all);
    let first = save(store, 1, &mut bucket, None).await;
    update(&mut bucket, &[3, 77]);
    let second = save(store, 2, &mut bucket, Some(&first)).await;
    update(&mut bucket, &[3]);
    let third = save(store, 4, &mut bucket, Some(&second)).await;
    [first, second, third]
}

#[tokio::test]
async fn only_changed_rows_are_written() {
    let store = in_memory();
    let [first, second, third] = chain(&store).await;
    assert!(first.builds_on().is_empty());
    assert!(second.builds_on().into_iter().eq([1]));
    assert!(third.builds_on().into_iter().eq([1, 2]));
    let rows = async |manifest: &Manifest| {
        let file = manifest
            .files
            .iter()
            .find(|file| file.checkpoint.is_none() && file.blocks[0].variable == 3);
        let blocks = store.read_file(manifest, file.unwrap()).await.unwrap();
        match &blocks[0].values {
            SavedValues::Rows(rows) => rows.ids.len() / 8,
            SavedValues::Dense { .. } => panic!("not a bucket"),
        }
    };
    assert_eq!(
        [rows(&first).await, rows(&second).await, rows(&third).await],
        [50, 2, 1]
    );
    assert_eq!(store.newest().await.unwrap(), Some(third));
}

#[tokio::test]
async fn what_a_kept_checkpoint_builds_on_is_kept() {
    let store = in_memory();
    let [.., third] = chain(&store).await;
    super::save(&store, 0).await;
    assert_eq!(store.prune(1).await.unwrap(), [0]);
    store.verify(&third).await.unwrap();
    // A newer one without it sets all of them free.
    super::save(&store, 5).await;
    assert_eq!(store.prune(1).await.unwrap(), [1, 2, 4]);
}

/// Both kept ones build on the same file, so one that does not stays too.
#[tokio::test]
async fn one_damaged_file_leaves_a_checkpoint_to_go_back_to() {
    let store = in_memory();
    super::save(&store, 0).await;
    let [first, ..] = chain(&store).await;
    assert!(store.prune(2).await.unwrap().is_empty());
    let file = first.files.last().unwrap();
    store.remove_file(1, &file.name).await.unwrap();
    assert_eq!(store.newest().await.unwrap().unwrap().number, 0);
    assert_eq!(store.prune(1).await.unwrap(), [0]);
}

#[tokio::test]
async fn a_checkpoint_is_refused_if_rows_that_it_builds_on_are_missing() {
    let store = in_memory();
    let [_, second, third] = chain(&store).await;
    // Without the middle one, and without the first, in the manifest.
    let without = |number: u64| Manifest {
        files: third
            .files
            .iter()
            .filter(|file| file.checkpoint != Some(number))
            .cloned()
            .collect(),
        ..third.clone()
    };
    let error = without(1).to_bytes().unwrap_err().to_string();
    assert!(error.contains("none has all its rows"), "{error}");
    let error = load(&store, &without(2)).await.unwrap_err().to_string();
    assert!(
        error.contains("since checkpoint 2, but the manifest names rows of checkpoint 1"),
        "{error}"
    );
    // Of a later checkpoint than itself.
    let mut later = third.clone();
    later.number = 1;
    let error = later.to_bytes().unwrap_err().to_string();
    assert!(error.contains("not an earlier one"), "{error}");
    // Ranges that no table has, or that come twice.
    let range = |first, last| BlockRange {
        variable: 3,
        first,
        last,
    };
    for wrong in [range(0, u32::MAX), range(1, 0), range(1, 1)] {
        assert!(third.files_under(&[wrong]).is_err(), "{wrong:?}");
        for of_changes in [true, false] {
            let mut manifest = third.clone();
            let mut files = manifest.files.iter_mut();
            let file = files.find(|file| file.checkpoint.is_some()).unwrap();
            match of_changes {
                true => file.changes = vec![wrong],
                false => file.blocks.push(wrong),
            }
            let error = manifest.to_bytes().unwrap_err().to_string();
            assert!(error.contains("which are not there"), "{error}");
        }
    }
    let twice = [range(0, 0), range(0, 0)];
    let error = third.files_under(&twice).unwrap_err();
    assert!(
        error.contains("bucket 0 of table \"item\" is named twice"),
        "{error}"
    );
    // A file that is gone.
    let file = second
        .files
        .iter()
        .find(|file| file.checkpoint == Some(1))
        .unwrap();
    store.remove_file(1, &file.name).await.unwrap();
    let error = store.check_present(&third).await.unwrap_err().to_string();
    assert!(
        error.contains(&format!("{}/{}", folder_name(1), file.name)),
        "{error}"
    );
    assert!(
        store.newest().await.unwrap().is_none(),
        "all of them build on it"
    );
}

/// A damaged file is in all checkpoints of a chain, so none of them is offered instead.
#[tokio::test]
async fn another_chain_is_offered_in_place_of_a_damaged_file() {
    let store = in_memory();
    super::save(&store, 0).await;
    let [first, _, third] = chain(&store).await;
    let file = first.files.last().unwrap();
    let altered = vec![0; file.bytes as usize];
    let written = store.write_file(1, &file.name, altered.into());
    written.await.unwrap();
    let error = store.verify(&third).await.unwrap_err();
    match store.advise(4, error).await {
        CheckpointError::Damaged { instead, .. } => assert_eq!(instead.unwrap().0, 0),
        error => panic!("{error}"),
    }
}

/// The manifest of the first is gone, but others build on its files.
#[tokio::test]
async fn files_that_others_build_on_are_not_swept() {
    let store = in_memory();
    let [.., third] = chain(&store).await;
    store.remove_file(1, "manifest.json").await.unwrap();
    assert!(store.sweep(|_| true).await.unwrap().is_empty());
    store.verify(&third).await.unwrap();
}
