//! Buckets: which ids get a row, which rows are removed, and what a restored bucket does.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use bytes::Bytes;
use flambeau_table::bucket::{Bucket, SharedBucket, Updated};
use flambeau_table::rows::{History, SharedRow};
use proptest::prelude::*;
use shared_proto::job::{Adagrad, Sgd};
use shared_proto::payload::LeF32;
use shared_proto::table::{
    Admission, Age, Capacity, Eviction, EvictionOrder, Initializer, RowOptimizer, SavedRows,
    Storage, TableSpec,
};

fn spec(admission: Admission, eviction: Eviction) -> TableSpec {
    TableSpec {
        name: "item".to_owned(),
        dimension: 2,
        buckets: 4,
        seed: 3,
        admission,
        eviction,
        ..TableSpec::default()
    }
}

/// Adds 1 to the values of these rows.
fn add(bucket: &mut Bucket, ids: &[u64], now: u32) -> Updated {
    let gradients = vec![LeF32::from(-1.0); 2 * ids.len()];
    bucket.update(ids, &gradients, 1.0.into(), now).unwrap()
}

fn read(bucket: &mut Bucket, id: u64) -> Vec<f32> {
    let mut values = Vec::new();
    bucket.read(&[id], &mut values).unwrap();
    values
}

/// Returns the ids that were removed since the bucket was shared before.
fn removed(bucket: &mut Bucket) -> Option<Vec<u64>> {
    let evicted = bucket.share(1).changes?;
    let mut ids: Vec<u64> = evicted.ids.into_iter().collect();
    ids.sort_unstable();
    Some(ids)
}

fn ids(bucket: &Bucket) -> Vec<u64> {
    let mut ids: Vec<u64> = bucket.rows().places().map(|(_, id)| id).collect();
    ids.sort_unstable();
    ids
}

/// Returns the ids of the rows that have changed since the bucket was shared before.
fn changed(shared: &SharedBucket) -> Vec<u64> {
    let mut ids = Vec::new();
    shared.rows.visit(true, |row| ids.push(row.id)).unwrap();
    ids.sort_unstable();
    ids
}

/// The rows that a bucket holds, by id: history, values and state.
fn contents(shared: &SharedBucket) -> BTreeMap<u64, (History, Vec<u32>)> {
    let bits = |numbers: &[f32]| numbers.iter().map(|number| number.to_bits()).collect();
    let mut contents = BTreeMap::new();
    let add = |row: SharedRow| {
        contents.insert(row.id, (row.history, bits(row.numbers)));
    };
    shared.rows.visit(false, add).unwrap();
    contents
}

#[test]
fn an_id_gets_a_row_by_its_third_gradient() {
    let admission = Admission::Sights {
        count: 3,
        width: 1 << 12,
    };
    let mut bucket = Bucket::new(&spec(admission, Eviction::default()), 0);
    for refused in [true, true, false, false] {
        let updated = add(&mut bucket, &[8], 0);
        assert_eq!(updated.refused, usize::from(refused));
        assert_eq!(bucket.rows().is_empty(), refused);
    }
    // The first two gradients are lost.
    assert_eq!(read(&mut bucket, 8), [2.0, 2.0]);
    assert_eq!(read(&mut bucket, 9), [0.0, 0.0]);
}

#[test]
fn an_id_without_a_row_reads_as_zeros_unless_each_id_gets_one() {
    let uniform = |admission| TableSpec {
        initializer: Initializer::Uniform { limit: 1.0 },
        ..spec(admission, Eviction::default())
    };
    let mut all = Bucket::new(&uniform(Admission::All), 0);
    assert_ne!(read(&mut all, 8), [0.0, 0.0]);
    let mut some = Bucket::new(&uniform(Admission::Chance { probability: 0.5 }), 0);
    assert_eq!(read(&mut some, 8), [0.0, 0.0]);
}

#[test]
fn ids_are_drawn_with_their_probability_anew_at_each_gradient() {
    let admission = Admission::Chance { probability: 0.25 };
    let mut bucket = Bucket::new(&spec(admission, Eviction::default()), 0);
    let ids: Vec<u64> = (0..10_000).collect();
    let first = add(&mut bucket, &ids, 0);
    // Six standard deviations about the mean.
    assert!((2240..2760).contains(&first.created), "{first:?}");
    let second = add(&mut bucket, &ids, 0);
    assert_eq!(second.created + second.refused, first.refused);
    let share = second.created as f64 / first.refused as f64;
    assert!((0.22..0.28).contains(&share), "{share}");
}

