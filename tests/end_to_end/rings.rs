//! Strategies without parameter servers: workers that form rings.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;

use candle_core::Device;
use model::registry::Registry;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use shared_proto::job::Job;
use tests::{Cluster, eventually};
use worker::alone::local;

use crate::program;
use crate::weights::{difference, largest, weights};

pub(crate) const MIRRORED: &str = "[strategy]\nname = \"multi-worker-mirrored\"\n";

/// Trains with so many workers and no server. Returns the summary, and the folder of the run.
fn train(job: &str, workers: usize) -> (serde_json::Value, tempfile::TempDir) {
    let mut cluster = Cluster::start(program(), job, 0);
    for _ in 0..workers {
        cluster.add_worker(&[]);
    }
    cluster.finish()
}

#[test]
fn four_workers_equal_one_process_with_four_times_the_batch() {
    const JOB: &str =
        "epochs = 9\nsteps = 50\nseed = 7\n[optimizer]\nname = \"sgd\"\nlearning_rate = 0.2\n";
    for batch in ["batch_size = 16\n", "batch_size = 4\naccumulate = 4\n"] {
        let (summary, dir) = train(
            &format!("{batch}{JOB}{MIRRORED}[cluster]\nworkers = 4\n"),
            4,
        );
        assert_eq!(summary["steps"], 50);
        let together = weights(&dir.path().join("run/model.safetensors"));

        let job = Job::from_toml(&format!("batch_size = 64\n{JOB}")).unwrap();
        let alone = dir.path().join("alone.safetensors");
        let outcome = local::train(&job, &Registry::builtin(), &Device::Cpu, Some(&alone)).unwrap();
        // 50 steps are more than two epochs: their short tails are among them, in which some workers have no samples.
        assert_eq!(summary["samples"], outcome.samples);
        let alone = weights(&alone);
        assert!(difference(&together, &alone) < 1e-5);
        let moved = alone.values().map(largest).fold(0.0, f32::max);
        assert!(moved > 0.1, "nothing was trained");
    }
}

#[test]
fn optimizers_do_on_workers_what_they_do_on_servers() {
    for settings in [
        "[optimizer]\nname = \"momentum\"\n",
        "[optimizer]\nname = \"adam\"\n[schedule]\nkind = \"cosine\"\nwarmup_steps = 5\n",
        "ema_decay = 0.9\n[optimizer]\nname = \"ftrl\"\n",
        "[model]\nname = \"normal\"\n[[groups]]\nvariables = \"line.bias\"\nfrozen = true\n",
    ] {
        let job = |strategy: &str, ps: &str| {
            format!(
                "steps = 30\nepochs = 9\nseed = 3\nbatch_size = 16\n{settings}{strategy}[cluster]\nworkers = 2\n{ps}"
            )
        };
        let (mirrored, dir) = train(&job(MIRRORED, ""), 2);
        let together = weights(&dir.path().join("run/model.safetensors"));
        let mut cluster = Cluster::start(
            program(),
            &job("[strategy]\nmode = \"sync\"\n", "ps = 1\n"),
            1,
        );
        cluster.add_worker(&[]);
        cluster.add_worker(&[]);
        let (served, dir) = cluster.finish();
        let on_servers = weights(&dir.path().join("run/model.safetensors"));
        let difference = difference(&together, &on_servers);
        assert!(difference < 1e-5, "{settings}: {difference}");
        assert_eq!(mirrored["samples"], served["samples"]);
    }
}

#[test]
fn one_device_equals_a_process_without_a_cluster() {
    const JOB: &str = "epochs = 2\nseed = 7\n[optimizer]\nname = \"adam\"\n";
    let (summary, dir) = train(&format!("{JOB}[strategy]\nname = \"one-device\"\n"), 1);
    let found = weights(&dir.path().join("run/model.safetensors"));
    let job = Job::from_toml(JOB).unwrap();
    let alone = dir.path().join("alone.safetensors");
    let outcome = local::train(&job, &Registry::builtin(), &Device::Cpu, Some(&alone)).unwrap();
    assert_eq!(summary["steps"], outcome.steps);
    assert!(difference(&found, &weights(&alone)) < 1e-5);
}

