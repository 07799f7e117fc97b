//! The first GPU computes what the CPU computes. These tests need a build with the feature `cuda`, and a GPU.

#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use candle_core::Device;
use flambeau_replica::device::{self, Choice};
use flambeau_replica::{Computed, DeviceReplicas, Mirror, Positions, Replica, Step, StepsMade};
use model::input::{Column, DataSetup, Dataset, InMemory, InputError, Source};
use model::registry::Registry;
use shared_proto::job::Job;
use shared_proto::payload::Elements;
use shared_proto::step::{Part, PartOf, Want};

const SAMPLES: u64 = 24;

const CLICKS: &str = "[data]\nkind = \"clicks\"\n[data.options]\nsamples = 2000\nrows = 300\n[model]\nembedding = 8\ntables = true\n";

const PICTURES: &str =
    "[data]\nkind = \"random\"\n[data.options]\nsamples = 96\nsize = 32\nchannels = 3\n";

const VECTORS: &str = "[data]\nkind = \"vectors\"\n";

/// The jobs of each model, and the largest relative difference between the gradients of a variable. Deep networks with normalisation enlarge
/// rounding: on the CPU, weights that differ in their last bit change gradients of ResNet-50 and MobileNetV2 by 0.018 and 0.017.
const MODELS: [(&str, &str, f64); 12] = [
    ("logistic", CLICKS, 1e-4),
    ("softmax", "", 1e-4),
    ("mlp", "", 1e-4),
    ("cnn", "", 1e-4),
    ("factorization-machine", CLICKS, 1e-4),
    ("resnet20", "", 1e-3),
    ("resnet50", PICTURES, 0.05),
    ("mobilenetv2", PICTURES, 0.05),
    ("transformer", VECTORS, 1e-3),
    ("deepfm", CLICKS, 1e-4),
    ("wide-deep", CLICKS, 1e-4),
    ("dlrm", CLICKS, 1e-4),
];

/// Sequences of vectors, and their classes.
struct Vectors;

impl Source for Vectors {
    fn open(setup: &DataSetup) -> Result<Dataset, InputError> {
        setup.only(&[])?;
        let samples = |count: usize| {
            let x = (0..count * 30)
                .map(|n| (n as f32 * 12.9898).sin())
                .collect();
            let labels = (0..count as u32).map(|n| n % 3).collect();
            InMemory::new(
                vec![Column::numbers("x", vec![5, 6], x)],
                vec![Column::category("label", labels, 3)],
            )
        };
        Dataset::in_memory(samples(240)?, samples(24)?)
    }
}

fn job(model: &str, rest: &str, strategy: &str) -> Arc<Job> {
    let mut job = Job::from_toml(&format!("{rest}\n[strategy]\nname = \"{strategy}\"\n")).unwrap();
    model.clone_into(&mut job.model.name);
    Arc::new(job)
}

fn gpu() -> Device {
    device::open(Choice::Cuda(0)).unwrap()
}

async fn start(job: &Arc<Job>, devices: &[Device]) -> DeviceReplicas {
    let registry = Registry::builtin().data::<Vectors>("vectors");
    DeviceReplicas::start(job, &registry, devices)
        .await
        .unwrap()
}

fn positions(step: u64) -> Positions {
    Positions {
        data_epoch: 0,
        start: step * SAMPLES,
        end: (step + 1) * SAMPLES,
    }
}

/// Returns numbers between -0.1 and 0.1 that look random.
fn numbers_for(count: usize) -> Vec<f32> {
    let number = |n: usize| (n as f32 * 12.9898).sin() * 0.1;
    (0..count).map(number).collect()
}

/// Prepares a step, with made-up rows of tables.
async fn prepare(replica: &DeviceReplicas, step: u64) -> (Positions, Step) {
    let mut prepared = replica.prepare(positions(step)).await;
    let mut rows = Vec::new();
    for want in prepared.wants().await {
        if let Want::Rows(wanted) = want {
            let description = replica.description();
            let dimension = description.tables[wanted.table].dimension as usize;
            let values = numbers_for(wanted.ids.len() * dimension);
            rows.push(Part::whole(PartOf::Table(wanted.table), values.into()));
        }
    }
    replica.load(rows).await;
    let clock = shared_proto::ids::Clock(step);
    (positions(step), Step { clock, rank: 0 })
}