#[test]
fn rows_without_an_update_for_so_long_are_removed() {
    let by_updates = Eviction {
        age: Some(Age::Updates(10)),
        search_interval: 5,
        ..Eviction::default()
    };
    let mut bucket = Bucket::new(&spec(Admission::All, by_updates), 0);
    add(&mut bucket, &[1, 2], 0);
    for _ in 0..13 {
        add(&mut bucket, &[2], 0);
        assert_eq!(ids(&bucket), [1, 2]);
    }
    // The first search at which row 1 has had no update for 10 others.
    assert_eq!(add(&mut bucket, &[2], 0).evicted, 1);
    assert_eq!(ids(&bucket), [2]);

    let by_seconds = Eviction {
        age: Some(Age::Seconds(60)),
        search_interval: 1,
        ..Eviction::default()
    };
    let mut bucket = Bucket::new(&spec(Admission::All, by_seconds), 0);
    bucket.share(1);
    add(&mut bucket, &[1], 1000);
    add(&mut bucket, &[2], 1059);
    assert_eq!(ids(&bucket), [1, 2]);
    add(&mut bucket, &[2], 1060);
    assert_eq!(ids(&bucket), [2]);
    // A row that comes back begins anew.
    assert_eq!(read(&mut bucket, 1), [0.0, 0.0]);
    assert_eq!(removed(&mut bucket), Some(vec![1]));
    add(&mut bucket, &[1], 1061);
    assert_eq!(read(&mut bucket, 1), [1.0, 1.0]);
    // One that has come back is no longer told as removed.
    assert_eq!(add(&mut bucket, &[3], 1120).evicted, 1);
    add(&mut bucket, &[2], 1120);
    assert_eq!(removed(&mut bucket), Some(Vec::new()));
    // A clock that goes back makes no row older.
    assert_eq!(add(&mut bucket, &[3], 5).evicted, 0);
    assert_eq!(ids(&bucket), [1, 2, 3]);
}

#[test]
fn a_full_bucket_removes_the_oldest_or_the_rarest() {
    // Of rows 1, 2 and 3, row 2 has the oldest update, and row 3 the fewest.
    let updates = [2, 2, 2, 3, 1, 1, 1, 3];
    for (order, left) in [
        (EvictionOrder::Oldest, [1, 3, 4]),
        (EvictionOrder::Rarest, [1, 2, 4]),
    ] {
        let capacity = Some(Capacity { rows: 4 * 3, order });
        let eviction = Eviction {
            capacity,
            ..Eviction::default()
        };
        let mut bucket = Bucket::new(&spec(Admission::All, eviction), 0);
        for id in updates {
            assert_eq!(add(&mut bucket, &[id], 0).evicted, 0);
        }
        assert_eq!(add(&mut bucket, &[4], 0).evicted, 1);
        assert_eq!(ids(&bucket), left);
    }
}

#[test]
fn rows_of_small_values_are_removed() {
    let eviction = Eviction {
        below: Some(1.5),
        search_interval: 2,
        ..Eviction::default()
    };
    let mut bucket = Bucket::new(&spec(Admission::All, eviction), 0);
    // Values of row 1 go up and down, those of row 2 up.
    for step in 1..=16 {
        assert_eq!(ids(&bucket).len(), usize::from(step > 1) * 2);
        let up = if step % 2 == 0 { 1.0 } else { -1.0 };
        let gradients = [up, up, -1.0, -1.0].map(LeF32::from);
        // A row of fewer updates is left alone.
        let evicted = bucket
            .update(&[1, 2], &gradients, 1.0.into(), 0)
            .unwrap()
            .evicted;
        assert_eq!(evicted, usize::from(step == 16));
    }
    assert_eq!(ids(&bucket), [2]);
}

#[test]
fn evicted_ids_are_forgotten_if_they_outnumber_the_rows() {
    let capacity = Some(Capacity {
        rows: 4,
        order: EvictionOrder::Oldest,
    });
    let eviction = Eviction {
        capacity,
        ..Eviction::default()
    };
    let mut bucket = Bucket::new(&spec(Admission::All, eviction), 0);
    add(&mut bucket, &[0], 0);
    assert_eq!(removed(&mut bucket), None);
    for id in 1..=1024 {
        add(&mut bucket, &[id], 0);
    }
    assert_eq!(bucket.share(3).changes.unwrap().ids.len(), 1024);
    for id in 2000..=3100 {
        add(&mut bucket, &[id], 0);
    }
    assert_eq!(removed(&mut bucket), None);
}

