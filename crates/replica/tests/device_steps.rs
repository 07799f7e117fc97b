//! Steps with gradients that stay on the device make the values that steps with updates on the host make. A GPU is not needed: on the CPU
//! the same operations run.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use candle_core::Device;
use flambeau_replica::{Computed, DeviceReplicas, Mirror, Positions, Replica, Step, StepsMade};
use model::registry::Registry;
use shared_proto::ids::Clock;
use shared_proto::job::Job;
use shared_proto::payload::Elements;
use shared_proto::step::{Part, PartOf, Want};

const SAMPLES: u64 = 24;

const STRATEGY: &str = "[strategy]\nname = \"mirrored\"\n";

async fn start(job: &str) -> DeviceReplicas {
    let job = Arc::new(Job::from_toml(job).unwrap());
    DeviceReplicas::start(&job, &Registry::builtin(), &[Device::Cpu])
        .await
        .unwrap()
}

/// Prepares a step, with made-up rows of tables.
async fn prepare(replica: &DeviceReplicas, step: u64) -> (Positions, Step) {
    let positions = Positions {
        data_epoch: 0,
        start: step * SAMPLES,
        end: (step + 1) * SAMPLES,
    };
    let description = replica.description();
    for want in replica.prepare(positions).await.wants().await {
        if let Want::Rows(wanted) = want {
            let count = wanted.ids.len() * description.tables[wanted.table].dimension as usize;
            let values: Vec<f32> = (0..count).map(|n| (n as f32 * 1.7).sin() * 0.1).collect();
            let part = Part::whole(PartOf::Table(wanted.table), values.into());
            replica.load(vec![part]).await;
        }
    }
    let clock = Clock(step);
    (positions, Step { clock, rank: 0 })
}

fn made(step: u64) -> StepsMade {
    StepsMade {
        clock: Clock(step + 1),
        ..StepsMade::default()
    }
}

fn numbers<'a>(elements: impl IntoIterator<Item = &'a Elements>) -> Vec<f32> {
    let one = |elements: &Elements| {
        let mut numbers = vec![0.0; elements.len()];
        elements.copy_to(&mut numbers);
        numbers
    };
    elements.into_iter().flat_map(one).collect()
}

fn assert_near(expected: &[f32], found: &[f32], what: &str) {
    assert_eq!(expected.len(), found.len(), "{what}");
    for (expected, found) in expected.iter().zip(found) {
        let apart = (expected - found).abs() / expected.abs().max(0.01);
        assert!(apart < 1e-4, "{what}: {found} in place of {expected}");
    }
}

async fn on_host(replica: &DeviceReplicas, step: u64) -> Computed {
    let (positions, of) = prepare(replica, step).await;
    let computed = replica.compute(positions, of).await.unwrap();
    let gradient = numbers(&computed.gradients.values);
    replica.update(gradient.into(), made(step)).await.unwrap();
    computed
}

/// Makes a step on the device. Returns what it computes, with its gradients.
async fn on_device(replica: &DeviceReplicas, step: u64) -> Computed {
    let (positions, of) = prepare(replica, step).await;
    let device = replica.device_steps().unwrap();
    assert!(!device.saves_copies());
    let mut computed = device.compute_on_device(positions, of).await.unwrap();
    assert!(computed.gradients.values.is_empty());
    computed.gradients.values = device.gradients_on_device().await.unwrap();
    device.update_on_device(made(step)).await.unwrap();
    assert!(device.gradients_on_device().await.is_err());
    computed
}

#[tokio::test]
async fn steps_on_the_device_are_those_on_the_host() {
    let mlp = "[model]\nname = \"mlp\"\nhidden = [12]\n";
    let norm = "[model]\nname = \"resnet20\"\n";
    let tables = "[data]\nkind = \"clicks\"\n[data.options]\nsamples = 500\nrows = 90\n[model]\nname = \"deepfm\"\n";
    for (settings, model) in [
        ("[optimizer]\nname = \"momentum\"\n", mlp),
        ("clip_norm = 0.3\n[optimizer]\nname = \"sgd\"\n", mlp),
        (
            "clip_value = 0.01\nclip_norm = 0.02\n[optimizer]\nname = \"sgd\"\n",
            mlp,
        ),
        ("ema_decay = 0.8\n[optimizer]\nname = \"adagrad\"\n", mlp),
        // Averaged variables change in the pass.
        ("[optimizer]\nname = \"sgd\"\nlearning_rate = 0.01\n", norm),
        ("[optimizer]\nname = \"sgd\"\n", tables),
    ] {
        let job = format!("{settings}{model}{STRATEGY}");
        let (host, device) = (start(&job).await, start(&job).await);
        for step in 0..4 {
            let expected = on_host(&host, step).await;
            let found = on_device(&device, step).await;
            let what = format!("{settings}{model} step {step}");
            let both = [&expected, &found];
            let [a, b] = both.map(|of| [of.loss as f32, of.gradients.norm as f32]);
            assert_near(&a, &b, &what);
            let [a, b] = both.map(|of| numbers(&of.gradients.values));
            assert_near(&a, &b, &what);
            let [a, b] = both.map(|of| numbers(of.gradients.rows.iter().map(|rows| &rows.values)));
            assert_near(&a, &b, &what);
            assert_eq!(a.is_empty(), model != tables);
        }
        let [expected, found] = [&host, &device].map(|replica| replica.state());
        let (expected, found) = (expected.await.unwrap(), found.await.unwrap());
        assert_near(&expected.values, &found.values, &job);
        assert_eq!(found.updates, 4);
        assert_eq!(device.made().await.unwrap(), Some(made(3)));
    }
}

#[tokio::test]
async fn a_step_that_is_given_up_changes_nothing() {
    let job = format!("[model]\nname = \"resnet20\"\n{STRATEGY}");
    let replica = start(&job).await;
    on_device(&replica, 0).await;
    let before = replica.state().await.unwrap();
    let (positions, step) = prepare(&replica, 1).await;
    let device = replica.device_steps().unwrap();
    let first = device.compute_on_device(positions, step).await.unwrap();
    replica.note_made(made(0)).await.unwrap();
    // Its gradients are forgotten.
    assert!(device.update_on_device(made(1)).await.is_err());
    assert_eq!(replica.state().await.unwrap(), before);
    let (positions, step) = prepare(&replica, 1).await;
    let again = device.compute_on_device(positions, step).await.unwrap();
    assert_eq!(first.loss, again.loss);
    assert_eq!(first.gradients.norm, again.gradients.norm);
}

#[tokio::test]
async fn jobs_that_need_whole_gradients_elsewhere_step_on_the_host() {
    for job in [
        format!("accumulate = 2\n{STRATEGY}"),
        "[strategy]\nname = \"model-parallel\"\n".to_owned(),
        "clip_norm = 1.0\n[data]\nkind = \"clicks\"\n[data.options]\nsamples = 500\n[model]\nname = \"deepfm\"\n[strategy]\nname = \"hybrid\"\nmode = \"sync\"\n".to_owned(),
    ] {
        assert!(start(&job).await.device_steps().is_none(), "{job}");
    }
}
