//! Replicas that compute a step together: batch normalisation over the samples of all.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use candle_core::{Device, Result, Tensor};
use candle_nn::{BatchNorm, BatchNormConfig, Linear, Module, ModuleT, VarBuilder};
use flambeau_replica::{
    Computed, DeviceReplicas, Mirror, ModelReplica, Positions, Replica, ReplicaError, Round, Step,
    StepsMade, rounds,
};
use model::registry::Registry;
use model::{Batch, Model, Pass, Setup};
use shared_proto::job::{BatchNorm as Samples, Job, StrategyName};
use shared_proto::payload::Elements;
use shared_proto::step::Gradients;

/// A residual network on the digits, which are pictures of 8 x 8.
fn job() -> Arc<Job> {
    let mut job = Job::default();
    "resnet20".clone_into(&mut job.model.name);
    job.strategy.name = StrategyName::Mirrored;
    job.strategy.batch_norm = Samples::Synchronised;
    Arc::new(job)
}

fn positions(start: u64, samples: u64) -> Positions {
    Positions {
        data_epoch: 0,
        start,
        end: start + samples,
    }
}

async fn start(devices: usize) -> DeviceReplicas {
    let devices = vec![Device::Cpu; devices];
    let (job, registry) = (job(), Registry::builtin());
    let started = DeviceReplicas::start(&job, &registry, &devices);
    started.await.unwrap()
}

/// Computes a step with no others than the replica's own devices.
async fn compute(replica: &DeviceReplicas, positions: Positions) -> (Computed, u64) {
    replica.prepare(positions).await;
    let (others, mut asked) = rounds();
    let answer = async {
        let mut rounds = 0;
        while let Some(Round { values, sum }) = asked.next().await {
            assert!(!values.is_empty());
            let _ = sum.send(values);
            rounds += 1;
        }
        rounds
    };
    let step = replica.compute_with(others, positions, Step::default());
    let (computed, rounds) = tokio::join!(step, answer);
    (computed.unwrap(), rounds)
}

fn numbers(elements: &Elements) -> Vec<f32> {
    let mut numbers = vec![0.0; elements.len()];
    elements.copy_to(&mut numbers);
    numbers
}

/// Returns the largest difference of two gradients, in parts of the largest number.
fn difference(found: &Gradients, expected: &Gradients) -> f32 {
    let (mut most, mut largest) = (0f32, 0f32);
    for (found, expected) in found.values.iter().zip(&expected.values) {
        for (found, expected) in numbers(found).into_iter().zip(numbers(expected)) {
            most = most.max((found - expected).abs());
            largest = largest.max(expected.abs());
        }
    }
    most / largest
}

#[tokio::test]
async fn several_devices_compute_what_one_does() {
    let one = start(1).await;
    // The last of 4 devices has no samples in the step of 3.
    for (devices, samples) in [(2, 16), (3, 16), (3, 4), (4, 3)] {
        let several = start(devices).await;
        let positions = positions(5, samples);
        let ((alone, of_one), (together, of_several)) = (
            compute(&one, positions).await,
            compute(&several, positions).await,
        );
        assert!((alone.loss - together.loss).abs() < 1e-5);
        let error = difference(&together.gradients, &alone.gradients);
        assert!(
            error < 1e-5,
            "{devices} devices, {samples} samples: {error:.1e}"
        );
        // 21 layers, forward and backward, whichever devices take part.
        assert_eq!((of_one, of_several), (42, 42));

        let (again, _) = compute(&several, positions).await;
        assert_eq!(again.gradients, together.gradients, "the bits differ");
        let apart = {
            several.prepare(positions).await;
            several.compute(positions, Step::default()).await.unwrap()
        };
        let error = difference(&apart.gradients, &alone.gradients);
        assert!(error > 1e-3, "each device by itself has other gradients");
    }
}

/// Starts two devices with steps of two batches.
async fn accumulating(batch_size: u32) -> DeviceReplicas {
    let mut job = job();
    {
        let job = Arc::make_mut(&mut job);
        (job.batch_size, job.accumulate) = (batch_size, 2);
    }
    let (registry, devices) = (Registry::builtin(), vec![Device::Cpu; 2]);
    let several = DeviceReplicas::start(&job, &registry, &devices);
    several.await.unwrap()
}