#[test]
fn a_repeated_run_has_the_same_bits() {
    let job = format!("epochs = 2\nseed = 5\n{MIRRORED}[cluster]\nworkers = 3\n");
    let model = |(_, dir): (_, tempfile::TempDir)| {
        std::fs::read(dir.path().join("run/model.safetensors")).unwrap()
    };
    assert_eq!(model(train(&job, 3)), model(train(&job, 3)));
}

/// Returns the digests of a worker's weights before each of its steps.
pub(crate) fn digests(folder: &Path, worker: u32) -> Vec<String> {
    let text = std::fs::read_to_string(folder.join(worker.to_string())).unwrap();
    text.lines().map(str::to_owned).collect()
}

#[test]
fn all_workers_hold_the_same_bits_at_each_step() {
    let job = format!(
        "steps = 40\nepochs = 9\n[model]\nname = \"odd\"\n[optimizer]\nname = \"adam\"\n{MIRRORED}[cluster]\nworkers = 3\n"
    );
    let folder = tempfile::tempdir().unwrap();
    let mut cluster = Cluster::start(program(), &job, 0);
    for _ in 0..3 {
        cluster.add_worker(&[("TEST_DIGESTS", folder.path().to_str().unwrap())]);
    }
    let processes: Vec<u32> = cluster
        .workers
        .iter()
        .map(|worker| worker.process())
        .collect();
    cluster.finish();
    let first = digests(folder.path(), processes[0]);
    let distinct: BTreeSet<&String> = first.iter().collect();
    assert_eq!(distinct.len(), first.len(), "each step changes the weights");
    for process in processes {
        let others = digests(folder.path(), process);
        // The last step of an epoch may have no samples for some workers.
        assert!(others.len() >= 38);
        let known: BTreeSet<&String> = others.iter().collect();
        let both = first.iter().filter(|digest| known.contains(digest));
        assert!(both.count() >= 38, "the weights differ between workers");
    }
}

/// Writes a data set in which each of `samples` samples has a class of its own.
pub(crate) fn a_class_for_each(samples: usize) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let mut text = "label,x\n".to_owned();
    for sample in 0..samples {
        writeln!(text, "{sample},0.5").unwrap();
    }
    std::fs::write(dir.path().join("train.csv"), &text).unwrap();
    std::fs::write(dir.path().join("test.csv"), &text).unwrap();
    dir
}

/// Returns whether a sample counted once, in a step of one to three workers.
pub(crate) fn is_once(visits: f32) -> bool {
    let share = 1.0 / visits;
    let workers = share.round();
    (1.0..=3.0).contains(&workers) && (share - workers).abs() < 1e-3
}

/// Workers die and come back while they train. The weights count how often each sample was visited: a step with n workers
/// adds 1/n for each of its samples. So each weight is one of these numbers if and only if its sample counted once.
#[test]
fn each_sample_counts_once_whoever_dies() {
    const SAMPLES: usize = 600;
    let data = a_class_for_each(SAMPLES);
    let job = format!(
        "epochs = 1\nbatch_size = 1\n[data]\nkind = \"csv\"\ndir = {:?}\ntarget = \"class\"\n[model]\nname = \"visits\"\n[optimizer]\nname = \"sgd\"\nlearning_rate = 1.0\n{MIRRORED}[cluster]\nworkers = 3\nlease_seconds = 2.0\n",
        data.path()
    );
    let seed = rand::random();
    println!("seed {seed}");
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let slow = [("TEST_STEP_MILLISECONDS", "10")];
    let mut cluster = Cluster::start(program(), &job, 0);
    for _ in 0..3 {
        cluster.add_worker(&slow);
    }
    for kill in 1..=4 {
        eventually(|| cluster.status()["samples"].as_u64().unwrap() > 60 * kill);
        let victim = random.random_range(0..3);
        cluster.workers[victim].kill();
        if kill == 2 {
            cluster.coordinator.kill();
            cluster.restart_coordinator();
        }
        let others: Vec<u32> = (0..3)
            .filter(|worker| *worker != victim)
            .map(|w| cluster.workers[w].process())
            .collect();
        assert!(
            others.iter().all(|process| tests::exists(*process)),
            "a survivor has ended"
        );
        cluster.restart_worker(victim, &slow);
    }
    let (summary, dir) = cluster.finish();
    assert_eq!(summary["samples"], SAMPLES);
    let model = weights(&dir.path().join("run/model.safetensors"));
    for (name, values) in &model {
        for (sample, visits) in values.to_vec1::<f32>().unwrap().into_iter().enumerate() {
            assert!(
                is_once(visits),
                "{name}: sample {sample} was visited {visits} times"
            );
        }
    }
}

