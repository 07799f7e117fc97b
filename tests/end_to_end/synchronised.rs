//! Batch normalisation over the samples of all replicas of a step.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use candle_core::{Device, Tensor};
use model::registry::Registry;
use shared_proto::job::Job;
use tests::models::Joint;
use tests::{Cluster, eventually};
use worker::alone::local;

use crate::program;
use crate::weights::{difference, largest, weights};

type Weights = BTreeMap<String, Tensor>;

/// Returns the settings of a strategy with synchronised batch normalisation.
fn synchronised(strategy: &str, workers: usize) -> String {
    format!(
        "[strategy]\nname = \"{strategy}\"\nbatch_norm = \"synchronised\"\n[cluster]\nworkers = {workers}\nlease_seconds = 2.0\n"
    )
}

/// Trains with so many workers, each with these devices, and with this environment besides.
fn train(
    job: &str,
    workers: usize,
    devices: &str,
    env: &[(&str, &str)],
) -> (serde_json::Value, tempfile::TempDir, Vec<u32>) {
    let mut cluster = Cluster::start(program(), job, 0);
    for _ in 0..workers {
        cluster.add_worker(&[env, &[("FLAMBEAU_DEVICE", devices)]].concat());
    }
    let processes = cluster.workers.iter().map(|worker| worker.process());
    let processes = processes.collect();
    let (summary, dir) = cluster.finish();
    (summary, dir, processes)
}

/// Trains in one process. Returns the outcome, and the weights.
fn train_alone(job: &Job) -> (local::Outcome, Weights) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("alone.safetensors");
    let registry = Registry::builtin().model::<Joint>("joint");
    let outcome = local::train(job, &registry, &Device::Cpu, Some(&file)).unwrap();
    (outcome, weights(&file))
}

/// Returns the largest difference of all variables, and that of trained ones.
fn differences(found: &Weights, expected: &Weights) -> (f32, f32) {
    let trained = |of: &Weights| {
        let trained = of.iter().filter(|(name, _)| !name.contains("running_"));
        trained.map(|(name, x)| (name.clone(), x.clone())).collect()
    };
    let of_trained = difference(&trained(found), &trained(expected));
    (difference(found, expected), of_trained)
}

/// Compares runs of a job with a process that has a batch as large as all of theirs. They must differ by less than 1e-5, trained
/// variables by less than a hundredth of what training has changed.
fn compare(job: &str, batch: usize, data: &str, runs: &[(&str, usize, &str)]) {
    let job = format!("epochs = 9\nseed = 7\n{job}{data}");
    let local = Job::from_toml(&format!("batch_size = {batch}\n{job}")).unwrap();
    let (outcome, alone) = train_alone(&local);
    let (_, initial) = train_alone(&Job {
        steps: Some(0),
        ..local
    });
    let (_, moved) = differences(&alone, &initial);
    for (strategy, workers, devices) in runs {
        let own = batch / workers;
        let job = format!(
            "batch_size = {own}\n{job}{}",
            synchronised(strategy, *workers)
        );
        let (summary, dir, _) = train(&job, *workers, devices, &[]);
        assert_eq!(summary["steps"], outcome.steps);
        assert_eq!(summary["samples"], outcome.samples);
        let together = weights(&dir.path().join("run/model.safetensors"));
        let (all, trained) = differences(&together, &alone);
        let what = format!(
            "{strategy}, {workers} workers, {devices}, {} steps: {all:.1e}, trained variables {trained:.1e} of {moved:.1e}",
            outcome.steps
        );
        println!("{what}");
        assert!(all < 1e-5 && trained < moved / 100.0, "{what}");
    }
}

/// Several devices, several workers, and both.
const RUNS: [(&str, usize, &str); 5] = [
    ("mirrored", 1, "cpu,cpu"),
    ("mirrored", 1, "cpu,cpu,cpu"),
    ("central-storage", 1, "cpu,cpu"),
    ("multi-worker-mirrored", 2, "cpu"),
    ("multi-worker-mirrored", 2, "cpu,cpu"),
];