#[tokio::test]
async fn each_of_several_batches_is_cut_among_the_devices() {
    let several = accumulating(4).await;
    // Each device has two batches of 2 samples.
    let (_, rounds) = compute(&several, positions(0, 8)).await;
    assert_eq!(rounds, 2 * 42);
}

#[tokio::test]
async fn a_replica_with_fewer_batches_holds_up_no_other() {
    let several = accumulating(3).await;
    // The first device has a batch of 2 samples, the second one of 2 and one of a single sample.
    let (computed, rounds) = compute(&several, positions(0, 5)).await;
    assert_eq!(rounds, 2 * 42);
    assert!(computed.loss.is_finite() && computed.gradients.norm > 0.0);
}

/// Returns the values of a replica.
async fn values(replica: &ModelReplica) -> Vec<f32> {
    replica.state().await.unwrap().values
}

#[tokio::test]
async fn a_step_that_loses_the_others_leaves_the_replica_as_it_was() {
    let replica = ModelReplica::start(job(), Registry::builtin(), Device::Cpu);
    let replica = replica.await.unwrap();
    let all = positions(0, 8);
    let before = values(&replica).await;
    let compute = async |lost_at: u64| {
        replica.prepare(all).await;
        let (others, mut asked) = rounds();
        let answer = async move {
            for _ in 0..lost_at {
                let Some(Round { values, sum }) = asked.next().await else {
                    break;
                };
                let _ = sum.send(values);
            }
        };
        let step = replica.compute_with(others, all, Step::default());
        tokio::join!(step, answer).0
    };
    let whole = compute(u64::MAX).await.unwrap();
    for lost_at in [0, 1, 20, 21, 41] {
        let error = compute(lost_at).await.unwrap_err().to_string();
        assert!(error.contains("are gone"), "{error}");
        assert_eq!(values(&replica).await, before, "lost at {lost_at}");
    }
    let again = compute(u64::MAX).await.unwrap();
    assert_eq!(again.gradients, whole.gradients);
    assert_eq!(replica.made().await.unwrap(), None::<StepsMade>);
}

#[tokio::test]
async fn a_step_that_is_given_up_ends_by_itself() {
    let several = start(2).await;
    let all = positions(0, 8);
    several.prepare(all).await;
    let (others, mut asked) = rounds();
    let given_up = async {
        let step = several.compute_with(others, all, Step::default());
        let round = async {
            let round = asked.next().await.unwrap();
            assert!(round.values.len() > 1);
        };
        tokio::select! {
            _ = step => unreachable!("nobody answers"),
            () = round => {}
        }
    };
    given_up.await;
    drop(asked);
    // The threads of both devices are free again.
    let (next, _) = compute(&several, positions(8, 8)).await;
    assert!(next.loss > 0.0);
}

/// A linear model behind candle's own batch normalisation.
struct Candles(BatchNorm, Linear);

impl Model for Candles {
    fn new(setup: &Setup, vars: VarBuilder) -> Result<Self> {
        let features = setup.features()?;
        let norm = candle_nn::batch_norm(features, BatchNormConfig::default(), vars.pp("norm"))?;
        let line = candle_nn::linear(features, setup.outputs(), vars.pp("line"))?;
        Ok(Self(norm, line))
    }

    fn forward(&self, batch: &Batch, pass: &Pass) -> Result<Tensor> {
        let inputs = batch.input()?.flatten_from(1)?;
        self.1.forward(&self.0.forward_t(&inputs, pass.training)?)
    }
}

#[tokio::test]
async fn a_model_without_a_layer_that_could_be_synchronised_is_refused() {
    let registry = Registry::builtin().model::<Candles>("candles");
    for name in ["candles", "mlp"] {
        let mut job = job();
        name.clone_into(&mut Arc::make_mut(&mut job).model.name);
        let replica = ModelReplica::start(job, registry.clone(), Device::Cpu);
        let replica = replica.await.unwrap();
        let all = positions(0, 8);
        replica.prepare(all).await;
        let (others, _asked) = rounds();
        let step = replica.compute_with(others, all, Step::default());
        let error = step.await.unwrap_err();
        assert!(matches!(error, ReplicaError::Unsynchronised(_)), "{error}");
        assert!(error.to_string().contains("`strategy.batch_norm = "));
    }
}
