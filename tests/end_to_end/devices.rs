//! Workers with several devices.

use tests::{Cluster, Daemon, eventually};

use crate::program;
use crate::weights::{difference, largest, weights};

/// Trains with so many workers, each with these devices.
fn train(job: &str, ps: u32, workers: usize, devices: &str) -> tempfile::TempDir {
    let mut cluster = Cluster::start(program(), job, ps as usize);
    for _ in 0..workers {
        cluster.add_worker(&[("FLAMBEAU_DEVICE", devices)]);
    }
    let (summary, dir) = cluster.finish();
    assert_eq!(summary["steps"], 50, "{summary}");
    dir
}

#[test]
fn several_devices_equal_one_process() {
    const SGD: &str = "[optimizer]\nname = \"sgd\"\nlearning_rate = 0.2\n";
    const MOMENTUM: &str = "clip_norm = 0.5\n[optimizer]\nname = \"momentum\"\n";
    const ADAM: &str = "accumulate = 2\n[optimizer]\nname = \"adam\"\n";
    const CNN: &str = "[model]\nname = \"cnn\"\nchannels = [4]\nhidden = [16]\n";
    let sync = "parameter-server\"\nmode = \"sync";
    for (strategy, ps, workers, devices, settings) in [
        ("mirrored", 0, 1, "cpu,cpu,cpu,cpu", SGD),
        ("mirrored", 0, 1, "cpu,cpu,cpu", MOMENTUM),
        ("mirrored", 0, 1, "cpu,cpu", &format!("{ADAM}{CNN}")),
        ("central-storage", 0, 1, "cpu,cpu,cpu", ADAM),
        (
            "central-storage",
            0,
            1,
            "cpu,cpu",
            &format!("{MOMENTUM}{CNN}"),
        ),
        ("multi-worker-mirrored", 0, 2, "cpu,cpu", SGD),
        (sync, 1, 2, "cpu,cpu", ADAM),
    ] {
        let job = |batch: usize, strategy: &str| {
            format!("epochs = 30\nsteps = 50\nseed = 7\nbatch_size = {batch}\n{settings}{strategy}")
        };
        let cluster =
            format!("[strategy]\nname = \"{strategy}\"\n[cluster]\nworkers = {workers}\n");
        let cluster = match ps {
            0 => cluster,
            ps => format!("{cluster}ps = {ps}\n"),
        };
        let dir = train(&job(48 / workers, &cluster), ps, workers, devices);
        let together = weights(&dir.path().join("run/model.safetensors"));

        // A single device equals a process without a cluster, as a test of rings shows.
        let dir = train(&job(48, "[strategy]\nname = \"one-device\"\n"), 0, 1, "cpu");
        let alone = weights(&dir.path().join("run/model.safetensors"));
        let difference = difference(&together, &alone);
        assert!(difference < 1e-5, "{strategy} {settings}: {difference}");
        let moved = alone.values().map(largest).fold(0.0, f32::max);
        assert!(moved > 0.1, "nothing was trained");
    }
}

/// Starts `flambeau train` with settings that are refused before anything is made. Returns what it has said.
pub(crate) fn refused(settings: &[&str]) -> String {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    let common = ["train", "--run-dir", run.to_str().unwrap()];
    let output = program().run(&[&common, settings].concat());
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{said}");
    assert!(!run.exists(), "it is refused before anything is made");
    said
}

#[test]
fn what_takes_one_device_is_refused_with_two() {
    let one = "`strategy.name = \"one-device\"` takes one; use \"mirrored\"";
    let tables = "a model with tables (here";
    for (settings, expected) in [
        (&["--strategy", "one-device"][..], one),
        (
            &["--set", "model.name=deepfm", "--set", "data.kind=clicks"],
            tables,
        ),
    ] {
        let said = refused(&[&["--devices", "cpu,cpu"], settings].concat());
        assert!(said.contains(expected), "{said}");
    }
}

/// Returns the number of threads of a worker that compute.
fn computing_threads(worker: &Daemon) -> usize {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", worker.process())).unwrap();
    let names =
        tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
    names.filter(|name| name.starts_with("replica-")).count()
}

#[test]
fn the_replicas_of_a_worker_share_its_threads() {
    let job = "epochs = 1000\n[strategy]\nname = \"mirrored\"\n";
    for (devices, threads, computing) in [("cpu", "3", 3), ("cpu,cpu", "4", 4), ("cpu,cpu", "1", 2)]
    {
        let mut cluster = Cluster::start(program(), job, 0);
        cluster.add_worker(&[("FLAMBEAU_DEVICE", devices), ("RAYON_NUM_THREADS", threads)]);
        eventually(|| cluster.status()["steps"].as_u64().unwrap() > 0);
        assert_eq!(
            computing_threads(&cluster.workers[0]),
            computing,
            "{devices}"
        );
        cluster.coordinator.terminate();
    }
}

#[test]
fn a_worker_sets_the_number_of_threads_if_nothing_sets_it() {
    let mut cluster = Cluster::start(program(), "epochs = 1000\n", 1);
    for unset in ["", "many"] {
        cluster.add_worker(&[("RAYON_NUM_THREADS", unset)]);
    }
    eventually(|| cluster.status()["steps"].as_u64().unwrap() > 0);
    for worker in &cluster.workers {
        let environment = std::fs::read(format!("/proc/{}/environ", worker.process())).unwrap();
        let environment = String::from_utf8(environment).unwrap();
        let mut variables = environment.split('\0');
        let threads = variables.find_map(|variable| variable.strip_prefix("RAYON_NUM_THREADS="));
        let threads: usize = threads.unwrap().parse().unwrap();
        assert!(threads > 0 && threads == computing_threads(worker));
    }
    cluster.coordinator.terminate();
}