#[test]
fn a_ring_goes_on_without_a_worker_that_does_not_come_back() {
    // A pass has 60 steps, so that the worker is killed within one. At the end of a pass no data goes through the ring, and the loss of a worker is
    // found only when its lease ends.
    let job = format!(
        "epochs = 2\nbatch_size = 8\n[model]\nname = \"odd\"\n{MIRRORED}[cluster]\nworkers = 3\nlease_seconds = 20.0\n"
    );
    let slow = [("TEST_STEP_MILLISECONDS", "10")];
    let mut cluster = Cluster::start(program(), &job, 0);
    for _ in 0..3 {
        cluster.add_worker(&slow);
    }
    eventually(|| cluster.status()["steps"].as_u64().unwrap() > 5);
    cluster.workers.remove(1).kill();
    let before = cluster.status()["steps"].as_u64().unwrap();
    eventually(|| cluster.status()["steps"].as_u64().unwrap() > before + 20);
    let log = cluster.coordinator.log();
    let left_out = "the next ring is formed without a member that others have lost";
    assert!(
        log.contains(left_out) && !log.contains("nothing was heard from it"),
        "{log}"
    );
    let (summary, _) = cluster.finish();
    assert_eq!(summary["samples"], 2 * 1437);
}

#[test]
fn a_newcomer_joins_a_ring_that_trains() {
    let job = format!(
        "epochs = 3\n[model]\nname = \"odd\"\n[optimizer]\nname = \"adam\"\n{MIRRORED}[cluster]\nworkers = 1\n"
    );
    let slow = [("TEST_STEP_MILLISECONDS", "20")];
    let mut cluster = Cluster::start(program(), &job, 0);
    cluster.add_worker(&slow);
    eventually(|| cluster.status()["steps"].as_u64().unwrap() > 10);
    cluster.add_worker(&slow);
    eventually(|| {
        let log = cluster.workers[1].log();
        log.contains("in a ring of workers") && log.contains("rank=1")
    });
    let taken = cluster.workers[1].log();
    assert!(
        !taken.contains("ranks=2 steps=0"),
        "it has no steps: {taken}"
    );
    let (summary, _) = cluster.finish();
    assert_eq!(summary["samples"], 3 * 1437);
    assert_eq!(summary["steps_skipped"].as_u64().unwrap_or(0), 0);
}

#[test]
fn what_a_ring_cannot_train_is_refused_by_name() {
    let cases = [(
        "[model]\nname = \"deepfm\"\n[data]\nkind = \"clicks\"\n",
        "whose rows `strategy.name = \"multi-worker-mirrored\"` cannot keep",
    )];
    for (settings, expected) in cases {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("job.toml");
        std::fs::write(&file, format!("{settings}{MIRRORED}")).unwrap();
        let run = dir.path().join("run");
        let output = program().run(&[
            "train",
            file.to_str().unwrap(),
            "--run-dir",
            run.to_str().unwrap(),
        ]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(
            !output.status.success() && said.contains(expected),
            "{said}"
        );
    }
    let output = program().run(&["train", "--strategy", "one-device", "--workers", "2"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        said.contains("`cluster.workers` is 2, but must be 1, or absent"),
        "{said}"
    );
    let by_nccl = ["--set", "strategy.cross_device=nccl"];
    let output = program().run(
        &[
            &["train", "--strategy", "multi-worker-mirrored"],
            &by_nccl[..],
        ]
        .concat(),
    );
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        !output.status.success() && said.contains("built without the feature `nccl`"),
        "{said}"
    );
}

#[test]
fn a_ring_with_certificates_and_a_token_trains() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    let run = run.to_str().unwrap();
    let arguments = [
        "train",
        "--strategy",
        "multi-worker-mirrored",
        "--secure",
        "--epochs",
        "2",
        "--json",
        "--run-dir",
        run,
    ];
    let output = program().run(&arguments);
    assert!(output.status.success(), "{output:?}");
    let summary: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(summary["samples"], 2 * 1437);
}