async fn compute(replica: &DeviceReplicas, step: u64) -> Computed {
    let (positions, step) = prepare(replica, step).await;
    replica.compute(positions, step).await.unwrap()
}

fn numbers(elements: &Elements) -> Vec<f32> {
    let mut numbers = vec![0.0; elements.len()];
    elements.copy_to(&mut numbers);
    numbers
}

/// Returns the norm of the difference, relative to the norm of what is expected.
fn difference(expected: &[f32], found: &[f32]) -> f64 {
    assert_eq!(expected.len(), found.len());
    let norm = |squares: &mut dyn Iterator<Item = f64>| squares.sum::<f64>().sqrt();
    let pairs = expected.iter().zip(found);
    let apart = norm(&mut pairs.map(|(a, b)| f64::from(a - b).powi(2)));
    // A gradient that is zero but for rounding, as that of a bias before a normalisation, has no relative error.
    let all = norm(&mut expected.iter().map(|a| f64::from(*a).powi(2)));
    apart / all.max(1e-3)
}

/// Compares a step's loss and gradients. Returns the largest relative difference, and where it is.
fn compare(expected: &Computed, found: &Computed, names: &[String]) -> (f64, String) {
    let loss = (expected.loss / found.loss - 1.0).abs();
    let mut worst = (loss, "the loss".to_owned());
    let mut add = |expected: &Elements, found: &Elements, name: &str| {
        let apart = difference(&numbers(expected), &numbers(found));
        if apart.is_nan() || apart > worst.0 {
            worst = (apart, name.to_owned());
        }
    };
    let (expected, found) = (&expected.gradients, &found.gradients);
    for ((expected, found), name) in expected.values.iter().zip(&found.values).zip(names) {
        add(expected, found, name);
    }
    for (expected, found) in expected.rows.iter().zip(&found.rows) {
        assert_eq!(expected.rows, found.rows);
        add(&expected.values, &found.values, "rows");
    }
    worst
}

fn names(replica: &DeviceReplicas) -> Vec<String> {
    let variables = &replica.description().variables;
    variables.iter().map(|spec| spec.name.clone()).collect()
}

#[tokio::test]
async fn each_model_has_the_gradients_that_it_has_on_the_cpu() {
    let mut failed = Vec::new();
    for (model, rest, most) in MODELS {
        let job = job(model, rest, "one-device");
        let on_cpu = start(&job, &[Device::Cpu]).await;
        let on_gpu = start(&job, &[gpu()]).await;
        let expected = compute(&on_cpu, 0).await;
        let (apart, place) = compare(&expected, &compute(&on_gpu, 0).await, &names(&on_cpu));
        println!("{model}: {apart:.2e} ({place})");
        if apart.is_nan() || apart > most {
            failed.push(model);
        }
    }
    assert!(failed.is_empty(), "{failed:?}");
}

#[tokio::test]
async fn bf16_has_nearly_the_gradients_of_f32() {
    // Normalisation enlarges rounding, so that only the losses of deep networks can be compared.
    for (model, rest, most) in [
        ("mlp", "", 0.1),
        ("cnn", "", 0.1),
        ("resnet20", "", f64::INFINITY),
        ("mobilenetv2", PICTURES, f64::INFINITY),
    ] {
        let exact = job(model, rest, "one-device");
        let mut rounded = exact.clone();
        Arc::make_mut(&mut rounded).model.precision = shared_proto::job::Precision::Bf16;
        let on_gpu = start(&exact, &[gpu()]).await;
        let expected = compute(&on_gpu, 0).await;
        let found = compute(&start(&rounded, &[gpu()]).await, 0).await;
        let (apart, place) = compare(&expected, &found, &names(&on_gpu));
        let loss = (expected.loss / found.loss - 1.0).abs();
        println!("{model}: loss {loss:.2e}, {apart:.2e} ({place})");
        assert!(
            loss < 2e-2 && apart > 1e-6 && apart < most,
            "{model}: {loss}, {apart}"
        );
    }
}

