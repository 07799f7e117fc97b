//! Tests of updates by gradients of old weights.

use super::*;
use crate::shard::block::rows::BucketStorage;
use shared_proto::table::hash::hash;
use shared_proto::table::{RowOptimizer, Rows};

#[derive(serde::Deserialize)]
struct StaleCases {
    dense: Vec<StaleCase>,
    rows: Vec<RowsCase>,
}

#[derive(serde::Deserialize)]
struct StaleCase {
    optimizer: Optimizer,
    workers: u32,
    initial: Vec<f32>,
    updates: Vec<StaleUpdate>,
}

#[derive(serde::Deserialize)]
struct StaleUpdate {
    based_on: u64,
    gradient: Vec<f32>,
    factor: f32,
    weights: Vec<f32>,
    average: Vec<f32>,
    look_ahead: Option<Vec<f32>>,
}

#[derive(serde::Deserialize)]
struct RowsCase {
    optimizer: RowOptimizer,
    updates: Vec<RowsUpdate>,
    rows: Vec<(u64, Vec<f32>)>,
}

#[derive(serde::Deserialize)]
struct RowsUpdate {
    based_on: u64,
    ids: Vec<u64>,
    gradients: Vec<f32>,
}

/// Returns the vectors. `tests/vectors/make_stale_vectors.py` says how they were made.
fn cases() -> StaleCases {
    serde_json::from_str(include_str!("../../../../tests/vectors/stale.json")).unwrap()
}

/// Returns a view of so many workers.
fn view_of(workers: u32) -> View {
    View {
        workers: (0..workers).map(|index| worker(index, 1)).collect(),
        ..View::default()
    }
}

/// Returns the largest error, relative to the expected number, or to 0.1 if that is smaller.
fn largest_error(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    let error =
        |(found, expected): (&f32, &f32)| (found - expected).abs() / expected.abs().max(0.1);
    found.iter().zip(expected).map(error).fold(0.0, f32::max)
}

/// Returns the values of a block that an evaluation asks for.
fn averages(block: &mut Block, rule: &VariableRule) -> Vec<f32> {
    let wanted = Wanted {
        average: true,
        ..Wanted::default()
    };
    block.values(&wanted, rule).unwrap().to_vec()
}

