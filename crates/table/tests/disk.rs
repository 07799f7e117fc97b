//! Buckets with rows on disk, compared with buckets that have all rows in memory.

#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use flambeau_table::bucket::{Bucket, SharedBucket};
use flambeau_table::disk::Disk;
use flambeau_table::rows::{History, Rows, SharedRow};
use proptest::prelude::*;
use shared_proto::job::Adagrad;
use shared_proto::payload::LeF32;
use shared_proto::table::{
    Age, Capacity, Eviction, EvictionOrder, Initializer, RowOptimizer, Storage, TableSpec,
};

fn spec(eviction: Eviction) -> TableSpec {
    TableSpec {
        name: "item".to_owned(),
        dimension: 2,
        buckets: 1,
        initializer: Initializer::Uniform { limit: 0.5 },
        optimizer: RowOptimizer::Adagrad(Adagrad::default()),
        seed: 3,
        eviction,
        ..TableSpec::default()
    }
}

fn disk(limit: usize) -> Arc<Disk> {
    Arc::new(Disk::new(&std::env::temp_dir(), limit).unwrap())
}

/// Returns a bucket on a server with `limit` bytes of memory for rows.
fn spilling(spec: &TableSpec, limit: usize) -> Bucket {
    let file = Rows::file(spec, &disk(limit));
    Bucket::new(spec, 0).spilling_to(Some(&file))
}

/// The rows of a bucket, by id: history, values and state.
type Contents = BTreeMap<u64, (History, Vec<u32>)>;

fn contents(shared: &SharedBucket, only_changed: bool) -> Contents {
    let mut contents = BTreeMap::new();
    let add = |row: SharedRow| {
        let numbers = row.numbers.iter().map(|number| number.to_bits());
        contents.insert(row.id, (row.history, numbers.collect()));
    };
    shared.rows.visit(only_changed, add).unwrap();
    contents
}

fn update(bucket: &mut Bucket, ids: &[u64], now: u32) -> flambeau_table::bucket::Updated {
    // Adagrad has a number of state for each value.
    let dimension = bucket.rows().numbers_of_row() / 2;
    let gradients = ids.iter().flat_map(|id| {
        let gradient = |number: usize| 0.1 + 0.01 * (*id * number as u64) as f32;
        (0..dimension).map(gradient)
    });
    let gradients: Vec<LeF32> = gradients.map(LeF32::from).collect();
    bucket.update(ids, &gradients, 0.1.into(), now).unwrap()
}

fn read(bucket: &mut Bucket, ids: &[u64]) -> Vec<f32> {
    let mut values = Vec::new();
    bucket.read(ids, &mut values).unwrap();
    values
}

#[derive(Clone, Debug)]
enum Event {
    Update(BTreeSet<u64>),
    Read(BTreeSet<u64>),
    /// Rows are read, and the same ones are updated, as in a worker's step.
    Step(BTreeSet<u64>),
    Share,
    /// The oldest snapshot that is kept is compared and dropped.
    Drop,
    Restore,
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let ids = || prop::collection::btree_set(0..120u64, 0..30);
    let event = prop_oneof![
        6 => ids().prop_map(Event::Update),
        3 => ids().prop_map(Event::Read),
        4 => ids().prop_map(Event::Step),
        2 => Just(Event::Share),
        1 => Just(Event::Drop),
        1 => Just(Event::Restore),
    ];
    prop::collection::vec(event, 1..60)
}

fn evictions() -> impl Strategy<Value = Eviction> {
    let age = prop::option::of((1..20u32).prop_map(Age::Updates));
    let order = prop_oneof![Just(EvictionOrder::Oldest), Just(EvictionOrder::Rarest)];
    let capacity = prop::option::of((1..100u64, order));
    let below = prop::option::of(0.1..0.6f32);
    (age, capacity, below, 1..7u32).prop_map(|(age, capacity, below, search_interval)| Eviction {
        age,
        capacity: capacity.map(|(rows, order)| Capacity { rows, order }),
        below,
        search_interval,
    })
}

fn storages() -> impl Strategy<Value = Storage> {
    prop_oneof![Just(Storage::F32), Just(Storage::Bf16), Just(Storage::F16)]
}

