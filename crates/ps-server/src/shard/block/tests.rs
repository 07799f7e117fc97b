//! Updates, watermarks and staged gradients of a single block.

mod stale;

use super::dense::PART;
use super::*;
use shared_proto::blocks::VariableSpec;
use shared_proto::ids::{Epoch, Generation, RunNumber, TaskId};
use shared_proto::job::{Adam, Job, Optimizer, Sgd};
use shared_proto::payload::Dtype;

fn worker(index: u32, generation: u64) -> Task {
    Task {
        id: TaskId::worker(index),
        generation: Generation(generation),
    }
}

fn from(task: Task, clock: u64, sequence: u64) -> Origin {
    Origin {
        job: "j".to_owned(),
        run: RunNumber::default(),
        task,
        epoch: Epoch(1),
        clock: Clock(clock),
        sequence: Sequence(sequence),
    }
}

fn elements(values: &[f32]) -> Elements {
    Elements::from(values.to_vec())
}

fn gradient(values: &[f32]) -> Values {
    elements(values).into()
}

fn rule(optimizer: Optimizer, learning_rate: f32) -> VariableRule {
    let mut job = Job {
        optimizer,
        ..Job::default()
    };
    *job.optimizer.learning_rate_mut() = learning_rate;
    VariableRule::new(&job, &VariableSpec::default(), 1)
}

fn sgd(learning_rate: f32) -> VariableRule {
    rule(Optimizer::Sgd(Sgd::default()), learning_rate)
}

fn adam(learning_rate: f32) -> VariableRule {
    rule(Optimizer::Adam(Adam::default()), learning_rate)
}

fn values(block: &mut Block) -> Elements {
    block.values(&Wanted::default(), &sgd(1.0)).unwrap()
}

fn weights(block: &mut Block) -> Vec<f32> {
    values(block).to_vec()
}

fn block(values: &[f32]) -> Block {
    let mut block = Block::empty();
    block.initialize(&elements(values), &sgd(1.0));
    block
}

#[test]
fn finite_gradients_that_make_a_value_infinite_are_noticed_wherever_it_is() {
    let length = 2 * PART + 3;
    for (place, rule, gradient_value) in [
        (0, sgd(2.0), f32::MAX),
        (PART, sgd(2.0), f32::MAX),
        (length - 1, sgd(2.0), f32::MAX),
        // The weight stays finite, but never changes again: its second moment is infinite.
        (PART - 1, adam(2.0), 1e30),
    ] {
        let mut block = Block::empty();
        block.initialize(&elements(&vec![1.0; length]), &rule);
        let mut values = vec![0.0; length];
        let (from, view) = (|sequence| from(worker(0, 1), 0, sequence), View::default());
        block
            .apply(&from(1), &view, &gradient(&values), Version(0), &rule)
            .unwrap();
        assert!(block.is_finite());
        values[place] = gradient_value;
        block
            .apply(&from(2), &view, &gradient(&values), Version(1), &rule)
            .unwrap();
        assert!(!block.is_finite(), "{place}");
    }
}

#[test]
fn an_update_raises_the_version_and_knows_its_staleness() {
    let (mut block, view) = (block(&[1.0, 2.0]), View::default());
    for (sequence, expected) in [(1, 0), (2, 1)] {
        let applied = block.apply(
            &from(worker(0, 1), 0, sequence),
            &view,
            &gradient(&[1.0, -1.0]),
            Version(0),
            &sgd(0.5),
        );
        let applied = applied.unwrap();
        assert_eq!(applied.version, Version(sequence));
        assert_eq!(applied.staleness, expected);
    }
    assert_eq!(weights(&mut block), [0.0, 3.0]);
}

#[test]
fn weights_that_are_being_sent_stay_as_they_were() {
    let (mut block, view) = (block(&[1.0, 2.0]), View::default());
    let held = values(&mut block);
    let from = from(worker(0, 1), 0, 1);
    let ones = gradient(&[1.0, 1.0]);
    block
        .apply(&from, &view, &ones, Version(0), &sgd(1.0))
        .unwrap();
    assert_eq!(held.to_vec(), [1.0, 2.0]);
    assert_eq!(weights(&mut block), [0.0, 1.0]);
}

