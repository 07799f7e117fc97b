//! The rows of a bucket, compared with a map.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use flambeau_table::initial::NewRows;
use flambeau_table::rows::{Place, Rows};
use proptest::prelude::*;
use shared_proto::job::Adagrad;
use shared_proto::payload::LeF32;
use shared_proto::table::{Initializer, RowOptimizer, TableSpec};

fn spec(dimension: u32, initializer: Initializer) -> TableSpec {
    TableSpec {
        name: "item".to_owned(),
        dimension,
        buckets: 16,
        initializer,
        seed: 7,
        ..TableSpec::default()
    }
}

const UNIFORM: Initializer = Initializer::Uniform { limit: 0.5 };

fn gradients(values: &[f32]) -> Vec<LeF32> {
    values.iter().copied().map(LeF32::from).collect()
}

/// Returns the initial values of a row.
fn initial(spec: &TableSpec, id: u64) -> Vec<f32> {
    let mut values = vec![f32::NAN; spec.dimension as usize];
    NewRows::new(spec).write(id, &mut values);
    values
}

/// Finds the rows of ids, and creates those that are not there.
fn create(rows: &mut Rows, ids: &[u64], places: &mut Vec<Place>) {
    places.clear();
    places.extend(ids.iter().map(|id| rows.create(*id)));
}

#[derive(Clone, Debug)]
enum Change {
    /// Adds 1 to the values of these rows, by a gradient.
    Update(Vec<u64>),
    Remove(Vec<u64>),
}

fn change() -> impl Strategy<Value = Change> {
    // Few ids, so that they meet again; some have only high bits.
    let id = prop_oneof![0..200u64, (0..50u64).prop_map(|id| id << 40)];
    let ids = prop::collection::vec(id, 0..300);
    prop_oneof![
        3 => ids.clone().prop_map(Change::Update),
        1 => ids.prop_map(Change::Remove),
    ]
}

proptest! {
    #[test]
    fn rows_are_those_of_a_map(changes in prop::collection::vec(change(), 1..30), dimension in 1..20u32) {
        let spec = spec(dimension, UNIFORM);
        let (mut rows, mut map) = (Rows::new(&spec), BTreeMap::<u64, Vec<f32>>::new());
        let mut places = Vec::new();
        for change in changes {
            match change {
                Change::Update(mut ids) => {
                    ids.sort_unstable();
                    ids.dedup();
                    create(&mut rows, &ids, &mut places);
                    let minus_one = gradients(&vec![-1.0; ids.len() * dimension as usize]);
                    prop_assert!(rows.update(&places, &minus_one, 1.0.into(), 0));
                    for id in ids {
                        let row = map.entry(id).or_insert_with(|| initial(&spec, id));
                        row.iter_mut().for_each(|value| *value += 1.0);
                    }
                }
                Change::Remove(ids) => for id in ids {
                    prop_assert_eq!(rows.remove(id), map.remove(&id).is_some());
                },
            }
            prop_assert_eq!(rows.len(), map.len());
            let mut ids: Vec<u64> = rows.places().map(|(_, id)| id).collect();
            ids.sort_unstable();
            prop_assert!(ids.iter().eq(map.keys()));
            rows.find(&ids, &mut places);
            for (id, place) in ids.iter().zip(&places) {
                prop_assert_eq!(rows.values(*place), &map[id][..]);
            }
        }
    }
}

#[test]
fn reading_creates_no_row() {
    let spec = spec(4, UNIFORM);
    let mut rows = Rows::new(&spec);
    let mut places = Vec::new();
    create(&mut rows, &[5], &mut places);
    assert!(rows.update(&places, &gradients(&[1.0; 4]), 1.0.into(), 0));
    let ids = [9, 5, u64::MAX];
    rows.find(&ids, &mut places);
    assert_eq!([places[0], places[2]], [Place::NONE; 2]);
    let mut values = Vec::new();
    rows.read(&ids, &places, &mut values);
    let updated = initial(&spec, 5).into_iter().map(|value| value - 1.0);
    let expected = initial(&spec, 9)
        .into_iter()
        .chain(updated)
        .chain(initial(&spec, u64::MAX));
    assert_eq!(values, expected.collect::<Vec<f32>>());
    assert_eq!(rows.len(), 1);
}