/// ResNet-20, to be followed by an optimizer. The learning rate is small. In networks with ReLU an element that falls to the other
/// side of zero by a rounding changes a gradient by a thousandth, so even runs of one process that begin a rounding apart drift apart:
/// at a rate of 0.01 by 5e-3 in ten steps.
const RESNET: &str = "[model]\nname = \"resnet20\"\n[optimizer]\nlearning_rate = 1e-5\n";
const SGD: &str = "name = \"sgd\"\n";
/// Adam divides a gradient by its own size. With the usual epsilon, one that consists of roundings moves a weight as far as any other.
const ADAM: &str = "name = \"adam\"\nepsilon = 0.1\n";

#[test]
fn synchronised_replicas_equal_one_process() {
    // More steps than an epoch has: in its short tail the second worker has no samples.
    compare(&format!("steps = 24\n{RESNET}{SGD}"), 64, "", &RUNS);
    compare(&format!("steps = 24\n{RESNET}{ADAM}"), 64, "", &RUNS[3..4]);
    let smooth = "[model]\nname = \"joint\"\n[optimizer]\nname = \"sgd\"\nlearning_rate = 0.01\n";
    compare(&format!("steps = 50\n{smooth}"), 64, "", &RUNS);
}

/// candle has no momentum to compare with.
#[test]
fn momentum_of_two_replicas_is_that_of_one_device() {
    let job = |batch: usize, steps: usize, strategy: &str| {
        format!(
            "epochs = 9\nseed = 7\nsteps = {steps}\nbatch_size = {batch}\n{RESNET}name = \"momentum\"\n{strategy}"
        )
    };
    let model = |job: &str, workers| {
        let (_, dir, _) = train(job, workers, "cpu", &[]);
        weights(&dir.path().join("run/model.safetensors"))
    };
    let one_device = "[strategy]\nname = \"one-device\"\n";
    let alone = model(&job(64, 24, one_device), 1);
    let (_, moved) = differences(&alone, &model(&job(64, 1, one_device), 1));
    let two = synchronised("multi-worker-mirrored", 2);
    let (all, trained) = differences(&model(&job(32, 24, &two), 2), &alone);
    assert!(
        all < 1e-5 && trained < moved / 100.0,
        "{all:.1e}, trained variables {trained:.1e} of {moved:.1e}"
    );
}

#[test]
fn replicas_that_normalise_by_their_own_samples_are_another_model() {
    let job = |strategy: &str| {
        format!(
            "epochs = 1\nsteps = 12\nbatch_size = 64\n{RESNET}{SGD}[strategy]\nname = \"{strategy}\"\n"
        )
    };
    let model = |strategy: &str, devices: &str| {
        let (_, dir, _) = train(&job(strategy), 1, devices, &[]);
        weights(&dir.path().join("run/model.safetensors"))
    };
    let (all, trained) = differences(&model("mirrored", "cpu,cpu"), &model("one-device", "cpu"));
    assert!(all > 1e-3 && trained > 1e-5, "{all:.1e}, {trained:.1e}");
}

/// 50 steps of ResNet-20 on pictures of 32 x 32, which takes minutes in a build that is not optimised.
#[test]
#[ignore = "it takes minutes"]
fn fifty_steps_on_cifar_equal_one_process() {
    let Some(folder) = crate::data_set("cifar10-subset") else {
        return;
    };
    let data = format!("[data]\nkind = \"cifar10\"\ndir = {folder:?}\n");
    let runs = [RUNS[0], RUNS[1], RUNS[3]];
    for optimizer in [SGD, ADAM] {
        compare(
            &format!("steps = 50\n{RESNET}{optimizer}"),
            48,
            &data,
            &runs,
        );
    }
}

/// Returns the digests of a process's variables before each of its steps, each once.
fn digests(folder: &Path, process: u32) -> Vec<String> {
    let text = std::fs::read_to_string(folder.join(process.to_string())).unwrap();
    let mut digests: Vec<String> = text.lines().map(str::to_owned).collect();
    digests.dedup();
    digests
}

