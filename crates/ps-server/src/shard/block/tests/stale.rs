//! Tests of updates by gradients of old weights.

use super::*;

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

/// `tests/vectors/make_stale_vectors.py` says how the vectors were made.
#[test]
fn steps_by_old_weights_agree_with_an_independent_implementation() {
    let cases: Vec<StaleCase> =
        serde_json::from_str(include_str!("../../../../tests/vectors/stale.json")).unwrap();
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
        let rule = VariableRule::of(&job, &VariableSpec::default(), 40);
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
                    assert!(error < 1e-5, "{what}: {error}");
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
    let measured = VariableRule::of(&Job::default(), &measured, 1);
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