#[test]
fn what_is_shared_stays_as_it_was_and_tells_what_has_changed() {
    let mut bucket = Bucket::new(&spec(Admission::All, Eviction::default()), 0);
    let all: Vec<u64> = (0..3000).collect();
    add(&mut bucket, &all, 0);
    let first = bucket.share(1);
    let before = contents(&first);
    assert_eq!(changed(&first), all);
    add(&mut bucket, &[5, 2999], 0);
    add(&mut bucket, &[4000], 0);
    assert_eq!(contents(&first), before);
    let second = bucket.share(1);
    assert_eq!(changed(&second), [5, 2999, 4000]);
    assert_eq!(contents(&second).len(), 3001);
    assert!(changed(&bucket.share(1)).is_empty());
}

fn policies() -> impl Strategy<Value = (Admission, Eviction)> {
    let admission = prop_oneof![
        Just(Admission::All),
        Just(Admission::Sights {
            count: 2,
            width: 64
        }),
        Just(Admission::Chance { probability: 0.3 }),
    ];
    let age = prop::option::of(prop_oneof![
        (1..20u32).prop_map(Age::Updates),
        (1..20u32).prop_map(Age::Seconds),
    ]);
    let first = prop_oneof![Just(EvictionOrder::Oldest), Just(EvictionOrder::Rarest)];
    let capacity = prop::option::of((1..200u64, first));
    let capacity = capacity.prop_map(|c| c.map(|(rows, order)| Capacity { rows, order }));
    let below = prop::option::of(0.5..3f32);
    let eviction =
        (age, capacity, below, 1..7u32).prop_map(|(age, capacity, below, search_interval)| {
            Eviction {
                age,
                capacity,
                below,
                search_interval,
            }
        });
    (admission, eviction)
}

proptest! {
    /// A read remembers where rows are, for the update that follows it; whatever happens in between, the rows are those of
    /// a bucket that was never read.
    #[test]
    fn reads_change_nothing(
        (admission, eviction) in policies(),
        steps in prop::collection::vec(
            (prop::collection::btree_set(0..60u64, 0..20), any::<bool>(), 0..3usize),
            1..60,
        ),
    ) {
        let spec = spec(admission, eviction);
        let (mut read, mut never) = (Bucket::new(&spec, 0), Bucket::new(&spec, 0));
        let lists: Vec<Vec<u64>> = steps.iter().map(|(ids, ..)| ids.iter().copied().collect()).collect();
        for (step, (_, before, ahead)) in steps.iter().enumerate() {
            let mut values = Vec::new();
            if *before {
                read.read(&lists[step], &mut values).unwrap();
            }
            // The lists of later steps are read before rows are created or evicted.
            for later in lists.iter().skip(step + 1).take(*ahead) {
                read.read(later, &mut values).unwrap();
            }
            let now = step as u32;
            prop_assert_eq!(add(&mut read, &lists[step], now), add(&mut never, &lists[step], now));
            prop_assert_eq!(contents(&read.share(1)), contents(&never.share(1)));
        }
    }

    #[test]
    fn a_restored_bucket_goes_on_as_the_first_one_would_have(
        (admission, eviction) in policies(),
        steps in prop::collection::vec(prop::collection::btree_set(0..100u64, 0..40), 1..40),
        at in 0..40usize,
    ) {
        let mut spec = spec(admission, eviction);
        spec.optimizer = RowOptimizer::Adagrad(Adagrad::default());
        spec.initializer = Initializer::Normal { deviation: 1.0 };
        spec.buckets = 1;
        let at = at.min(steps.len());
        let run = |bucket: &mut Bucket, steps: &[std::collections::BTreeSet<u64>], from: usize| {
            let mut outcomes = Vec::new();
            for (step, ids) in (from..).zip(steps) {
                let ids: Vec<u64> = ids.iter().copied().collect();
                outcomes.push(add(bucket, &ids, step as u32 / 2));
                if let Some(capacity) = eviction.capacity {
                    assert!(bucket.rows().len() as u64 <= capacity.rows.div_ceil(u64::from(spec.buckets)));
                }
            }
            outcomes
        };
        let mut whole = Bucket::new(&spec, 0);
        run(&mut whole, &steps[..at], 0);
        let mut restored = Bucket::of_bytes(&spec, 0, &whole.share(1).to_bytes().unwrap()).unwrap();
        // Its first snapshot is a whole one.
        prop_assert_eq!(removed(&mut restored), None);
        let expected = run(&mut whole, &steps[at..], at);
        prop_assert_eq!(run(&mut restored, &steps[at..], at), expected);
        let (whole, restored) = (whole.share(1), restored.share(1));
        prop_assert_eq!(contents(&whole), contents(&restored));
        prop_assert_eq!(whole.changes, restored.changes);
        prop_assert_eq!((whole.updates, whole.time), (restored.updates, restored.time));
        prop_assert_eq!(whole.sketch, restored.sketch);
    }
}

