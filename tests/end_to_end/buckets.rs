//! Gradients that leave for the other workers of a ring in buckets, while the backward pass runs.

use std::collections::BTreeSet;
use std::path::Path;

use candle_core::Device;
use model::registry::Registry;
use shared_proto::job::Job;
use tests::{Cluster, Daemon, eventually};
use worker::alone::local;

use crate::program;
use crate::ring_operations::metric;
use crate::rings::{MIRRORED, digests};
use crate::weights::{difference, largest, weights};

/// Three workers with a model of 50,826 weights, in buckets of 6,553 or of a single variable.
const BUCKETS: &str = "bucket_mebibytes = 0.025\n[cluster]\nworkers = 3\n";
const MLP: &str = "[model]\nname = \"mlp\"\nhidden = [256, 128]\n";

/// Returns the bytes of a job's weights, and the seconds of all-reduces that were hidden behind computing.
fn trained(job: &str) -> (tempfile::TempDir, Vec<u8>, f64) {
    let mut cluster = Cluster::start_with(program(), job, 0, &["--after-job", "wait"]);
    for _ in 0..3 {
        cluster.add_worker(&[("FLAMBEAU_AFTER_JOB", "wait")]);
    }
    // The summary comes after the end.
    let summary = cluster.run_dir().join("summary.json");
    eventually(|| cluster.status()["phase"] == "done" && summary.exists());
    let hidden = cluster.workers.iter();
    let hidden =
        hidden.map(|worker| metric(worker, "flambeau_worker_hidden_all_reduce_seconds_sum"));
    let hidden = hidden.sum();
    let everybody = std::iter::once(&cluster.coordinator).chain(&cluster.workers);
    everybody.for_each(Daemon::terminate);
    let (_, dir) = cluster.finish();
    let model = std::fs::read(dir.path().join("run/model.safetensors")).unwrap();
    (dir, model, hidden)
}

/// Compares the weights of a run with those of one process with a batch of 48.
fn check_equality(dir: &Path, of_job: &str) {
    let together = weights(&dir.join("run/model.safetensors"));
    let job = Job::from_toml(&format!("batch_size = 48\n{of_job}")).unwrap();
    let alone = dir.join("alone.safetensors");
    local::train(&job, &Registry::builtin(), &Device::Cpu, Some(&alone)).unwrap();
    let difference = difference(&together, &weights(&alone));
    assert!(difference < 1e-5, "{of_job}: {difference}");
}

#[test]
fn three_workers_with_buckets_equal_one_process() {
    for settings in [
        "[optimizer]\nname = \"sgd\"\nlearning_rate = 0.2\n",
        "[optimizer]\nname = \"adam\"\n",
    ] {
        let of_job = format!("epochs = 9\nsteps = 50\nseed = 7\n{MLP}{settings}");
        let job = format!("batch_size = 16\n{of_job}{MIRRORED}{BUCKETS}");
        let (dir, model, hidden) = trained(&job);
        assert!(hidden > 0.0, "no bucket has left before the end of a pass");
        check_equality(dir.path(), &of_job);
        assert!(trained(&job).1 == model, "a repeated run has other bits");
    }
}

#[test]
fn a_ring_with_a_worker_of_several_devices_adds_up_whole_gradients() {
    let of_job = format!("epochs = 9\nsteps = 30\nseed = 7\n{MLP}");
    let job = format!("batch_size = 16\n{of_job}{MIRRORED}{BUCKETS}");
    let mut cluster = Cluster::start(program(), &job, 0);
    for devices in ["cpu", "cpu,cpu", "cpu"] {
        cluster.add_worker(&[("FLAMBEAU_DEVICE", devices)]);
    }
    let (summary, dir) = cluster.finish();
    assert_eq!(summary["steps"], 30);
    check_equality(dir.path(), &of_job);
}

#[test]
fn buckets_of_rounded_numbers_are_near_those_of_whole_ones() {
    let job =
        |wire: &str| format!("epochs = 2\nseed = 7\n{MLP}{MIRRORED}wire = \"{wire}\"\n{BUCKETS}");
    let (exact, ..) = trained(&job("f32"));
    let exact = weights(&exact.path().join("run/model.safetensors"));
    for wire in ["bf16", "f16"] {
        let (rounded, ..) = trained(&job(wire));
        let rounded = weights(&rounded.path().join("run/model.safetensors"));
        let difference = difference(&rounded, &exact);
        assert!((1e-6..0.05).contains(&difference), "{wire}: {difference}");
    }
}

#[test]
fn a_gradient_that_is_not_finite_counts_for_nothing_though_it_has_left() {
    skips("f32");
}

#[test]
fn a_gradient_that_is_not_finite_counts_for_nothing_among_rounded_ones() {
    skips("bf16");
}

/// Trains with a worker that has a NaN from the 20th step on, and with numbers of this type between workers.
fn skips(wire: &str) {
    let job = format!(
        "steps = 60\nepochs = 9\nseed = 7\nnon_finite = \"skip\"\n[model]\nname = \"deep\"\n{MIRRORED}wire = \"{wire}\"\nbucket_mebibytes = 0.001\n[cluster]\nworkers = 3\n"
    );
    let folder = tempfile::tempdir().unwrap();
    let digests_in = ("TEST_DIGESTS", folder.path().to_str().unwrap());
    let mut cluster = Cluster::start(program(), &job, 0);
    cluster.add_worker(&[digests_in]);
    cluster.add_worker(&[digests_in]);
    cluster.add_worker(&[digests_in, ("TEST_NAN_AT", "20")]);
    let processes = cluster.workers.iter();
    let processes: Vec<u32> = processes.map(|worker| worker.process()).collect();
    let (summary, dir) = cluster.finish();
    assert_eq!(summary["skipped_steps"], 40, "{summary}");
    let model = weights(&dir.path().join("run/model.safetensors"));
    assert!(model.values().all(|values| largest(values).is_finite()));
    assert!(summary["test_accuracy"].as_f64() > Some(0.5), "{summary}");
    let of_each: Vec<BTreeSet<String>> = processes
        .iter()
        .map(|process| digests(folder.path(), *process).into_iter().collect())
        .collect();
    for of_one in &of_each {
        // The last step of an epoch may have no samples for some workers.
        let both = of_one.intersection(&of_each[0]).count();
        assert!(both >= 56, "the weights differ between workers");
    }
}
