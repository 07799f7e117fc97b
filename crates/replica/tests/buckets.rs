//! Gradients that leave in buckets are those of a step that is computed as a whole.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use candle_core::{Device, Result, Tensor};
use candle_nn::VarBuilder;
use flambeau_replica::{
    Computed, DeviceReplicas, InBuckets, Mirror, Positions, Replica, ReplicaError, Step, StepsMade,
    filling,
};
use model::registry::Registry;
use model::{Batch, Model, Pass, Setup};
use nn::{Linear, cross_entropy};
use shared_proto::job::Job;
use shared_proto::payload::Elements;
use variables::{BucketPlan, BucketedGradients};

const SAMPLES: u64 = 16;

const MLP: &str = "[model]\nname = \"mlp\"\nhidden = [24, 16, 12]\n";
const CNN: &str = "[model]\nname = \"cnn\"\nchannels = [4, 6]\nhidden = [16]\n";
/// It has averaged variables.
const RESNET: &str = "[model]\nname = \"resnet20\"\n";
const FROZEN: &str = "[model]\nname = \"mlp\"\nhidden = [24, 16, 12]\n[[groups]]\nvariables = \"hidden.1.*\"\nfrozen = true\n";
const DECAYING: &str = "[model]\nname = \"decaying\"\n";

/// Two layers, with the squares of the second one's weights in the loss.
struct Decaying(Linear, Linear, Tensor);

impl Model for Decaying {
    fn new(setup: &Setup, vars: VarBuilder) -> Result<Self> {
        let first = Linear::new(setup.features()?, 8, vars.pp("a"))?;
        let last = Linear::new(8, setup.outputs(), vars.pp("b"))?;
        let weight = vars.pp("b").get((setup.outputs(), 8), "weight")?;
        Ok(Self(first, last, weight))
    }

    fn forward(&self, batch: &Batch, _: &Pass) -> Result<Tensor> {
        let x = self.0.forward(&batch.input()?.flatten_from(1)?)?;
        self.1.forward(&x)
    }

    fn loss(&self, outputs: &Tensor, batch: &Batch, _: &Pass) -> Result<Tensor> {
        let decay = (self.2.sqr()?.sum_all()? * 0.1)?;
        cross_entropy(outputs, batch.target()?)? + decay
    }
}

