//! A model in stages on several devices computes what one device does.
//!
//! - `groups`: stages on several workers
//! - `own`: data and models of one's own

#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use candle_core::Device;
use flambeau_replica::{
    Computed, DeviceReplicas, Evaluation, EvaluationPart, Mirror, Positions, Replica, ReplicaError,
    Step, StepsMade,
};
use model::Metrics;
use model::registry::Registry;
use shared_proto::job::Job;
use shared_proto::payload::Elements;
use shared_proto::step::Gradients;

mod groups;
mod own;

use own::{
    Astray, BACKWARD, Chain, Doubled, FORWARD, Fails, Mute, Sequences, Sleepy, Tagged, Tied,
};

fn registry() -> Registry {
    let registry = Registry::builtin().data::<Sequences>("sequences");
    let registry = registry.data::<Tagged>("tagged");
    let registry = registry.model::<Chain>("chain").model::<Fails>("fails");
    registry
        .model::<Astray>("astray")
        .model::<Mute>("mute")
        .model::<Tied>("tied")
        .model::<Doubled>("doubled")
        .model::<Sleepy>("sleepy")
}

const MLP: &str = "[model]\nname = \"mlp\"\nhidden = [24, 16, 12]\n";
const OWN: &str = "[model]\nname = \"chain\"\n";
const CNN: &str = "[model]\nname = \"cnn\"\nchannels = [4, 6]\nhidden = [16]\n";
const RESNET: &str = "[model]\nname = \"resnet20\"\n";
const TRANSFORMER: &str = "[data]\nkind = \"sequences\"\n[model]\nname = \"transformer\"\n[model.options]\nlayers = 4\nsize = 16\n";
const DROPOUT: &str = "[data]\nkind = \"sequences\"\n[model]\nname = \"transformer\"\n[model.options]\nlayers = 4\nsize = 16\ndropout = 0.3\n";

/// The first stage, and one in the middle, have nothing to train.
const FROZEN: &str = "[model]\nname = \"mlp\"\nhidden = [24, 16, 12]\n[[groups]]\nvariables = \"hidden.0.*\"\nfrozen = true\n[[groups]]\nvariables = \"hidden.2.*\"\nfrozen = true\n";
/// Categories, of which samples have any number.
const CATEGORIES: &str =
    "[data]\nkind = \"tagged\"\n[model]\nname = \"mlp\"\nembedding = 4\nhidden = [16, 12, 8]\n";
const BF16: &str = "[model]\nname = \"mlp\"\nprecision = \"bf16\"\nhidden = [24, 16, 12]\n";

/// Returns a replica of a job on this number of devices.
async fn start(job: &str, devices: usize) -> std::result::Result<DeviceReplicas, ReplicaError> {
    let job = Arc::new(Job::from_toml(job).unwrap());
    let devices = vec![Device::Cpu; devices];
    DeviceReplicas::start(&job, &registry(), &devices).await
}

async fn one_device(model: &str) -> DeviceReplicas {
    let job = format!("{model}[strategy]\nname = \"one-device\"\n");
    start(&job, 1).await.unwrap()
}

/// Returns a replica with a model in stages.
async fn stages(model: &str, strategy: &str, devices: usize) -> DeviceReplicas {
    let job = format!("{model}[strategy]\nname = \"model-parallel\"\n{strategy}");
    start(&job, devices).await.unwrap()
}

fn positions(start: u64, samples: u64) -> Positions {
    Positions {
        data_epoch: 0,
        start,
        end: start + samples,
    }
}

async fn compute(replica: &DeviceReplicas, positions: Positions) -> Computed {
    replica.prepare(positions).await;
    let step = replica.compute(positions, Step::default());
    tokio::time::timeout(Duration::from_secs(60), step)
        .await
        .expect("the stages hang")
        .unwrap()
}

fn numbers(elements: &Elements) -> Vec<f32> {
    let mut numbers = vec![0.0; elements.len()];
    elements.copy_to(&mut numbers);
    numbers
}

/// Returns the largest difference of two gradients, in parts of the largest number.
fn difference(found: &Gradients, expected: &Gradients) -> f32 {
    let (mut most, mut largest) = (0f32, 0f32);
    assert_eq!(found.values.len(), expected.values.len());
    for (found, expected) in found.values.iter().zip(&expected.values) {
        for (found, expected) in numbers(found).into_iter().zip(numbers(expected)) {
            most = most.max((found - expected).abs());
            largest = largest.max(expected.abs());
        }
    }
    most / largest
}