#[test]
fn bytes_that_are_no_bucket_of_the_table_are_refused() {
    let mut spec = spec(
        Admission::Sights { count: 1, width: 8 },
        Eviction {
            age: Some(Age::Updates(9)),
            ..Eviction::default()
        },
    );
    spec.buckets = 1;
    let mut bucket = Bucket::new(&spec, 0);
    let gradients = vec![LeF32::from(1.0); 3 * spec.dimension as usize];
    bucket
        .update(&[1, 2, 3], &gradients, 0.1.into(), 0)
        .unwrap();
    let whole = bucket.share(1).to_bytes().unwrap();
    let refused = |change: &dyn Fn(&mut SavedRows), spec: &TableSpec| {
        let mut saved = whole.clone();
        change(&mut saved);
        Bucket::of_bytes(spec, 0, &saved).unwrap_err()
    };
    assert!(Bucket::of_bytes(&spec, 0, &whole).is_ok());
    let one_less = |bytes: &Bytes| bytes.slice(..bytes.len() - 1);
    for (said, error) in [
        (
            "bytes of ids",
            refused(&|s| s.ids = one_less(&s.ids), &spec),
        ),
        (
            "bytes of ids",
            refused(&|s| s.history = Bytes::new(), &spec),
        ),
        (
            "bytes of numbers",
            refused(&|s| s.numbers = one_less(&s.numbers), &spec),
        ),
        (
            "counters",
            refused(&|s| s.counts = one_less(&s.counts), &spec),
        ),
        (
            "row 1 twice",
            refused(
                &|s| s.ids = [1u64, 1, 2].map(u64::to_le_bytes).concat().into(),
                &spec,
            ),
        ),
        ("after the bucket's 0", refused(&|s| s.time = 0, &spec)),
        (
            "another bucket",
            refused(
                &|_| (),
                &TableSpec {
                    buckets: 1000,
                    ..spec.clone()
                },
            ),
        ),
    ] {
        assert!(error.contains(said), "{error}");
    }
}

/// A change that is smaller than the step between two numbers of 16 bits counts on average.
#[test]
fn values_of_16_bits_learn_from_small_gradients() {
    for storage in [Storage::Bf16, Storage::F16] {
        let spec = TableSpec {
            dimension: 64,
            storage,
            optimizer: RowOptimizer::Sgd(Sgd::default()),
            initializer: Initializer::Uniform { limit: 1.0 },
            ..spec(Admission::All, Eviction::default())
        };
        let mut bucket = Bucket::new(&spec, 0);
        let read = |bucket: &mut Bucket| {
            let mut values = Vec::new();
            bucket.read(&[5], &mut values).unwrap();
            values
        };
        // A row has the values that its id reads as before it is there.
        let before = read(&mut bucket);
        let zeros: Vec<LeF32> = vec![LeF32::from(0.0); 64];
        bucket.update(&[5], &zeros, 1.0.into(), 0).unwrap();
        assert_eq!(read(&mut bucket), before);
        let gradients: Vec<LeF32> = vec![LeF32::from(1.0); 64];
        for _ in 0..1000 {
            bucket.update(&[5], &gradients, 1e-4.into(), 0).unwrap();
        }
        let changes = read(&mut bucket).into_iter().zip(before);
        let mean = changes.map(|(after, before)| after - before).sum::<f32>() / 64.0;
        assert!((mean + 0.1).abs() < 0.01, "{storage:?}: {mean}");
        let in_full = Bucket::new(
            &TableSpec {
                storage: Storage::F32,
                ..spec
            },
            0,
        );
        let bytes = |mut bucket: Bucket| {
            for id in 0..10_000 {
                bucket.update(&[id], &zeros, 1.0.into(), 0).unwrap();
            }
            bucket.bytes()
        };
        let share = bytes(bucket) as f64 / bytes(in_full) as f64;
        assert!(share < 0.6, "{share} of the memory");
    }
}

#[test]
fn values_that_are_too_large_for_the_storage_are_refused() {
    let spec = TableSpec {
        buckets: 1,
        ..spec(Admission::All, Eviction::default())
    };
    let mut bucket = Bucket::new(&spec, 0);
    let dimension = spec.dimension as usize;
    let gradients: Vec<LeF32> = vec![LeF32::from(-70_000.0); dimension];
    bucket.update(&[1], &gradients, 1.0.into(), 0).unwrap();
    let saved = bucket.share(1).to_bytes().unwrap();
    let with = |storage| TableSpec {
        storage,
        ..spec.clone()
    };
    let error = Bucket::of_bytes(&with(Storage::F16), 0, &saved).unwrap_err();
    assert!(error.contains("row 1") && error.contains("F16"), "{error}");
    Bucket::of_bytes(&with(Storage::Bf16), 0, &saved).unwrap();
}