async fn start(job: &str) -> DeviceReplicas {
    let job = format!("{job}[strategy]\nname = \"multi-worker-mirrored\"\n");
    let job = Arc::new(Job::from_toml(&job).unwrap());
    let registry = Registry::builtin().model::<Decaying>("decaying");
    DeviceReplicas::start(&job, &registry, &[Device::Cpu])
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

async fn whole(replica: &DeviceReplicas, step: u64) -> Computed {
    replica.prepare(positions(step)).await;
    replica
        .compute(positions(step), Step::default())
        .await
        .unwrap()
}

/// Computes a step in buckets. Returns them too.
async fn in_buckets(
    replica: &DeviceReplicas,
    plan: &Arc<BucketPlan>,
    step: u64,
) -> std::result::Result<(InBuckets, BucketedGradients), ReplicaError> {
    replica.prepare(positions(step)).await;
    let (filling, mut filled) = filling(plan, Vec::new(), SAMPLES as f32);
    let computed = replica.compute_in_buckets(filling, positions(step), Step::default());
    let computed = computed.await?;
    let mut vectors = Vec::new();
    while let Some(vector) = filled.next().await {
        vectors.push(vector);
    }
    assert_eq!(vectors.len(), plan.lengths().len());
    Ok((computed, BucketedGradients::new(plan.clone(), vectors)))
}

fn numbers(values: &[Elements]) -> Vec<f32> {
    let one = |elements: &Elements| {
        let mut numbers = vec![0.0; elements.len()];
        elements.copy_to(&mut numbers);
        numbers
    };
    values.iter().flat_map(one).collect()
}

fn times_samples(gradient: &[f32]) -> Vec<f32> {
    gradient
        .iter()
        .map(|value| value * SAMPLES as f32)
        .collect()
}

/// Returns plans: one bucket; a bucket for each variable, in the order of the pass; and a few buckets.
fn plans(replica: &DeviceReplicas, order: &[usize]) -> [Arc<BucketPlan>; 3] {
    let variables = &replica.description().variables;
    [
        BucketPlan::one(variables),
        BucketPlan::in_order(variables, order, 1),
        BucketPlan::in_order(variables, order, 500),
    ]
    .map(Arc::new)
}

#[tokio::test]
async fn buckets_have_the_bits_of_a_step_that_is_computed_as_a_whole() {
    for job in [MLP, CNN, RESNET, FROZEN] {
        let (replica, other) = (start(job).await, start(job).await);
        assert!(replica.fills_buckets());
        let variables = &replica.description().variables;
        let one = Arc::new(BucketPlan::one(variables));
        in_buckets(&replica, &one, 0).await.unwrap();
        let order = replica.first().gradient_order().await.unwrap();
        assert!(order.len() >= 4, "{job}: {order:?}");
        for plan in plans(&replica, &order) {
            let expected = whole(&other, 1).await;
            let (found, buckets) = in_buckets(&replica, &plan, 1).await.unwrap();
            let gradient = numbers(&expected.gradients.values);
            assert!(found.complete);
            assert_eq!(found.computed.loss, expected.loss);
            assert_eq!(found.computed.gradients.norm, expected.gradients.norm);
            assert!(gradient.iter().any(|value| *value != 0.0));
            assert_eq!(
                buckets.in_order(variables),
                times_samples(&gradient),
                "{job}"
            );
            let again = replica.first().bucketed_gradients().await.unwrap();
            assert_eq!(numbers(&again), gradient);
            assert_eq!(replica.first().gradient_order().await.unwrap(), order);
        }
    }
}

#[tokio::test]
async fn an_update_by_buckets_is_an_update_by_the_whole() {
    let job = format!("{CNN}[optimizer]\nname = \"adam\"\n");
    let (replica, other) = (start(&job).await, start(&job).await);
    let one = Arc::new(BucketPlan::one(&replica.description().variables));
    in_buckets(&replica, &one, 0).await.unwrap();
    let order = replica.first().gradient_order().await.unwrap();
    for (step, plan) in (1..).zip(plans(&replica, &order)) {
        let (_, buckets) = in_buckets(&replica, &plan, step).await.unwrap();
        replica.update(buckets, StepsMade::default()).await.unwrap();
        let gradient = times_samples(&numbers(&whole(&other, step).await.gradients.values));
        let updated = other.update(gradient.into(), StepsMade::default());
        updated.await.unwrap();
        let values = replica.state().await.unwrap().values;
        assert_eq!(values, other.state().await.unwrap().values);
    }
}

#[tokio::test]
async fn a_gradient_that_grows_after_it_has_left_is_noticed() {
    let (replica, other) = (start(DECAYING).await, start(DECAYING).await);
    let variables = &replica.description().variables;
    let number = |name: &str| {
        let place = variables.iter().position(|spec| spec.name == name);
        place.unwrap()
    };
    let (bias, weight) = (number("b.bias"), number("b.weight"));
    let one = Arc::new(BucketPlan::one(variables));
    assert!(in_buckets(&replica, &one, 0).await.unwrap().0.complete);
    // The pass tells the weight's gradient too, but without the part of the squares.
    assert_eq!(replica.first().gradient_order().await.unwrap(), [bias]);
    let expected = whole(&other, 1).await.gradients;
    let norm = expected.norm;
    let expected = numbers(&expected.values);
    for (order, complete) in [([bias, bias], true), ([bias, weight], false)] {
        let plan = Arc::new(BucketPlan::in_order(variables, &order, 1));
        let (found, buckets) = in_buckets(&replica, &plan, 1).await.unwrap();
        assert_eq!(found.complete, complete);
        assert_eq!(found.computed.gradients.norm, norm);
        let right = buckets.in_order(variables) == times_samples(&expected);
        assert_eq!(right, complete);
        let again = replica.first().bucketed_gradients().await.unwrap();
        assert_eq!(numbers(&again), expected);
    }
}

#[tokio::test]
async fn gradients_that_are_changed_before_they_leave_do_not_leave_in_buckets() {
    for setting in [
        "clip_norm = 1.0\n",
        "clip_value = 1.0\n",
        "accumulate = 2\n",
    ] {
        assert!(!start(&format!("{setting}{MLP}")).await.fills_buckets());
    }
}