#[test]
fn what_is_saved_stays_as_it_was_and_is_restored_whole() {
    let adam = adam(0.1);
    let (mut block, view) = (Block::empty(), View::default());
    block.initialize(&elements(&[1.0, -2.0]), &adam);
    let push = |block: &mut Block, sequence| {
        let from = from(worker(0, 3), sequence + 6, sequence);
        let gradient = gradient(&[0.5, 4.0]);
        block
            .apply(&from, &view, &gradient, Version(0), &adam)
            .unwrap()
    };
    push(&mut block, 1);
    let id = BlockId {
        variable: 0,
        index: 0,
    };
    let saved = block.share(id, 1).to_saved().unwrap();
    let before = weights(&mut block);
    push(&mut block, 2);
    assert_ne!(weights(&mut block), before);

    let mut restored = Block::restore(saved, None, BucketStorage::default()).unwrap();
    assert_eq!(
        (weights(&mut restored), restored.version()),
        (before, Version(1))
    );
    assert_eq!(restored.has_taken(worker(0, 3), Sequence(1)), Taken::Yes);
    assert_eq!(restored.has_taken(worker(0, 3), Sequence(2)), Taken::No);
    let last = restored.watermark_of(worker(0, 3)).unwrap();
    let found = (last.clock, last.version, last.taken);
    assert_eq!(found, (Clock(7), Version(1), 1));
    push(&mut restored, 2);
    let saved = |block: &mut Block| block.share(id, 1).to_saved().unwrap();
    assert_eq!(saved(&mut restored), saved(&mut block));
}

#[test]
fn watermarks_know_what_was_taken_and_stay_few() {
    let mut block = block(&[0.0]);
    for index in 0..100 {
        let task = worker(index, 1);
        let view = View {
            workers: vec![task, worker(index + 1, 1)],
            ..View::default()
        };
        block.stage(&from(task, 0, 7), &view, gradient(&[]));
        assert_eq!(block.has_taken(task, Sequence(7)), Taken::Yes);
        assert_eq!(block.has_taken(task, Sequence(3)), Taken::Unknown);
        assert_eq!(block.has_taken(task, Sequence(8)), Taken::No);
        assert_eq!(block.has_taken(worker(index, 2), Sequence(1)), Taken::No);
        assert!(block.watermarks.len() <= 2 + DEPARTED_WATERMARKS);
    }
}

#[test]
fn watermarks_of_those_who_live_and_of_the_newest_departed_stay() {
    let mut block = block(&[0.0]);
    let stays = worker(100, 1);
    for index in 0..40 {
        let comes = worker(index, 1);
        let view = View {
            workers: vec![comes, stays],
            ..View::default()
        };
        if index == 0 {
            block.stage(&from(stays, 0, 7), &view, gradient(&[]));
        }
        block.stage(&from(comes, 0, 7), &view, gradient(&[]));
    }
    let has = |task| block.has_taken(task, Sequence(7)) == Taken::Yes;
    assert!(has(stays) && has(worker(39, 1)));
    let departed: Vec<u32> = (0..39).filter(|index| has(worker(*index, 1))).collect();
    assert_eq!(
        departed,
        (39 - DEPARTED_WATERMARKS as u32..39).collect::<Vec<_>>()
    );
    assert_eq!(block.watermarks().len(), DEPARTED_WATERMARKS + 2);
}

#[test]
fn a_block_counts_what_it_has_taken_of_each_worker() {
    let (mut block, view) = (block(&[0.0]), View::default());
    for (index, sequence) in [(0, 1), (1, 1), (0, 4)] {
        let from = from(worker(index, 1), sequence, sequence);
        block
            .apply(&from, &view, &gradient(&[1.0]), Version(0), &sgd(1.0))
            .unwrap();
    }
    let last = block.watermark_of(worker(0, 1)).unwrap();
    let found = (last.taken, last.before, last.version, last.clock);
    assert_eq!(found, (2, Sequence(1), Version(3), Clock(4)));
    // The block knows the last two messages, and nothing about those between them.
    let taken = [1, 2, 4, 5].map(|number| block.has_taken(worker(0, 1), Sequence(number)));
    assert_eq!(taken, [Taken::Yes, Taken::Unknown, Taken::Yes, Taken::No]);
}

#[test]
fn a_block_has_a_size_once_it_has_values() {
    let adam = adam(0.1);
    let mut block = Block::empty();
    assert!(!block.initialized() && block.bytes() == 0);
    block.initialize(&elements(&[1.0, 2.0, 3.0]), &adam);
    // Three weights, and two slots for each.
    assert!(block.initialized() && block.bytes() == 9 * size_of::<f32>());
}

#[test]
fn a_gradient_is_the_first_of_its_step_once() {
    let (mut block, view) = (block(&[0.0]), View::default());
    let mut stage = |clock, sequence| {
        let from = from(worker(0, 1), clock, sequence);
        block.stage(&from, &view, gradient(&[1.0]))
    };
    assert_eq!(
        [stage(5, 1), stage(5, 2), stage(6, 3)].map(|staging| staging.is_first),
        [true, false, true]
    );
}

#[test]
fn a_newcomer_that_an_older_view_lacks_keeps_its_watermark() {
    let mut block = block(&[0.0]);
    let newer = View {
        workers: vec![worker(0, 1), worker(1, 1)],
        ..View::default()
    };
    block.stage(&from(worker(1, 1), 0, 5), &newer, gradient(&[]));
    block.stage(&from(worker(0, 1), 0, 5), &View::default(), gradient(&[]));
    assert_eq!(block.has_taken(worker(1, 1), Sequence(5)), Taken::Yes);
}

