//! An optimizer's state that is shared out among the workers of a ring.

use std::collections::BTreeMap;

use candle_core::Tensor;
use tests::{Cluster, Daemon, eventually};

use crate::program;
use crate::ring_operations::metric;
use crate::rings::{MIRRORED, a_class_for_each, is_once, train_in};
use crate::weights::{difference, weights};

/// Trains with three workers. Returns the bytes of the weights.
fn trained(settings: &str, strategy: &str) -> Vec<u8> {
    trained_by(3, &format!("batch_size = 16\n{settings}"), strategy)
}

fn trained_by(workers: usize, settings: &str, strategy: &str) -> Vec<u8> {
    let job = format!(
        "steps = 25\nepochs = 9\nseed = 3\n{settings}{MIRRORED}{strategy}[cluster]\nworkers = {workers}\n"
    );
    let mut cluster = Cluster::start(program(), &job, 0);
    for _ in 0..workers {
        cluster.add_worker(&[]);
    }
    let (summary, dir) = cluster.finish();
    assert_eq!(summary["steps"], 25);
    std::fs::read(dir.path().join("run/model.safetensors")).unwrap()
}

#[test]
fn shares_of_the_state_give_the_same_bits_as_all_of_it() {
    // Enough elements for a ring, and so few that whole vectors are exchanged.
    const LARGE: &str = "[model]\nname = \"mlp\"\nhidden = [256, 128]\n";
    for (settings, wire) in [
        (format!("[optimizer]\nname = \"adam\"\n{LARGE}"), "f32"),
        (format!("ema_decay = 0.9\n[optimizer]\nname = \"momentum\"\n{LARGE}"), "bf16"),
        (
            "[optimizer]\nname = \"adagrad\"\n[model]\nname = \"normal\"\n[[groups]]\nvariables = \"line.bias\"\nfrozen = true\n"
                .to_owned(),
            "f32",
        ),
    ] {
        let wire = format!("wire = \"{wire}\"\n");
        let whole = trained(&settings, &wire);
        for copies in [1, 2, 5] {
            let shared = trained(&settings, &format!("{wire}optimizer_copies = {copies}\n"));
            assert!(shared == whole, "{settings}: {copies} copies");
        }
    }
    // Multiplying and dividing by 100 is not exact.
    let alone = |strategy| {
        trained_by(
            1,
            "batch_size = 100\n[optimizer]\nname = \"adam\"\n",
            strategy,
        )
    };
    assert!(
        alone("optimizer_copies = 1\n") == alone(""),
        "a worker that is alone"
    );
}

#[test]
fn each_worker_has_its_share_of_the_memory() {
    // Two slots of four bytes for each of 64 * 256 + 256 * 10 weights and their biases.
    const WHOLE: u64 = 8 * (64 * 256 + 256 + 256 * 10 + 10);
    let held = |worker: &Daemon| metric(worker, "flambeau_worker_optimizer_slot_bytes ") as u64;
    for (copies, workers) in [(1, 4), (2, 4), (1, 3)] {
        let job = format!(
            "epochs = 99\nbatch_size = 4\n[optimizer]\nname = \"adam\"\n[model]\nname = \"mlp\"\nhidden = [256]\n{MIRRORED}optimizer_copies = {copies}\n[cluster]\nworkers = {workers}\n"
        );
        let mut cluster = Cluster::start(program(), &job, 0);
        for _ in 0..workers {
            cluster.add_worker(&[]);
        }
        eventually(|| cluster.status()["steps"].as_u64().unwrap() > 3);
        let held: Vec<u64> = cluster.workers.iter().map(held).collect();
        // The gradients' vector has three counts at its end, and so the last segment fewer elements.
        let each = WHOLE * copies / workers as u64;
        assert!(
            held.iter().all(|bytes| bytes.abs_diff(each) <= 8 * 4),
            "{held:?}, not {each} each"
        );
        assert_eq!(held.iter().sum::<u64>(), WHOLE * copies);
    }
}