const JOINT: &str = "batch_size = 16\n[model]\nname = \"joint\"\n[optimizer]\nname = \"adam\"\n";

#[test]
fn all_replicas_hold_the_same_bits_at_each_step() {
    let mut of_runs = Vec::new();
    for (strategy, workers, devices) in [
        ("multi-worker-mirrored", 3, "cpu"),
        ("multi-worker-mirrored", 3, "cpu"),
        ("multi-worker-mirrored", 2, "cpu,cpu"),
        ("mirrored", 1, "cpu,cpu,cpu"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let job = format!(
            "steps = 28\nepochs = 1\n{JOINT}{}",
            synchronised(strategy, workers)
        );
        let env = [("TEST_DIGESTS", folder.path().to_str().unwrap())];
        let (summary, dir, processes) = train(&job, workers, devices, &env);
        assert_eq!(summary["steps"], 28);
        let first = digests(folder.path(), processes[0]);
        let distinct: BTreeSet<&String> = first.iter().collect();
        assert_eq!((first.len(), distinct.len()), (28, 28), "{strategy}");
        for process in processes {
            assert_eq!(digests(folder.path(), process), first, "{strategy}");
        }
        let model = std::fs::read(dir.path().join("run/model.safetensors"));
        of_runs.push((first, model.unwrap()));
    }
    assert!(of_runs[0] == of_runs[1], "a repeated run has other bits");
}

/// A worker is killed three times in the middle of a pass, while others wait for its sums.
#[test]
fn a_killed_worker_holds_up_no_pass_and_spoils_no_replica() {
    let folder = tempfile::tempdir().unwrap();
    let job = format!(
        "epochs = 3\n{JOINT}{}",
        synchronised("multi-worker-mirrored", 3)
    );
    let env = [
        ("TEST_DIGESTS", folder.path().to_str().unwrap()),
        ("TEST_STEP_MILLISECONDS", "20"),
    ];
    let mut cluster = Cluster::start(program(), &job, 0);
    for _ in 0..3 {
        cluster.add_worker(&env);
    }
    for kill in 1..=3 {
        eventually(|| cluster.status()["samples"].as_u64().unwrap() > 900 * kill);
        cluster.workers[2].kill();
        cluster.restart_worker(2, &env);
    }
    let survivors = [0, 1].map(|worker| cluster.workers[worker].process());
    let log = cluster.workers[0].log();
    let (summary, dir) = cluster.finish();
    assert_eq!(summary["samples"], 3 * 1437);
    assert!(log.contains("a step is abandoned"), "{log}");
    let [first, second] = survivors.map(|process| {
        let digests = digests(folder.path(), process);
        digests.into_iter().collect::<BTreeSet<String>>()
    });
    // In the last steps of an epoch, one of them may have no samples.
    assert!(first.len() > 60, "{} steps", first.len());
    let differ = first.symmetric_difference(&second).count();
    assert!(differ <= 6, "{differ} of {} states differ", first.len());
    let model = weights(&dir.path().join("run/model.safetensors"));
    assert!(model.values().map(largest).all(f32::is_finite));
}

#[test]
fn what_cannot_be_synchronised_is_refused_by_name() {
    let set = ["--set", "strategy.batch_norm=synchronised"];
    for (settings, expected) in [
        (
            &[][..],
            "`strategy.name` \"parameter-server\"; its workers have no links",
        ),
        (
            &["--strategy", "one-device"],
            "`strategy.name` \"one-device\"; its only replica has all samples",
        ),
        (
            &["--strategy", "multi-worker-mirrored", "--model", "mlp"],
            "has no effect on the model \"mlp\"",
        ),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path().join("run");
        let common = ["train", "--run-dir", run.to_str().unwrap()];
        let output = program().run(&[&common, settings, &set].concat());
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(
            !output.status.success() && said.contains(expected),
            "{said}"
        );
    }
}
