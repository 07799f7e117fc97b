//! The model on its own thread: batches that are prepared ahead, and initial values.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use candle_core::Device;
use flambeau_replica::{
    Evaluation, EvaluationPart, ModelReplica, Positions, Replica, ReplicaError, Step,
};
use model::Metrics;
use model::registry::Registry;
use shared_proto::job::{Group, Job, Precision};
use shared_proto::payload::{self, Dtype, Elements};
use shared_proto::step::{EVERY_BATCH, Part, PartOf};

fn block_on<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().build();
    runtime.unwrap().block_on(future)
}

/// A softmax regression on the digits.
async fn start() -> ModelReplica {
    let mut job = Job::default();
    "softmax".clone_into(&mut job.model.name);
    ModelReplica::start(Arc::new(job), Registry::builtin(), Device::Cpu)
        .await
        .unwrap()
}

fn batch(start: u64) -> Positions {
    Positions {
        data_epoch: 0,
        start,
        end: start + 16,
    }
}

/// Evaluates a model without tables.
async fn evaluate(replica: &ModelReplica) -> Metrics {
    let mut part = EvaluationPart::First;
    loop {
        match replica.evaluate(part).await.unwrap() {
            Evaluation::Done(metrics) => return metrics,
            Evaluation::Wants(wants) => assert_eq!(wants, []),
        }
        part = EvaluationPart::Next;
    }
}

#[test]
fn batches_prepared_ahead_are_computed_in_their_order() {
    block_on(async {
        let replica = start().await;
        let mut one_by_one = Vec::new();
        for positions in [batch(0), batch(16), batch(32)] {
            assert_eq!(replica.prepare(positions).await.wants().await, EVERY_BATCH);
            one_by_one.push(replica.compute(positions, Step::default()).await.unwrap());
        }
        for positions in [batch(0), batch(16), batch(32)] {
            replica.prepare(positions).await;
        }
        // The first is passed over, as if the membership that prepared it had ended.
        for (positions, expected) in [batch(16), batch(32)].into_iter().zip(&one_by_one[1..]) {
            let computed = replica.compute(positions, Step::default()).await.unwrap();
            assert_eq!(computed.loss, expected.loss);
            assert_eq!(computed.gradients, expected.gradients);
        }
        let error = replica
            .compute(batch(0), Step::default())
            .await
            .unwrap_err();
        assert!(error.to_string().contains("not prepared"), "{error}");
    });
}

#[test]
fn a_job_chooses_the_precision_of_its_steps_and_evaluations() {
    let measured = |precision| {
        let mut job = Job::default();
        job.model.precision = precision;
        block_on(async {
            let replica = ModelReplica::start(Arc::new(job), Registry::builtin(), Device::Cpu);
            let replica = replica.await.unwrap();
            replica.prepare(batch(0)).await;
            let step = replica.compute(batch(0), Step::default()).await.unwrap();
            [step.loss, evaluate(&replica).await["loss"]]
        })
    };
    let exact = measured(Precision::F32);
    for (exact, rounded) in exact.into_iter().zip(measured(Precision::Bf16)) {
        let differs = (rounded / exact - 1.0).abs();
        assert!((1e-7..1e-2).contains(&differs), "{differs}");
    }
}

#[test]
fn a_batch_that_cannot_be_assembled_wants_nothing_and_its_computation_says_why() {
    block_on(async {
        let replica = start().await;
        let beyond = batch(100_000);
        assert!(replica.prepare(beyond).await.wants().await.is_empty());
        let error = replica.compute(beyond, Step::default()).await.unwrap_err();
        assert!(matches!(error, ReplicaError::Input(_)), "{error}");
        assert!(error.to_string().contains("100000 to 100016"), "{error}");
    });
}

#[test]
fn initial_values_are_the_same_after_training() {
    block_on(async {
        let replica = start().await;
        let fresh = replica.initial_values().await.unwrap();
        let ones = vec![1.0; replica.description().variables[0].elements()];
        let ones = Elements::new(payload::to_bytes(&ones), Dtype::F32);
        let part = Part::whole(PartOf::Variable(0), ones);
        replica.load(vec![part]).await;
        replica.prepare(batch(0)).await;
        replica.compute(batch(0), Step::default()).await.unwrap();
        assert_eq!(replica.initial_values().await.unwrap(), fresh);
    });
}

#[test]
fn a_group_that_matches_no_variable_is_refused_with_those_there_are() {
    let start = |pattern: &str| {
        let mut job = Job::default();
        "softmax".clone_into(&mut job.model.name);
        job.groups = ["*.bias", pattern].map(of_pattern).to_vec();
        block_on(ModelReplica::start(
            Arc::new(job),
            Registry::builtin(),
            Device::Cpu,
        ))
    };
    assert!(start("*.weight").is_ok());
    let error = start("hidden.*").err().unwrap().to_string();
    assert!(error.contains("\"hidden.*\""), "{error}");
    assert!(error.contains("output.bias"), "{error}");
}

fn of_pattern(pattern: &str) -> Group {
    Group {
        variables: pattern.to_owned(),
        frozen: true,
        ..Group::default()
    }
}