/// The settings of stages: 4 stages on 4 and on 2 devices, 3 on 2, and both schedules.
const STAGES: [(&str, usize); 5] = [
    ("schedule = \"gpipe\"\n", 4),
    ("schedule = \"1f1b\"\n", 4),
    ("schedule = \"gpipe\"\nstages = 4\n", 2),
    ("schedule = \"1f1b\"\nstages = 4\n", 2),
    ("stages = 3\n", 2),
];

#[tokio::test]
async fn stages_compute_what_one_device_does() {
    for model in [MLP, OWN, CNN, TRANSFORMER, FROZEN, CATEGORIES] {
        let alone = one_device(model).await;
        // Micro-batches of one size, of different sizes, and fewer samples than micro-batches.
        for samples in [16, 13, 3] {
            let all = positions(5, samples);
            let expected = compute(&alone, all).await;
            let mut first: Option<Gradients> = None;
            for (strategy, devices) in STAGES {
                let cut = stages(model, &format!("{strategy}micro_batches = 6\n"), devices).await;
                let found = compute(&cut, all).await;
                let error = difference(&found.gradients, &expected.gradients);
                let what = format!("{model}{strategy}{devices} devices, {samples} samples");
                assert!(error < 1e-5, "{what}: {error:.1e}");
                assert!((found.loss - expected.loss).abs() < 1e-5, "{what}");
                for _ in 0..3 {
                    let again = compute(&cut, all).await;
                    assert_eq!(again.gradients, found.gradients, "{what}: the bits differ");
                }
                // The bits depend neither on the schedule nor on the stages and devices.
                let first = first.get_or_insert_with(|| found.gradients.clone());
                assert_eq!(found.gradients, *first, "{what}");
            }
        }
    }
}

#[tokio::test]
async fn a_single_micro_batch_has_the_bits_of_one_device() {
    // With batch normalisation and with dropout: their numbers follow from the blocks, and not from the stages.
    for model in [RESNET, DROPOUT, MLP, FROZEN, BF16] {
        let alone = one_device(model).await;
        let expected = compute(&alone, positions(0, 12)).await;
        for (strategy, devices) in STAGES {
            let cut = stages(model, &format!("{strategy}micro_batches = 1\n"), devices).await;
            let found = compute(&cut, positions(0, 12)).await;
            assert_eq!(found.gradients, expected.gradients, "{model}{strategy}");
            assert_eq!(found.loss, expected.loss);
        }
    }
}

#[tokio::test]
async fn batch_normalisation_and_dropout_are_of_micro_batches() {
    for (model, least) in [(RESNET, 1e-3), (DROPOUT, 1e-3)] {
        // A single stage makes the micro-batches one after the other.
        let in_turn = stages(model, "micro_batches = 4\n", 1).await;
        let all = positions(3, 14);
        let expected = compute(&in_turn, all).await;
        let whole = compute(&one_device(model).await, all).await;
        let error = difference(&expected.gradients, &whole.gradients);
        assert!(
            error > least,
            "{model}: micro-batches count for themselves: {error:.1e}"
        );
        for (strategy, devices) in STAGES {
            let cut = stages(model, &format!("{strategy}micro_batches = 4\n"), devices).await;
            let found = compute(&cut, all).await;
            assert_eq!(found.gradients, expected.gradients, "{model}{strategy}");
        }
    }
}

/// Running statistics change by the mean of what each micro-batch alone would change, weighted by samples.
#[tokio::test]
async fn running_statistics_are_averaged_over_micro_batches() {
    let (alone, cut) = (
        one_device(RESNET).await,
        stages(RESNET, "micro_batches = 3\n", 4).await,
    );
    let found = compute(&cut, positions(0, 10)).await;
    // 10 samples are cut into 3, 3 and 4.
    let mut parts = Vec::new();
    for (start, samples) in [(0, 3), (3, 3), (6, 4)] {
        let part = compute(&alone, positions(start, samples)).await;
        parts.push((samples as f32 / 10.0, part.gradients));
    }
    let mut compared = 0;
    for (number, spec) in cut.description().variables.iter().enumerate() {
        let found = numbers(&found.gradients.values[number]);
        let of_parts: Vec<_> = parts
            .iter()
            .map(|(share, part)| (share, numbers(&part.values[number])))
            .collect();
        for (place, found) in found.into_iter().enumerate() {
            let expected: f32 = of_parts
                .iter()
                .map(|(share, part)| *share * part[place])
                .sum();
            assert!(
                (found - expected).abs() < 1e-4,
                "{spec}: {found} {expected}"
            );
            compared += usize::from(spec.name.contains("running_"));
        }
    }
    assert!(compared > 1000, "{compared}");
}