#[test]
fn initial_values_follow_from_seed_table_and_id() {
    let normal = Initializer::Normal { deviation: 0.02 };
    for initializer in [UNIFORM, normal] {
        let first = spec(8, initializer);
        // The order in which rows are made does not matter.
        let new_rows = NewRows::new(&first);
        let mut values = [0.0; 8];
        new_rows.write(3, &mut values);
        new_rows.write(1, &mut values);
        assert_eq!(values[..], initial(&first, 1));
        assert_ne!(initial(&first, 1), initial(&first, 2));
        let others = [
            TableSpec {
                seed: 8,
                ..first.clone()
            },
            TableSpec {
                name: "user".to_owned(),
                ..first.clone()
            },
        ];
        for other in others {
            assert_ne!(initial(&first, 1), initial(&other, 1));
        }
        // A wider table begins with the same values.
        assert_eq!(initial(&spec(12, initializer), 1)[..8], initial(&first, 1));
    }
    assert_eq!(initial(&spec(3, Initializer::Zeros), 1), [0.0; 3]);
}

#[test]
fn initial_values_have_their_distribution() {
    let moments = |initializer| {
        let spec = spec(10, initializer);
        let values: Vec<f32> = (0..10_000).flat_map(|id| initial(&spec, id)).collect();
        let count = values.len() as f64;
        let mean = values.iter().map(|v| f64::from(*v)).sum::<f64>() / count;
        let square = values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / count;
        let largest = values.iter().fold(0f32, |largest, v| largest.max(v.abs()));
        (mean, square.sqrt(), largest)
    };
    let (mean, deviation, largest) = moments(UNIFORM);
    assert!(mean.abs() < 5e-3 && (deviation - 0.5 / 3f64.sqrt()).abs() < 2e-3);
    assert!((0.499..=0.5).contains(&largest), "{largest}");
    let (mean, deviation, largest) = moments(Initializer::Normal { deviation: 2.0 });
    assert!(mean.abs() < 3e-2 && (deviation - 2.0).abs() < 2e-2);
    assert!((7.0..13.0).contains(&largest), "{largest}");
}

#[test]
fn a_value_that_becomes_infinite_is_noticed() {
    for at in [0, 4, 2999] {
        let mut rows = Rows::new(&spec(3, Initializer::Zeros));
        let ids: Vec<u64> = (0..1000).collect();
        let mut places = Vec::new();
        create(&mut rows, &ids, &mut places);
        let mut gradient = vec![1.0; 3000];
        assert!(rows.update(&places, &gradients(&gradient), 2.0.into(), 0));
        gradient[at] = f32::MAX;
        assert!(
            !rows.update(&places, &gradients(&gradient), 2.0.into(), 0),
            "{at}"
        );
    }
}

#[test]
fn memory_is_little_more_than_ids_values_and_state() {
    for (count, most) in [(100_000u64, 1.25), (1_000_000, 1.2)] {
        let mut spec = spec(16, Initializer::Zeros);
        spec.optimizer = RowOptimizer::RowAdagrad(Adagrad::default());
        let mut rows = Rows::new(&spec);
        let ids: Vec<u64> = (0..count).collect();
        create(&mut rows, &ids, &mut Vec::new());
        let needed = count as usize * (8 + 4 * 16 + 4);
        let ratio = rows.bytes() as f64 / needed as f64;
        assert!((1.0..most).contains(&ratio), "{count} rows: {ratio}");
    }
    let few = {
        let mut rows = Rows::new(&spec(16, Initializer::Zeros));
        create(&mut rows, &[1, 2, 3], &mut Vec::new());
        rows.bytes()
    };
    assert!(few < 2000, "{few}");
}