#[test]
fn a_commit_takes_the_weighted_mean_of_its_contributors_and_drops_the_rest() {
    let (mut block, view) = (block(&[0.0]), View::default());
    for (index, gradient) in [(0, 1.0), (1, 4.0), (2, 100.0)] {
        let gradient = self::gradient(&[gradient]);
        block.stage(&from(worker(index, 1), 5, 1), &view, gradient);
    }
    let mut commit = Commit {
        step: Clock(5),
        contributors: vec![(worker(0, 1), 2), (worker(1, 1), 1)],
        clip_factor: None,
    };
    let mut mean = Vec::new();
    block
        .commit(&commit, &sgd(1.0), 1.0, Limit::OFF, &mut mean)
        .unwrap();
    assert_eq!(weights(&mut block), [-2.0]);
    assert!(block.version() == Version(1) && block.staged.is_empty());

    let nobody = Commit {
        step: Clock(6),
        contributors: Vec::new(),
        clip_factor: None,
    };
    block
        .commit(&nobody, &sgd(1.0), 1.0, Limit::OFF, &mut mean)
        .unwrap();
    assert_eq!(
        (weights(&mut block), block.version()),
        (vec![-2.0], Version(1))
    );

    commit.step = Clock(6);
    let missing = block.commit(&commit, &sgd(1.0), 1.0, Limit::OFF, &mut mean);
    assert_eq!(missing, Err(NotCommitted::NotStaged(worker(0, 1))));
    assert_eq!(
        (weights(&mut block), block.version()),
        (vec![-2.0], Version(1))
    );
}

#[test]
fn the_limits_of_a_step_are_those_of_the_mean_over_all_workers() {
    let (mut block, view) = (block(&[0.0, 0.0]), View::default());
    for (index, gradient) in [(0, [6.0, 0.0]), (1, [0.0, 8.0])] {
        let gradient = self::gradient(&gradient);
        block.stage(&from(worker(index, 1), 5, 1), &view, gradient);
    }
    let commit = Commit {
        step: Clock(5),
        contributors: vec![(worker(0, 1), 1), (worker(1, 1), 1)],
        clip_factor: Some(0.5),
    };
    let mut sum = Vec::new();
    // The mean is (3, 4).
    assert_eq!(block.squares(&commit, Limit::OFF, &mut sum), Ok(25.0));
    let limit = Limit {
        value: Some(3.5),
        factor: 1.0,
    };
    assert_eq!(block.squares(&commit, limit, &mut sum), Ok(9.0 + 12.25));
    let limit = Limit {
        factor: 0.5,
        ..limit
    };
    let committed = block.commit(&commit, &sgd(1.0), 1.0, limit, &mut sum);
    assert_eq!(committed, Ok(()));
    assert_eq!(weights(&mut block), [-1.5, -1.75]);
}

#[test]
fn the_mean_of_a_long_block_has_the_same_bits_as_one_computed_element_by_element() {
    let length = 2 * PART + 3;
    let mut block = block(&vec![0.5; length]);
    let numbers = |seed: u32| -> Vec<f32> {
        let number = |i: usize| (i as u32 ^ seed).wrapping_mul(2_654_435_761) as f32 / 1e9;
        (0..length).map(number).collect()
    };
    let gradients = [
        (2, elements(&numbers(1))),
        (1, elements(&numbers(2)).to(Dtype::Bf16)),
        (4, elements(&numbers(3)).to(Dtype::F16)),
    ];
    let mut contributors = Vec::new();
    for (index, (samples, gradient)) in gradients.iter().enumerate() {
        let task = worker(index as u32, 1);
        block.stage(&from(task, 5, 1), &View::default(), gradient.clone().into());
        contributors.push((task, *samples));
    }
    let commit = Commit {
        step: Clock(5),
        contributors,
        clip_factor: None,
    };
    block
        .commit(&commit, &sgd(1.0), 1.0, Limit::OFF, &mut Vec::new())
        .unwrap();

    let gradients = gradients.map(|(samples, gradient)| (samples, gradient.to_vec()));
    let expected = |i: usize| {
        let add = |sum: f32, (samples, gradient): &(u64, Vec<f32>)| {
            sum + (*samples as f64 / 7.0) as f32 * gradient[i]
        };
        0.5 - gradients.iter().fold(0.0, add)
    };
    let expected: Vec<f32> = (0..length).map(expected).collect();
    let weights = weights(&mut block);
    for i in 0..length {
        let (weight, expected) = (weights[i].to_bits(), expected[i].to_bits());
        assert_eq!(weight, expected, "element {i}");
    }
}