/// Runs `flambeau train` to its end, with a run directory of that name.
pub(crate) fn train_in(dir: &Path, name: &str, arguments: &[&str]) -> serde_json::Value {
    let run = dir.join(name);
    let mut all = vec!["train", "--json", "--run-dir", run.to_str().unwrap()];
    all.extend(arguments);
    let output = program().run(&all);
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn a_job_moves_between_strategies_by_its_checkpoints() {
    const JOB: &str = "seed = 4\nbatch_size = 16\nepochs = 9\nema_decay = 0.9\n[optimizer]\nname = \"adam\"\n[model]\nname = \"normal\"\n[[groups]]\nvariables = \"line.bias\"\nfrozen = true\n[cluster]\nworkers = 2\n";
    const MIRRORED: [&str; 2] = ["--strategy", "multi-worker-mirrored"];
    const SERVED: [&str; 4] = ["--strategy", "parameter-server", "--mode", "sync"];
    let dir = tempfile::tempdir().unwrap();
    let job = dir.path().join("job.toml");
    std::fs::write(&job, JOB).unwrap();
    let job = job.to_str().unwrap();
    let whole = |name: &str, strategy: &[&str]| {
        let arguments = [&[job, "--steps", "40"], strategy].concat();
        train_in(dir.path(), name, &arguments);
        weights(&dir.path().join(name).join("model.safetensors"))
    };
    let undisturbed = whole("whole", &MIRRORED);
    for (name, first, second) in [
        ("served to mirrored", &SERVED[..], &MIRRORED[..]),
        ("mirrored to served", &MIRRORED, &SERVED),
        ("mirrored to mirrored", &MIRRORED, &MIRRORED),
    ] {
        let before = format!("{name}: before");
        train_in(
            dir.path(),
            &before,
            &[&[job, "--steps", "23"], first].concat(),
        );
        let from = dir.path().join(&before);
        let restore = ["--restore", from.to_str().unwrap()];
        let arguments = [&[job, "--steps", "40"], second, &restore].concat();
        let summary = train_in(dir.path(), name, &arguments);
        assert_eq!(summary["steps"], 40, "{name}");
        let found = weights(&dir.path().join(name).join("model.safetensors"));
        let difference = difference(&found, &undisturbed);
        assert!(difference < 1e-5, "{name}: {difference}");
    }
}

/// All workers die at once, twice. Each sample of the weights counts once, because they go back to a checkpoint with the data.
#[test]
fn a_job_outlives_all_its_workers() {
    const SAMPLES: usize = 400;
    let data = a_class_for_each(SAMPLES);
    let job = format!(
        "epochs = 1\nbatch_size = 1\n[data]\nkind = \"csv\"\ndir = {:?}\ntarget = \"class\"\n[model]\nname = \"visits\"\n[optimizer]\nname = \"sgd\"\nlearning_rate = 1.0\n{MIRRORED}[cluster]\nworkers = 2\nlease_seconds = 2.0\n[checkpoint]\nevery_steps = 10\n",
        data.path()
    );
    let slow = [("TEST_STEP_MILLISECONDS", "10")];
    let mut cluster = Cluster::start(program(), &job, 0);
    for _ in 0..2 {
        cluster.add_worker(&slow);
    }
    let saved = |cluster: &Cluster| cluster.status()["checkpoint"]["clock"].as_u64();
    for clock in [1, 100] {
        eventually(|| saved(&cluster) >= Some(clock));
        for worker in 0..2 {
            cluster.workers[worker].kill();
        }
        for worker in 0..2 {
            cluster.restart_worker(worker, &slow);
        }
    }
    let (summary, dir) = cluster.finish();
    assert_eq!(summary["samples"], SAMPLES);
    let events = std::fs::read_to_string(dir.path().join("run/metrics.jsonl")).unwrap();
    assert!(events.matches("\"restored\"").count() >= 2, "{events}");
    let model = weights(&dir.path().join("run/model.safetensors"));
    for (name, values) in &model {
        for (sample, visits) in values.to_vec1::<f32>().unwrap().into_iter().enumerate() {
            assert!(
                is_once(visits),
                "{name}: sample {sample} was visited {visits} times"
            );
        }
    }
}