#[tokio::test]
async fn several_replicas_on_one_gpu_have_the_gradients_of_one() {
    for (model, rest) in [("mlp", ""), ("cnn", ""), ("transformer", VECTORS)] {
        let one = start(&job(model, rest, "mirrored"), &[gpu()]).await;
        let three = start(&job(model, rest, "mirrored"), &[gpu(), gpu(), gpu()]).await;
        for step in 0..3 {
            let expected = compute(&one, step).await;
            let (apart, place) = compare(&expected, &compute(&three, step).await, &names(&one));
            println!("{model}: {apart:.2e} ({place})");
            assert!(apart < 1e-4, "{model}: {apart} ({place})");
        }
    }
}

#[tokio::test]
async fn stages_on_one_gpu_have_the_gradients_of_the_whole_model() {
    let layers = "[model]\nhidden = [32, 24, 16]\nchannels = [4, 6, 8]\n";
    // The transformer has two blocks.
    for (model, rest, count) in [
        ("mlp", layers, 3),
        ("cnn", layers, 3),
        ("transformer", VECTORS, 2),
    ] {
        let whole = start(&job(model, rest, "one-device"), &[gpu()]).await;
        let stages = job(model, rest, "model-parallel");
        let devices: Vec<Device> = (0..count).map(|_| gpu()).collect();
        let stages = start(&stages, &devices).await;
        for step in 0..3 {
            let expected = compute(&whole, step).await;
            let (apart, place) = compare(&expected, &compute(&stages, step).await, &names(&whole));
            println!("{model}: {apart:.2e} ({place})");
            assert!(apart < 1e-4, "{model}: {apart} ({place})");
        }
    }
}

#[tokio::test]
async fn a_repeated_step_has_the_same_bits() {
    for (model, rest, _) in MODELS {
        let replica = start(&job(model, rest, "one-device"), &[gpu()]).await;
        let first = compute(&replica, 0).await;
        let again = compute(&replica, 0).await;
        assert_eq!(first.loss, again.loss, "{model}");
        assert_eq!(first.gradients, again.gradients, "{model}");
    }
}

/// Makes some steps. Returns the values.
async fn values_after_steps(job: &Arc<Job>, devices: &[Device]) -> Vec<f32> {
    let replica = start(job, devices).await;
    for step in 0..10 {
        let computed = compute(&replica, step).await;
        let gradient: Vec<f32> = computed.gradients.values.iter().flat_map(numbers).collect();
        let made = StepsMade {
            clock: shared_proto::ids::Clock(step + 1),
            ..StepsMade::default()
        };
        replica.update(gradient.into(), made).await.unwrap();
    }
    replica.state().await.unwrap().values
}

#[tokio::test]
async fn updates_make_the_values_that_they_make_on_the_cpu() {
    for (optimizer, most) in [
        ("sgd", 1e-5),
        ("momentum", 1e-5),
        ("adagrad", 1e-4),
        ("ftrl", 1e-4),
        // A gradient that is zero but for rounding makes a whole step.
        ("rmsprop", 2e-2),
        ("adam", 2e-2),
        ("adamw", 2e-2),
    ] {
        let rest = format!("[optimizer]\nname = \"{optimizer}\"\n");
        let job = job("cnn", &rest, "mirrored");
        let expected = values_after_steps(&job, &[Device::Cpu]).await;
        let apart = difference(&expected, &values_after_steps(&job, &[gpu()]).await);
        let two = difference(&expected, &values_after_steps(&job, &[gpu(), gpu()]).await);
        println!("{optimizer}: {apart:.2e}, two replicas {two:.2e}");
        assert!(apart < most && two < most, "{optimizer}: {apart}, {two}");
    }
}

/// Makes some steps on the device. Returns the values.
async fn values_after_steps_on_the_device(job: &Arc<Job>) -> Vec<f32> {
    let replica = start(job, &[gpu()]).await;
    let device = replica.device_steps().unwrap();
    assert!(device.saves_copies());
    for step in 0..10 {
        let (positions, step) = prepare(&replica, step).await;
        device.compute_on_device(positions, step).await.unwrap();
        let made = StepsMade {
            clock: step.clock.next(),
            ..StepsMade::default()
        };
        device.update_on_device(made).await.unwrap();
    }
    replica.state().await.unwrap().values
}