#[test]
fn steps_by_old_weights_agree_with_an_independent_implementation() {
    let cases = cases().dense;
    let mut shortened = 0;
    let both = cases
        .iter()
        .flat_map(|case| [(case, Some(0.5)), (case, None)]);
    for (case, ema_decay) in both {
        let job = Job {
            optimizer: case.optimizer.clone(),
            ema_decay,
            epochs: 8,
            ..Job::default()
        };
        // Weights are averaged over 5 updates.
        let rule = VariableRule::new(&job, &VariableSpec::default(), 40);
        let (mut block, view) = (Block::empty(), view_of(case.workers));
        block.initialize(&elements(&case.initial), &rule);
        assert_eq!(block.look_ahead(&view, &rule), None);
        let mut average = Vec::new();
        for (sequence, update) in (1..).zip(&case.updates) {
            let from = from(worker(0, 1), sequence - 1, sequence);
            let based_on = Version(update.based_on);
            let applied = block
                .apply(&from, &view, &gradient(&update.gradient), based_on, &rule)
                .unwrap();
            let what = format!(
                "{:?}, {} workers, update {sequence}",
                job.optimizer, case.workers
            );
            let factor = applied.step.unwrap().factor as f32;
            assert!((factor - update.factor).abs() < 1e-5, "{what}");
            shortened += u32::from(update.factor < 1.0);
            let found = weights(&mut block);
            let error = largest_error(&found, &update.weights);
            assert!(error < 1e-5, "{what}: {error}");
            // Averages follow the shortened step.
            average = match (ema_decay, average.is_empty()) {
                (None, _) => update.average.clone(),
                (_, true) => found,
                (Some(decay), false) => found
                    .iter()
                    .zip(average)
                    .map(|(w, a)| w + decay * (a - w))
                    .collect(),
            };
            let kept = averages(&mut block, &rule);
            assert!(largest_error(&kept, &average) < 1e-5, "{what}");
            let ahead = block.look_ahead(&view, &rule).map(|values| values.to_vec());
            match (ahead, &update.look_ahead) {
                (None, None) => {}
                (Some(found), Some(expected)) => {
                    let error = largest_error(&found, expected);
                    assert!(error < 5e-5, "{what}: {error}");
                }
                (found, _) => panic!("{what}: {found:?}"),
            }
        }
        // A single worker goes on: the model is that of its weights.
        let (from, alone) = (from(worker(0, 1), 99, 99), view_of(1));
        let last = gradient(&case.updates[0].gradient);
        block
            .apply(&from, &alone, &last, block.version(), &rule)
            .unwrap();
        if ema_decay.is_none() {
            assert_eq!(averages(&mut block, &rule), weights(&mut block));
        }
        // Averages of several workers begin anew.
        let mut mean = Vec::new();
        for sequence in 100..103 {
            let from = self::from(worker(1, 1), sequence, sequence);
            block
                .apply(&from, &view, &last, block.version(), &rule)
                .unwrap();
            let newest = weights(&mut block);
            let number = (sequence - 99) as f32;
            mean = match mean.is_empty() {
                true => newest,
                false => mean
                    .iter()
                    .zip(newest)
                    .map(|(mean, w)| mean + (w - mean) / number)
                    .collect(),
            };
            if job.averages_last_weights() {
                assert!(largest_error(&averages(&mut block, &rule), &mean) < 1e-5);
            }
        }
    }
    assert!(shortened > 50, "{shortened}");
}

#[test]
fn updates_of_a_single_worker_and_of_measured_variables_are_applied_as_they_are() {
    let large = gradient(&[100.0, -100.0]);
    let trained = sgd(0.5);
    let measured = VariableSpec {
        kind: shared_proto::blocks::VariableKind::Averaged,
        ..VariableSpec::default()
    };
    let measured = VariableRule::new(&Job::default(), &measured, 1);
    for (rule, workers, expected) in [
        (&trained, 1, [-49.0, 52.0]),
        (&measured, 8, [-99.0, 102.0]),
        // Half of the step, its share in a synchronous one: the weights are small beside it.
        (&trained, 2, [-24.0, 27.0]),
    ] {
        let mut block = block(&[1.0, 2.0]);
        let (from, view) = (from(worker(0, 1), 0, 1), view_of(workers));
        block.apply(&from, &view, &large, Version(0), rule).unwrap();
        assert_eq!(weights(&mut block), expected, "{workers}");
        assert_eq!(block.look_ahead(&view, rule), None);
    }
}

#[test]
fn a_step_of_a_large_block_is_limited_as_that_of_a_small_one() {
    let (small, large) = (vec![0.02; PART], vec![0.02; 40 * PART + 3]);
    let (small, large) = (factors(&small, 6), factors(&large, 6));
    assert_eq!(small[0], 0.125);
    assert!(small[1..].iter().all(|factor| (0.2..0.9).contains(factor)));
    for (small, large) in small.iter().zip(&large) {
        assert!((small - large).abs() < 1e-3, "{small} {large}");
    }
}

#[test]
fn each_update_of_a_large_block_measures_other_parts() {
    // The gradient of one part in four is large.
    let gradient: Vec<f32> = (0..40 * PART)
        .map(|element| match (element / PART) % 4 {
            0 => 0.02,
            _ => 1e-6,
        })
        .collect();
    let factors = factors(&gradient, 9);
    let shortened = factors[1..].iter().filter(|factor| **factor < 0.9);
    assert_eq!(shortened.count(), 2, "{factors:?}");
}