/// One of three workers dies, again and again. With two copies no checkpoint is read; with one, all go back to the newest.
#[test]
fn a_lost_share_is_in_another_copy_or_in_a_checkpoint() {
    const SAMPLES: usize = 500;
    for copies in [1, 2] {
        let data = a_class_for_each(SAMPLES);
        let job = format!(
            "epochs = 1\nbatch_size = 1\n[data]\nkind = \"csv\"\ndir = {:?}\ntarget = \"class\"\n[model]\nname = \"visits\"\n[optimizer]\nname = \"momentum\"\nlearning_rate = 1.0\nmomentum = 0.0\n{MIRRORED}optimizer_copies = {copies}\n[cluster]\nworkers = 3\nlease_seconds = 2.0\n[checkpoint]\nevery_steps = 10\n",
            data.path()
        );
        let slow = [("TEST_STEP_MILLISECONDS", "10")];
        let mut cluster = Cluster::start(program(), &job, 0);
        for _ in 0..3 {
            cluster.add_worker(&slow);
        }
        for (victim, samples) in [(1, 60), (2, 150), (0, 240)] {
            eventually(|| cluster.status()["samples"].as_u64().unwrap() > samples);
            cluster.workers[victim].kill();
            cluster.restart_worker(victim, &slow);
            eventually(|| {
                cluster.status()["ring"]["members"]
                    .as_array()
                    .unwrap()
                    .len()
                    == 3
            });
        }
        let (summary, dir) = cluster.finish();
        assert_eq!(summary["samples"], SAMPLES);
        let events = std::fs::read_to_string(dir.path().join("run/metrics.jsonl")).unwrap();
        let restored = events.contains("\"restored\"");
        assert_eq!(restored, copies == 1, "{copies} copies: {events}");
        for (name, values) in weights(&dir.path().join("run/model.safetensors")) {
            for (sample, visits) in values.to_vec1::<f32>().unwrap().into_iter().enumerate() {
                assert!(
                    is_once(visits),
                    "{name}: sample {sample} was visited {visits} times"
                );
            }
        }
    }
}

#[test]
fn a_job_moves_to_shares_and_back_by_its_checkpoints() {
    const JOB: &str = "seed = 4\nbatch_size = 16\nepochs = 9\nema_decay = 0.9\n[optimizer]\nname = \"adam\"\n[model]\nname = \"mlp\"\nhidden = [256, 128]\n[cluster]\nworkers = 3\n";
    const WHOLE: &[&str] = &["--strategy", "multi-worker-mirrored"];
    const SHARED: &[&str] = &[
        "--strategy",
        "multi-worker-mirrored",
        "--set",
        "strategy.optimizer_copies=1",
    ];
    const TWICE: &[&str] = &[
        "--strategy",
        "multi-worker-mirrored",
        "--set",
        "strategy.optimizer_copies=2",
    ];
    const SERVED: &[&str] = &["--strategy", "parameter-server", "--mode", "sync"];
    let dir = tempfile::tempdir().unwrap();
    let job = dir.path().join("job.toml");
    std::fs::write(&job, JOB).unwrap();
    let train = |name: &str, arguments: &[&str]| {
        train_in(
            dir.path(),
            name,
            &[&[job.to_str().unwrap()], arguments].concat(),
        );
        weights(&dir.path().join(name).join("model.safetensors"))
    };
    let undisturbed = train("whole", &[WHOLE, &["--steps", "30"]].concat());
    for (name, first, second) in [
        ("whole to shared", WHOLE, SHARED),
        ("shared to twice", SHARED, TWICE),
        ("twice to served", TWICE, SERVED),
        ("served to shared", SERVED, SHARED),
    ] {
        let before = format!("{name}: before");
        train(&before, &[first, &["--steps", "17"]].concat());
        let from = dir.path().join(&before);
        let restore = ["--restore", from.to_str().unwrap(), "--steps", "30"];
        let found = train(name, &[second, &restore].concat());
        let difference = difference(&found, &undisturbed);
        assert!(difference < 1e-5, "{name}: {difference}");
    }
}