#[tokio::test]
async fn steps_on_the_gpu_make_the_values_that_updates_on_the_host_make() {
    for (model, optimizer, more) in [
        ("cnn", "momentum", ""),
        ("cnn", "adam", "ema_decay = 0.9\nclip_norm = 0.5\n"),
        ("resnet20", "sgd", ""),
        ("mlp", "ftrl", ""),
    ] {
        let rest = format!("{more}[optimizer]\nname = \"{optimizer}\"\n");
        let job = job(model, &rest, "mirrored");
        let expected = values_after_steps(&job, &[gpu()]).await;
        let apart = difference(&expected, &values_after_steps_on_the_device(&job).await);
        println!("{model}, {optimizer}: {apart:.2e}");
        assert!(apart < 2e-3, "{model}, {optimizer}: {apart}");
    }
}

#[cfg(feature = "nccl")]
#[tokio::test]
async fn one_rank_of_nccl_makes_the_steps_of_a_gpu_alone() {
    let rest = "clip_norm = 0.5\n[optimizer]\nname = \"momentum\"\n";
    let alone = job("cnn", rest, "mirrored");
    let mut by_nccl = alone.clone();
    Arc::make_mut(&mut by_nccl).strategy.cross_device = Some(shared_proto::job::CrossDevice::Nccl);
    let expected = values_after_steps_on_the_device(&alone).await;
    let found = values_after_steps_on_the_device(&by_nccl).await;
    assert_eq!(expected, found);
    let (registry, twice) = (Registry::builtin(), [gpu(), gpu()]);
    let started = DeviceReplicas::start(&by_nccl, &registry, &twice).await;
    let refused = started.err().unwrap().to_string();
    assert!(refused.contains("a different GPU"), "{refused}");
}

/// Makes a step on the device, as the only worker of a group. Returns the values.
#[cfg(feature = "nccl")]
async fn values_after_a_step_in_a_group(
    replica: &DeviceReplicas,
    number: u64,
    part: f64,
) -> Vec<f32> {
    let device = replica.device_steps().unwrap();
    let group = device.device_group().unwrap();
    let (positions, step) = prepare(replica, number).await;
    device.compute_on_device(positions, step).await.unwrap();
    group.add_up(part).await.unwrap();
    let made = StepsMade {
        clock: step.clock.next(),
        ..StepsMade::default()
    };
    device.update_on_device(made).await.unwrap();
    replica.state().await.unwrap().values
}

#[cfg(feature = "nccl")]
#[tokio::test]
async fn a_gpu_adds_up_in_a_group_and_gives_up_one_that_lacks_a_member() {
    use std::time::Duration;

    let rest = "[optimizer]\nname = \"sgd\"\n";
    let mut of_group = job("cnn", rest, "multi-worker-mirrored");
    Arc::make_mut(&mut of_group).strategy.cross_device = Some(shared_proto::job::CrossDevice::Nccl);
    let replica = start(&of_group, &[gpu()]).await;
    let group = replica.device_steps().unwrap().device_group().unwrap();
    assert_eq!(group.device().len(), 32);

    let lacking = group.join_group(group.new_group().await.unwrap(), 0, 2);
    let joined = tokio::time::timeout(Duration::from_secs(3), lacking).await;
    joined.expect_err("it waits for the other member");

    let id = group.new_group().await.unwrap();
    group.join_group(id, 0, 1).await.unwrap();
    let before = replica.state().await.unwrap().values;
    let without = values_after_a_step_in_a_group(&replica, 0, 0.0).await;
    assert_eq!(before, without, "the part 0 adds nothing");
    let after = values_after_a_step_in_a_group(&replica, 1, 1.0).await;

    let alone = start(&job("cnn", rest, "mirrored"), &[gpu()]).await;
    let device = alone.device_steps().unwrap();
    let (positions, step) = prepare(&alone, 1).await;
    device.compute_on_device(positions, step).await.unwrap();
    device.update_on_device(StepsMade::default()).await.unwrap();
    assert_eq!(after, alone.state().await.unwrap().values);
}