/// Returns the factors of the first steps of a block. Each weight is 1 before them.
fn factors(gradients: &[f32], steps: u64) -> Vec<f64> {
    let (mut block, view) = (block(&vec![1.0; gradients.len()]), view_of(8));
    let gradient = gradient(gradients);
    let step = |sequence| {
        let from = from(worker(0, 1), sequence - 1, sequence);
        let based_on = block.version();
        let applied = block.apply(&from, &view, &gradient, based_on, &sgd(0.5));
        applied.unwrap().step.unwrap().factor
    };
    (1..=steps).map(step).collect()
}

#[test]
fn rows_of_a_single_worker_are_updated_by_whole_steps() {
    let spec = TableSpec {
        ..TableSpec::default()
    };
    let rule = VariableRule::of_table(&Job::default(), &spec, 100);
    let ones = vec![-1.0; spec.dimension as usize];
    let gradient = Values::Rows(Rows {
        ids: vec![5],
        values: ones.into(),
    });
    let mut bucket = Block::of_table(&spec, 0, BucketStorage::default());
    let mut row = |sequence, workers, based_on| {
        let from = from(worker(0, 1), sequence, sequence);
        let view = view_of(workers);
        bucket
            .apply(&from, &view, &gradient, Version(based_on), &rule)
            .unwrap();
        let wanted = Wanted {
            ids: vec![5],
            ..Wanted::default()
        };
        bucket.values(&wanted, &rule).unwrap().to_vec()[0]
    };
    let rate = spec.optimizer.learning_rate();
    // Two gradients of two workers: an update lies between pull and push of the second one.
    let steps = [row(1, 2, 0), row(2, 2, 0)].map(|value| value / rate);
    assert!((steps[0] - 1.0).abs() < 1e-5 && (steps[1] - 1.5).abs() < 1e-5);
    // One worker alone, and two again: what was noted before does not count.
    let steps = [row(3, 1, 0), row(4, 2, 3), row(5, 2, 3)].map(|value| value / rate);
    for (found, expected) in steps.into_iter().zip([2.5, 3.5, 4.0]) {
        assert!((found - expected).abs() < 1e-5, "{steps:?}");
    }
}

#[test]
fn steps_of_rows_agree_with_an_independent_implementation() {
    let cases = cases().rows;
    assert!(!cases.is_empty());
    for case in cases {
        let dimension = case.rows[0].1.len();
        let spec = TableSpec {
            dimension: dimension as u32,
            optimizer: case.optimizer,
            ..TableSpec::default()
        };
        let rule = VariableRule::of_table(&Job::default(), &spec, 100);
        let (mut bucket, view) = (
            Block::of_table(&spec, 0, BucketStorage::default()),
            view_of(8),
        );
        for (sequence, update) in (1..).zip(&case.updates) {
            let gradients = update.gradients.chunks_exact(dimension);
            let mut rows: Vec<(u64, &[f32])> = update.ids.iter().copied().zip(gradients).collect();
            rows.sort_unstable_by_key(|(id, _)| hash(*id));
            let gradient = Values::Rows(Rows {
                ids: rows.iter().map(|(id, _)| *id).collect(),
                values: rows
                    .iter()
                    .flat_map(|(_, gradient)| *gradient)
                    .copied()
                    .collect::<Vec<f32>>()
                    .into(),
            });
            let (from, based_on) = (
                from(worker(0, 1), sequence - 1, sequence),
                Version(update.based_on),
            );
            let applied = bucket.apply(&from, &view, &gradient, based_on, &rule);
            assert_eq!(applied.unwrap().step, None);
        }
        for (id, expected) in case.rows {
            let wanted = Wanted {
                ids: vec![id],
                ..Wanted::default()
            };
            let found = bucket.values(&wanted, &rule).unwrap().to_vec();
            let error = largest_error(&found, &expected);
            assert!(error < 1e-5, "{:?}, row {id}: {error}", spec.optimizer);
        }
    }
}
