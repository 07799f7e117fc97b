//! A model in stages on the devices of a worker.

use std::path::Path;

use tests::{Cluster, eventually};

use crate::devices::refused;
use crate::program;
use crate::ring_operations::{check_metrics_are_documented, metric};
use crate::weights::{difference, largest, weights};

const MODEL: &str = "[model]\nname = \"mlp\"\nhidden = [32, 24, 16]\n";
const FOUR: &str = "cpu,cpu,cpu,cpu";

fn job(batch: usize, workers: usize, strategy: &str, settings: &str) -> String {
    format!(
        "epochs = 30\nsteps = 50\nseed = 7\nbatch_size = {batch}\n{settings}{MODEL}[strategy]\n{strategy}[cluster]\nworkers = {workers}\n"
    )
}

/// Trains with so many workers, each with these devices.
fn train(job: &str, workers: usize, devices: &str) -> tempfile::TempDir {
    let mut cluster = Cluster::start(program(), job, 0);
    for _ in 0..workers {
        cluster.add_worker(&[("FLAMBEAU_DEVICE", devices)]);
    }
    let (summary, dir) = cluster.finish();
    assert_eq!(summary["steps"], 50, "{summary}");
    dir
}

#[test]
fn stages_of_one_and_of_two_workers_equal_one_device() {
    for (optimizer, schedule) in [
        (
            "[optimizer]\nname = \"sgd\"\nlearning_rate = 0.2\n",
            "gpipe",
        ),
        ("[optimizer]\nname = \"momentum\"\n", "1f1b"),
        ("[optimizer]\nname = \"adam\"\n", "1f1b"),
    ] {
        let one = job(48, 1, "name = \"one-device\"\n", optimizer);
        let dir = train(&one, 1, "cpu");
        let alone = weights(&dir.path().join("run/model.safetensors"));
        let moved = alone.values().map(largest).fold(0.0, f32::max);
        assert!(moved > 0.1, "nothing was trained");
        for (workers, devices) in [(1, FOUR), (2, "cpu,cpu")] {
            let strategy = format!(
                "name = \"model-parallel\"\nschedule = \"{schedule}\"\nstages = 4\nmicro_batches = 5\n"
            );
            let job = job(48 / workers, workers, &strategy, optimizer);
            let dir = train(&job, workers, devices);
            let found = weights(&dir.path().join("run/model.safetensors"));
            let difference = difference(&found, &alone);
            assert!(difference < 1e-5, "{job}: {difference}");
        }
    }
}

/// Trains by `flambeau train`, which must succeed.
fn command(arguments: &[&str]) {
    let output = program().run(arguments);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
}

#[test]
fn a_checkpoint_goes_from_one_device_to_stages_and_back() {
    let dir = tempfile::tempdir().unwrap();
    let place = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let run = |name: &str, steps: &str, more: &[&str]| {
        let run_dir = place(name);
        let common = [
            "train",
            "--hidden",
            "32,24,16",
            "--seed",
            "5",
            "--epochs",
            "9",
            "--steps",
            steps,
            "--run-dir",
            &run_dir,
        ];
        command(&[&common, more].concat());
        weights(&Path::new(&run_dir).join("model.safetensors"))
    };
    let alone = ["--strategy", "one-device", "--device", "cpu"];
    let stages = ["--strategy", "model-parallel", "--devices", FOUR];
    let from = |run: &str| ["--restore".to_owned(), place(run)];
    let expected = run("whole", "40", &alone);
    run("first", "10", &alone);
    let first = from("first");
    let then: Vec<&str> = first.iter().map(String::as_str).chain(stages).collect();
    run("second", "25", &then);
    let second = from("second");
    let then: Vec<&str> = second.iter().map(String::as_str).chain(alone).collect();
    let found = run("third", "40", &then);
    let difference = difference(&found, &expected);
    assert!(difference < 1e-5, "{difference}");
}

#[test]
fn the_bubble_is_a_metric() {
    let job =
        format!("epochs = 1000\n{MODEL}[strategy]\nname = \"model-parallel\"\nmicro_batches = 9\n");
    let mut cluster = Cluster::start(program(), &job, 0);
    cluster.add_worker(&[("FLAMBEAU_DEVICE", FOUR)]);
    let worker = |name: &str| metric(&cluster.workers[0], name);
    eventually(|| worker("flambeau_worker_steps_total") > 20.0);
    let ideal = worker("flambeau_worker_pipeline_ideal_bubble_ratio");
    assert!((ideal - 3.0 / 12.0).abs() < 1e-9, "{ideal}");
    let measured = worker("flambeau_worker_pipeline_bubble_ratio");
    // On two cores, four devices wait for each other.
    assert!(measured > 0.0 && measured < 1.0, "{measured}");
    check_metrics_are_documented(&cluster.workers[0]);
    cluster.coordinator.terminate();
    cluster.workers[0].terminate();
}

#[test]
fn what_cannot_be_cut_is_refused_before_anything_is_made() {
    for (settings, expected) in [
        (
            &["--model", "logistic"][..],
            "is no chain of blocks, so it cannot be cut into 2 stages",
        ),
        (
            &["--set", "strategy.stages=1"],
            "`strategy.stages = 1` leaves some without a stage",
        ),
        (
            &["--set", "strategy.stages=3"],
            "it is a chain of 2 blocks, too few for 3 stages",
        ),
        (
            &["--set", "strategy.batch_norm=synchronised"],
            "`strategy.name` \"model-parallel\"; its stages compute one micro-batch after the other",
        ),
    ] {
        let strategy = ["--strategy", "model-parallel", "--devices", "cpu,cpu"];
        let said = refused(&[&strategy, settings].concat());
        assert!(said.contains(expected), "{said}");
    }
}
