//! Steps that do not wait for the slowest workers.

use std::collections::BTreeSet;

use tests::{Cluster, Daemon, eventually};

use crate::program;
use crate::ring_operations::{
    check_metrics_are_documented, is_named_while_it_is_stopped, metric, rank,
};
use crate::rings::{MIRRORED, a_class_for_each, digests, is_once};
use crate::weights::weights;

const BACKUP: &str = "backup_workers = 1\n[cluster]\nworkers = 3\n";

/// Starts three workers in the order of their ranks, with what each has in its environment.
fn three_workers(job: &str, environments: [&[(&str, &str)]; 3]) -> Cluster {
    let mut cluster = Cluster::start(program(), job, 0);
    for (index, environment) in environments.into_iter().enumerate() {
        cluster.add_worker(environment);
        eventually(|| cluster.workers[index].log().contains("registered"));
    }
    for (expected, worker) in (0..).zip(&cluster.workers) {
        eventually(|| worker.log().contains("in a ring of workers"));
        assert_eq!(rank(worker), expected);
    }
    cluster
}

fn steps(cluster: &Cluster) -> u64 {
    cluster.status()["steps"].as_u64().unwrap()
}

/// Returns the number of steps that a worker has made with a gradient of its own.
fn in_time(worker: &Daemon) -> f64 {
    let of = |name| metric(worker, &format!("flambeau_worker_{name}_steps_total"));
    metric(worker, "flambeau_worker_steps_total") - of("late")
}

/// The weights count how often each sample was visited: a step that counts the gradients of n workers adds 1/n for each of their samples.
#[test]
fn a_step_counts_the_gradients_that_are_ready_first() {
    const SAMPLES: usize = 600;
    let data = a_class_for_each(SAMPLES);
    let job = format!(
        "epochs = 1\nbatch_size = 1\n[data]\nkind = \"csv\"\ndir = {:?}\ntarget = \"class\"\n[model]\nname = \"visits\"\n[optimizer]\nname = \"sgd\"\nlearning_rate = 1.0\n{MIRRORED}{BACKUP}",
        data.path()
    );
    // The worker that closes steps is the slow one, and then another.
    for slow in [0, 2] {
        let mut milliseconds = ["10"; 3];
        milliseconds[slow] = "200";
        let environments = milliseconds.map(|time| [("TEST_STEP_MILLISECONDS", time)]);
        let [a, b, c] = &environments;
        let (summary, dir) = three_workers(&job, [a, b, c]).finish();
        let (samples, late) = (&summary["samples"], summary["late_steps"].as_u64().unwrap());
        assert_eq!((samples, &summary["steps"]), (&600.into(), &200.into()));
        assert!((100..=200).contains(&late), "{summary}");
        for (name, values) in &weights(&dir.path().join("run/model.safetensors")) {
            let visits = values.to_vec1::<f32>().unwrap();
            let (counted, left_out): (Vec<f32>, Vec<f32>) =
                visits.into_iter().partition(|visits| *visits != 0.0);
            let wrong = counted.iter().find(|visits| !is_once(**visits));
            assert_eq!(wrong, None, "{name}");
            // All steps are whole, so each late step leaves out one sample.
            assert_eq!(left_out.len() as u64, late, "{name}: {summary}");
        }
    }
}

#[test]
fn late_workers_hold_the_same_bits_and_count_again_once_they_are_fast() {
    let job = format!(
        "epochs = 60\n[model]\nname = \"odd\"\n[optimizer]\nname = \"adam\"\n{MIRRORED}{BACKUP}"
    );
    let folder = tempfile::tempdir().unwrap();
    let slow_while = folder.path().join("slow");
    std::fs::write(&slow_while, "").unwrap();
    let digests_of = ("TEST_DIGESTS", folder.path().to_str().unwrap());
    let fast = [digests_of, ("TEST_STEP_MILLISECONDS", "10")];
    let slow_while = slow_while.to_str().unwrap();
    let slow = [fast[0], fast[1], ("TEST_SLOW_WHILE", slow_while)];
    let cluster = three_workers(&job, [&slow, &fast, &fast]);
    eventually(|| steps(&cluster) > 100);
    let slow = &cluster.workers[0];
    let late = metric(slow, "flambeau_worker_late_steps_total");
    assert!(late > 2.0 * in_time(slow), "late in {late} steps");
    std::fs::remove_file(slow_while).unwrap();
    let before = in_time(slow);
    eventually(|| in_time(slow) > before + 50.0);
    check_metrics_are_documented(slow);
    let processes: Vec<u32> = cluster.workers.iter().map(Daemon::process).collect();
    let (summary, _) = cluster.finish();
    assert_eq!(summary["steps"], 900, "{summary}");
    let all = processes
        .iter()
        .map(|process| digests(folder.path(), *process));
    let all: Vec<BTreeSet<String>> = all.map(|digests| digests.into_iter().collect()).collect();
    // A worker notes no digest in steps that it misses, so each of its digests must be one of another worker.
    let [first, second, third] = &all[..] else {
        panic!("{all:?}");
    };
    for (own, a, b) in [
        (first, second, third),
        (second, first, third),
        (third, first, second),
    ] {
        let unknown = own
            .iter()
            .filter(|digest| !a.contains(*digest) && !b.contains(*digest));
        assert!(own.len() > 50 && unknown.count() == 0, "the weights differ");
    }
}

#[test]
fn the_status_names_a_stopped_worker_that_steps_wait_for() {
    let job = format!("epochs = 60\n[model]\nname = \"odd\"\n{MIRRORED}{BACKUP}");
    let slow: &[(&str, &str)] = &[("TEST_STEP_MILLISECONDS", "20")];
    let cluster = three_workers(&job, [slow; 3]);
    eventually(|| steps(&cluster) > 5);
    for worker in &cluster.workers {
        is_named_while_it_is_stopped(&cluster, worker);
    }
}

#[test]
#[ignore = "a measurement: how long a step takes, with a slow worker and a backup worker"]
fn the_pace_with_a_backup_worker() {
    for milliseconds in ["10", "40", "200"] {
        for backup in ["", "backup_workers = 1\n"] {
            let job = format!(
                "epochs = 60\nsteps = 200\n[model]\nname = \"odd\"\n{MIRRORED}{backup}[cluster]\nworkers = 3\n"
            );
            let fast: &[(&str, &str)] = &[("TEST_STEP_MILLISECONDS", "10")];
            let slow: &[(&str, &str)] = &[("TEST_STEP_MILLISECONDS", milliseconds)];
            let (summary, _) = three_workers(&job, [fast, fast, slow]).finish();
            let each = summary["seconds"].as_f64().unwrap() / 200.0 * 1000.0;
            println!(
                "passes of 10, 10 and {milliseconds} ms, {backup:?}: {each:.1} ms each step, late {}",
                summary["late_steps"]
            );
        }
    }
}
