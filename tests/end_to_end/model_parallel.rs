//! A model in stages on the devices of a worker.

use std::path::Path;

use tests::{Cluster, eventually};

use crate::devices::refused;
use crate::program;
use crate::ring_operations::{check_metrics_are_documented, is_named_while_it_is_stopped, metric};
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
fn stages_of_one_and_of_several_workers_equal_one_device() {
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
        // Four stages on one, two and four workers; two stage groups; a group and a spare worker.
        for (workers, devices, stage_workers) in [
            (1, FOUR, 1),
            (2, "cpu,cpu", 1),
            (2, "cpu", 2),
            (4, "cpu", 4),
            (4, "cpu", 2),
            (3, "cpu,cpu", 2),
        ] {
            let strategy = format!(
                "name = \"model-parallel\"\nschedule = \"{schedule}\"\nstages = 4\nmicro_batches = 5\nstage_workers = {stage_workers}\n"
            );
            let computing = workers - workers % stage_workers;
            let job = job(48 / computing, workers, &strategy, optimizer);
            let dir = train(&job, workers, devices);
            let found = weights(&dir.path().join("run/model.safetensors"));
            let difference = difference(&found, &alone);
            assert!(difference < 1e-5, "{job}: {difference}");
        }
    }
}

/// The steps are made by two workers at any time, with the same samples whoever they are, so the weights are those of a job that nothing
/// happened to.
#[test]
fn a_stage_group_goes_on_with_a_spare_worker_and_waits_for_one() {
    let job = "epochs = 30\nsteps = 300\nseed = 7\nbatch_size = 16\nclip_norm = 1.0\n[model]\nname = \"chain\"\n[strategy]\nname = \"model-parallel\"\nstages = 4\nstage_workers = 2\nmicro_batches = 3\n[cluster]\nworkers = 2\nlease_seconds = 2.0\n";
    let slow = [("TEST_STEP_MILLISECONDS", "5"), ("FLAMBEAU_DEVICE", "cpu")];
    let start = |workers| {
        let mut cluster = Cluster::start(program(), job, 0);
        for _ in 0..workers {
            cluster.add_worker(&slow);
        }
        cluster
    };
    let (expected, undisturbed) = start(2).finish();
    let mut cluster = start(3);
    let steps = |cluster: &Cluster| cluster.status()["steps"].as_u64().unwrap();
    eventually(|| steps(&cluster) > 20);
    // The spare worker takes stages, and then the ring is one worker short.
    cluster.workers[0].kill();
    let before = steps(&cluster);
    eventually(|| steps(&cluster) > before + 20);
    cluster.workers[1].kill();
    eventually(|| {
        cluster.status()["waiting_for"] == "1 of the 2 workers of a stage group have joined"
    });
    let waiting = steps(&cluster);
    let survivor = cluster.workers[2].process();
    cluster.restart_worker(0, &slow);
    eventually(|| steps(&cluster) > waiting + 20);
    assert!(tests::exists(survivor));
    cluster.workers.remove(1);
    let (summary, dir) = cluster.finish();
    assert_eq!(summary["steps"], 300);
    assert_eq!(summary["samples"], expected["samples"]);
    let model = |dir: &tempfile::TempDir| weights(&dir.path().join("run/model.safetensors"));
    assert_eq!(difference(&model(&dir), &model(&undisturbed)), 0.0);
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

/// Starts a stage group of three workers, each of which has a stage or two.
fn stage_group() -> Cluster {
    let job = "epochs = 1000\n[model]\nname = \"chain\"\n[strategy]\nname = \"model-parallel\"\nstages = 4\nstage_workers = 3\nmicro_batches = 6\n";
    let mut cluster = Cluster::start(program(), job, 0);
    for _ in 0..3 {
        cluster.add_worker(&[("FLAMBEAU_DEVICE", "cpu")]);
    }
    eventually(|| cluster.status()["steps"].as_u64().unwrap() > 20);
    cluster
}

#[test]
fn the_status_names_a_worker_that_holds_up_its_stage_group() {
    let cluster = stage_group();
    for stopped in &cluster.workers {
        is_named_while_it_is_stopped(&cluster, stopped);
    }
    // Each sample of the group counts once. Training goes on meanwhile.
    let counted = || cluster.status()["samples"].as_f64().unwrap();
    let before = counted();
    let computed = cluster.workers.iter();
    let computed: f64 = computed
        .map(|worker| metric(worker, "flambeau_worker_samples_total"))
        .sum();
    let after = counted();
    assert!(
        computed > 0.75 * before && computed < 1.5 * after,
        "{before} {computed} {after}"
    );
    let bubbles = cluster
        .workers
        .iter()
        .map(|worker| metric(worker, "flambeau_worker_pipeline_ideal_bubble_ratio"));
    let bubbles: Vec<f64> = bubbles.collect();
    assert!(
        bubbles.iter().all(|bubble| *bubble > 0.2 && *bubble < 0.5),
        "{bubbles:?}"
    );
    cluster.coordinator.terminate();
}

#[test]
fn a_worker_with_another_number_of_devices_leaves_alone() {
    let job = "epochs = 2\n[model]\nname = \"chain\"\n[strategy]\nname = \"model-parallel\"\nstages = 4\nstage_workers = 2\n";
    let mut cluster = Cluster::start(program(), job, 0);
    let slow = [("TEST_STEP_MILLISECONDS", "5"), ("FLAMBEAU_DEVICE", "cpu")];
    for _ in 0..2 {
        cluster.add_worker(&slow);
    }
    eventually(|| cluster.status()["steps"].as_u64().unwrap() > 5);
    cluster.add_worker(&[("FLAMBEAU_DEVICE", "cpu,cpu")]);
    let mut other = cluster.workers.pop().unwrap();
    assert_eq!(other.wait().code(), Some(3), "{}", other.log());
    let log = other.log();
    assert!(
        log.contains("all workers must have the same number of devices"),
        "{log}"
    );
    let (summary, _) = cluster.finish();
    assert_eq!(summary["samples"], 2 * 1437);
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
            &[
                "--set",
                "strategy.stages=3",
                "--set",
                "strategy.stage_workers=2",
            ],
            "2 workers with 2 devices each hold the model, and `strategy.stages = 3` leaves some without a stage",
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