proptest! {
    #[test]
    fn rows_on_disk_are_those_that_memory_would_have(
        limit in 0..8_000usize,
        eviction in prop_oneof![Just(Eviction::default()), evictions()],
        (dimension, storage) in (1..5u32, storages()),
        events in events(),
    ) {
        let spec = TableSpec { dimension, storage, ..spec(eviction) };
        let (mut bucket, mut twin) = (spilling(&spec, limit), Bucket::new(&spec, 0));
        let mut kept: Vec<(SharedBucket, Contents)> = Vec::new();
        for (now, event) in (0..).zip(events) {
            match event {
                Event::Update(ids) => {
                    let ids: Vec<u64> = ids.into_iter().collect();
                    prop_assert_eq!(update(&mut bucket, &ids, now), update(&mut twin, &ids, now));
                }
                Event::Read(ids) => {
                    let ids: Vec<u64> = ids.into_iter().collect();
                    let expected = read(&mut twin, &ids);
                    // A lookup moves no row, and takes ids in any order and twice.
                    let on_disk = bucket.rows().on_disk();
                    let (mut values, mut present) = (Vec::new(), Vec::new());
                    bucket.rows().look_up(&ids, &mut values, &mut present).unwrap();
                    prop_assert_eq!(&values, &expected);
                    let twice: Vec<u64> = ids.iter().rev().chain(&ids).copied().collect();
                    bucket.rows().look_up(&twice, &mut values, &mut present).unwrap();
                    prop_assert_eq!(&values[values.len() - expected.len()..], &expected[..]);
                    let rows: BTreeSet<u64> = twin.rows().places().map(|(_, id)| id).collect();
                    for (id, present) in ids.iter().zip(present) {
                        prop_assert_eq!(present, rows.contains(id));
                    }
                    prop_assert_eq!(bucket.rows().on_disk(), on_disk);
                    prop_assert_eq!(read(&mut bucket, &ids), expected);
                }
                Event::Step(ids) => {
                    let ids: Vec<u64> = ids.into_iter().collect();
                    prop_assert_eq!(read(&mut bucket, &ids), read(&mut twin, &ids));
                    prop_assert_eq!(update(&mut bucket, &ids, now), update(&mut twin, &ids, now));
                }
                Event::Share => {
                    let (shared, expected) = (bucket.share(now.into()), twin.share(now.into()));
                    prop_assert_eq!(shared.rows.changed(), expected.rows.changed());
                    prop_assert_eq!(shared.rows.count(), expected.rows.count());
                    prop_assert_eq!(contents(&shared, true), contents(&expected, true));
                    prop_assert_eq!(&shared.changes, &expected.changes);
                    kept.push((shared, contents(&expected, false)));
                }
                Event::Drop if kept.is_empty() => {}
                Event::Drop => {
                    let (shared, expected) = kept.remove(0);
                    prop_assert_eq!(contents(&shared, false), expected);
                }
                Event::Restore => {
                    let saved = twin.share(now.into()).to_bytes().unwrap();
                    bucket = spilling(&spec, limit).restored(&spec, &saved).unwrap();
                    twin = Bucket::of_bytes(&spec, 0, &saved).unwrap();
                }
            }
            prop_assert_eq!(bucket.rows().len(), twin.rows().len());
        }
        for (shared, expected) in kept {
            prop_assert_eq!(contents(&shared, false), expected);
        }
    }
}

#[test]
fn memory_stays_within_the_limit_and_rows_that_are_used_stay_in_memory() {
    const LIMIT: usize = 6 << 20;
    let spec = TableSpec {
        dimension: 16,
        ..spec(Eviction::default())
    };
    let mut bucket = spilling(&spec, LIMIT);
    let often: Vec<u64> = (0..1000).collect();
    for first in (1000..200_000).step_by(1000) {
        update(&mut bucket, &often, 0);
        let rare: Vec<u64> = (first..first + 1000).collect();
        update(&mut bucket, &rare, 0);
        // Free places do not count, and are few.
        assert!(bucket.bytes() < LIMIT / 8 * 9, "{}", bucket.bytes());
    }
    assert_eq!(bucket.rows().len(), 200_000);
    assert!(bucket.rows().on_disk() > 150_000);
    let before = bucket.rows().read_from_disk();
    read(&mut bucket, &often);
    assert_eq!(bucket.rows().read_from_disk(), before);
    let saved = bucket.share(1).to_bytes().unwrap();
    let restored = spilling(&spec, LIMIT).restored(&spec, &saved).unwrap();
    assert_eq!(restored.rows().len(), 200_000);
    assert!(restored.bytes() < LIMIT / 8 * 9, "{}", restored.bytes());
}

#[test]
fn the_rows_of_a_small_table_stay_in_memory_beside_a_large_one() {
    let spec = spec(Eviction::default());
    let disk = disk(1 << 20);
    let mut large = Bucket::new(&spec, 0).spilling_to(Some(&Rows::file(&spec, &disk)));
    let mut small = Bucket::new(&spec, 0).spilling_to(Some(&Rows::file(&spec, &disk)));
    for first in (0..100_000).step_by(1000) {
        let ids: Vec<u64> = (first..first + 1000).collect();
        update(&mut large, &ids, 0);
        update(&mut small, &[first], 0);
    }
    assert!(large.rows().on_disk() > 80_000);
    assert_eq!(small.rows().on_disk(), 0);
}

#[test]
fn rows_stay_in_memory_if_they_cannot_be_written() {
    let spec = spec(Eviction::default());
    let folder = tempfile::tempdir().unwrap();
    let disk = Arc::new(Disk::new(folder.path(), 0).unwrap());
    folder.close().unwrap();
    let mut bucket = Bucket::new(&spec, 0).spilling_to(Some(&Rows::file(&spec, &disk)));
    let ids: Vec<u64> = (0..1000).collect();
    assert_eq!(update(&mut bucket, &ids, 0).created, 1000);
    assert_eq!((bucket.rows().len(), bucket.rows().on_disk()), (1000, 0));
}

#[test]
fn a_folder_that_is_not_there_is_refused() {
    assert!(Disk::new(std::path::Path::new("/no/such/folder"), 0).is_err());
}