#[tokio::test]
async fn accumulated_batches_are_cut_too() {
    for model in [MLP, RESNET] {
        let model = format!("batch_size = 6\naccumulate = 3\n{model}");
        let (all, alone) = (positions(0, 15), one_device(&model).await);
        let expected = compute(&alone, all).await;
        for (strategy, devices) in STAGES {
            let micro = if model.contains("mlp") { 4 } else { 1 };
            let cut = stages(
                &model,
                &format!("{strategy}micro_batches = {micro}\n"),
                devices,
            )
            .await;
            let found = compute(&cut, all).await;
            let error = difference(&found.gradients, &expected.gradients);
            assert!(error < 1e-5, "{model}{strategy}: {error:.1e}");
        }
    }
}

/// Makes steps of updates, with the last one of an epoch smaller. Returns the values and the evaluation.
async fn train(replica: &DeviceReplicas, steps: u64) -> (Vec<f32>, Metrics) {
    for clock in 0..steps {
        let samples = if clock % 5 == 4 { 11 } else { 24 };
        let computed = compute(replica, positions(clock * 16, samples)).await;
        let gradient: Vec<f32> = computed.gradients.values.iter().flat_map(numbers).collect();
        replica
            .update(gradient.into(), StepsMade::default())
            .await
            .unwrap();
    }
    let mut part = EvaluationPart::First;
    let metrics = loop {
        match replica.evaluate(part).await.unwrap() {
            Evaluation::Done(metrics) => break metrics,
            Evaluation::Wants(_) => part = EvaluationPart::Next,
        }
    };
    (replica.state().await.unwrap().values, metrics)
}

#[tokio::test]
async fn fifty_updates_give_the_weights_of_one_device() {
    for optimizer in [
        "name = \"sgd\"\nlearning_rate = 0.1",
        "name = \"momentum\"",
        "name = \"adam\"",
    ] {
        for clip in ["", "clip_norm = 0.5\n"] {
            let model = format!("{clip}{MLP}[optimizer]\n{optimizer}\n");
            let (expected, measured) = train(&one_device(&model).await, 50).await;
            for (strategy, devices) in [STAGES[0], STAGES[3]] {
                let cut = stages(&model, strategy, devices).await;
                let (before, found_before) = (cut.state().await.unwrap().values, expected.clone());
                let moved = before.iter().zip(&found_before).map(|(a, b)| (a - b).abs());
                assert!(moved.fold(0.0, f32::max) > 0.01, "nothing was trained");
                let (found, evaluated) = train(&cut, 50).await;
                let apart = found.iter().zip(&expected).map(|(a, b)| (a - b).abs());
                let apart = apart.fold(0.0, f32::max);
                assert!(apart < 1e-5, "{model}{strategy}: {apart:.1e}");
                assert!((evaluated["accuracy"] - measured["accuracy"]).abs() < 1e-9);
            }
        }
    }
}

#[tokio::test]
async fn initial_values_come_back_and_values_move_between_devices() {
    let (alone, cut) = (one_device(MLP).await, stages(MLP, "", 4).await);
    let initial = alone.initial_values().await.unwrap();
    assert_eq!(cut.initial_values().await.unwrap(), initial);
    train(&cut, 3).await;
    assert_eq!(cut.initial_values().await.unwrap(), initial, "built anew");
    let state = cut.state().await.unwrap();
    alone
        .set_state(state.clone(), StepsMade::default())
        .await
        .unwrap();
    assert_eq!(alone.state().await.unwrap(), state);
}

/// Returns why a job is refused.
async fn refusal(job: &str, devices: usize) -> String {
    match start(job, devices).await {
        Ok(_) => panic!("it is not refused: {job}"),
        Err(error) => error.to_string(),
    }
}