#[test]
fn other_strategies_share_out_the_state_too() {
    const TABLES: &str = "batch_size = 64\nsteps = 20\n[data]\nkind = \"clicks\"\n[data.options]\nsamples = 4000\nrows = 500\n[model]\nname = \"deepfm\"\nembedding = 4\nhidden = [64, 32]\n[optimizer]\nname = \"adam\"\n[cluster]\nps = 1\nworkers = 3\n";
    const STAGES: &str = "steps = 20\nepochs = 9\n[model]\nname = \"mlp\"\nhidden = [128, 128, 128]\n[optimizer]\nname = \"adam\"\n[cluster]\nworkers = 2\n";
    let dir = tempfile::tempdir().unwrap();
    let trained = |name: &str, arguments: &[&str]| {
        train_in(dir.path(), name, arguments);
        std::fs::read(dir.path().join(name).join("model.safetensors")).unwrap()
    };
    for (name, job, arguments) in [
        ("hybrid", TABLES, &["--mode", "sync"][..]),
        ("model-parallel", STAGES, &["--devices", "cpu,cpu"]),
    ] {
        let file = dir.path().join(format!("{name}.toml"));
        std::fs::write(&file, format!("seed = 3\n{job}")).unwrap();
        let arguments = [&[file.to_str().unwrap(), "--strategy", name], arguments].concat();
        let whole = trained(&format!("{name}-whole"), &arguments);
        let copies = ["--set", "strategy.optimizer_copies=1"];
        let shared = trained(name, &[&arguments[..], &copies].concat());
        assert!(shared == whole, "{name}");
    }
}

/// Returns the factor by which `found` is `expected`, in the least squares.
fn scale(found: &BTreeMap<String, Tensor>, expected: &BTreeMap<String, Tensor>) -> f64 {
    let dot = |a: &BTreeMap<String, Tensor>, b: &BTreeMap<String, Tensor>| -> f64 {
        let pairs = a.values().zip(b.values());
        let sums = pairs.map(|(a, b)| {
            (a * b)
                .unwrap()
                .sum_all()
                .unwrap()
                .to_scalar::<f32>()
                .unwrap()
        });
        sums.map(f64::from).sum()
    };
    dot(found, expected) / dot(expected, expected)
}

/// With 16 bits, the number of samples of a step must not be rounded, nor their sum be too large.
#[test]
fn short_numbers_divide_by_the_right_number_of_samples() {
    let job = |strategy: &str, batch: usize, workers: usize| {
        format!(
            "steps = 1\nepochs = 9\nseed = 3\nbatch_size = {batch}\n[model]\nname = \"softmax\"\n[optimizer]\nname = \"sgd\"\nlearning_rate = 100.0\n[strategy]\nname = {strategy}\n[cluster]\nworkers = {workers}\n"
        )
    };
    let trained = |job: String, workers: usize| {
        let mut cluster = Cluster::start(program(), &job, 0);
        for _ in 0..workers {
            cluster.add_worker(&[]);
        }
        let (_, dir) = cluster.finish();
        weights(&dir.path().join("run/model.safetensors"))
    };
    // 1437 has no form in eight bits: it would count as 1440.
    let alone = trained(job("\"one-device\"", 1437, 1), 1);
    for wire in ["bf16", "f16"] {
        for copies in ["", "\noptimizer_copies = 1"] {
            let strategy = format!("\"multi-worker-mirrored\"\nwire = \"{wire}\"{copies}");
            let together = trained(job(&strategy, 479, 3), 3);
            // The roundings of all elements cancel out; a wrong divisor does not.
            let apart = (scale(&together, &alone) - 1.0).abs();
            assert!(apart < 5e-4, "{strategy}: {apart}");
        }
    }
}