#[tokio::test]
async fn what_cannot_be_cut_is_refused() {
    let parallel = "[strategy]\nname = \"model-parallel\"\n";
    for (job, devices, expected) in [
        (
            format!("[model]\nname = \"softmax\"\n{parallel}"),
            2,
            "the model \"softmax\" is no chain of blocks, so it cannot be cut into 2 stages; use a model that is one (mlp,",
        ),
        (
            format!("{MLP}{parallel}"),
            5,
            "it is a chain of 4 blocks, too few for 5 stages; set strategy.stages to at most 4",
        ),
        (
            format!("{MLP}{parallel}stages = 2\n"),
            3,
            "3 devices are given, and `strategy.stages = 2` leaves some without a stage",
        ),
        (
            format!(
                "[data]\nkind = \"clicks\"\n[model]\nname = \"mlp\"\ntables = true\n{parallel}"
            ),
            2,
            "whose rows no stage can hold; set `model.tables = false`",
        ),
        (
            format!("[model]\nname = \"astray\"\n{parallel}"),
            2,
            "variable \"astray.bias\" of the model \"astray\" belongs to no block",
        ),
        (
            format!("[model]\nname = \"doubled\"\n{parallel}"),
            2,
            "variable \"layer.weight\" is asked for in stage 0 and in stage 1",
        ),
    ] {
        let error = refusal(&job, devices).await;
        assert!(error.contains(expected), "{error}");
    }
    // One stage is the whole model, whatever it is.
    let whole = stages("[model]\nname = \"softmax\"\n", "micro_batches = 3\n", 1).await;
    let alone = one_device("[model]\nname = \"softmax\"\n").await;
    let (found, expected) = (
        compute(&whole, positions(0, 8)).await,
        compute(&alone, positions(0, 8)).await,
    );
    assert!(difference(&found.gradients, &expected.gradients) < 1e-5);
}

/// Returns the error of a step.
async fn failure(replica: &DeviceReplicas) -> String {
    let all = positions(0, 12);
    replica.prepare(all).await;
    let step = replica.compute(all, Step::default());
    let step = tokio::time::timeout(Duration::from_secs(20), step).await;
    step.expect("the stages hang").unwrap_err().to_string()
}

#[tokio::test]
async fn a_gradient_that_another_stage_would_need_is_no_silent_loss() {
    const TIED: &str = "[model]\nname = \"tied\"\n";
    let error = failure(&stages(TIED, "", 2).await).await;
    let expected = "it uses the trained variable \"scale\", which stage 0 holds";
    assert!(
        error.contains(expected) && error.contains("stage 1 of 2"),
        "{error}"
    );
    // Within a stage it may.
    let (whole, alone) = (stages(TIED, "", 1).await, one_device(TIED).await);
    let all = positions(0, 12);
    let (found, expected) = (compute(&whole, all).await, compute(&alone, all).await);
    assert!(difference(&found.gradients, &expected.gradients) < 1e-5);
}

#[tokio::test]
async fn a_model_that_does_not_compute_its_blocks_is_refused() {
    const MUTE: &str = "[model]\nname = \"mute\"\n";
    for replica in [one_device(MUTE).await, stages(MUTE, "", 2).await] {
        let error = failure(&replica).await;
        let expected = "has 5 blocks, and does not implement `Model::forward_block`";
        assert!(error.contains(expected), "{error}");
    }
}

#[tokio::test]
async fn a_stage_that_fails_ends_the_step_and_is_named() {
    for (at, panics) in [(0, false), (1, true), (2, false), (3, true), (3, false)] {
        for schedule in ["gpipe", "1f1b"] {
            let panics_too = if panics { "instead = \"panic\"\n" } else { "" };
            let model =
                format!("[model]\nname = \"fails\"\n[model.options]\nat = {at}\n{panics_too}");
            let strategy = format!("schedule = \"{schedule}\"\nmicro_batches = 6\n");
            for devices in [4, 2] {
                let strategy = format!("{strategy}stages = 4\n");
                let cut = stages(&model, &strategy, devices).await;
                // The last two of these micro-batches have 3 samples.
                let all = positions(0, 14);
                cut.prepare(all).await;
                let step = cut.compute(all, Step::default());
                let step = tokio::time::timeout(Duration::from_secs(20), step).await;
                let error = step.expect("the stages hang").unwrap_err().to_string();
                let stage = format!("stage {at} of 4 (block {at} on cpu");
                let said = if panics {
                    "the planted panic"
                } else {
                    "the planted error"
                };
                assert!(error.contains(&stage) && error.contains(said), "{error}");
                // The next step is as if nothing had happened.
                let next = compute(&cut, positions(14, 12)).await;
                let expected =
                    compute(&stages(&model, &strategy, devices).await, positions(14, 12)).await;
                assert_eq!(next.gradients, expected.gradients);
            }
        }
    }
}
