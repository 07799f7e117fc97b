//! A cluster of processes that stay after the job, and take part in the next one.

use std::time::Duration;

use tests::{Cluster, eventually};

use crate::program;

const STAY: [&str; 2] = ["--after-job", "wait"];

/// The arguments of members that wait for a coordinator of a job for a short time only.
const IMPATIENT: [&str; 4] = ["--after-job", "wait", "--patience-seconds", "6"];

fn job(name: &str, epochs: u32, model: &str) -> String {
    format!(
        "name = \"{name}\"\nepochs = {epochs}\n[model]\nname = \"{model}\"\n[cluster]\nps = 1\nworkers = 2\n"
    )
}

fn has_done(cluster: &Cluster, job: &str, samples: u64) -> bool {
    let status = cluster.status();
    status["job"] == job && status["phase"] == "done" && status["samples"] == samples
}

#[test]
fn servers_and_workers_that_stay_take_part_in_the_next_job() {
    let first = job("first", 2, "odd");
    let mut cluster = Cluster::start_coordinator_with(program(), &first, 0, &STAY);
    let server = cluster.member("ps-server", "ps-0", &IMPATIENT, &[]);
    cluster.ps.push(server);
    for name in ["a", "b"] {
        let worker = cluster.member("worker", name, &IMPATIENT, &[]);
        cluster.workers.push(worker);
    }
    eventually(|| has_done(&cluster, "first", 2 * 1437));
    // A coordinator that restarts with the ended job changes nothing.
    cluster.coordinator.terminate();
    assert!(cluster.coordinator.wait().success());
    cluster.restart_coordinator_with(&STAY);
    eventually(|| has_done(&cluster, "first", 2 * 1437));

    // Only the coordinator is given the next job, as in docs/operations.md.
    cluster.coordinator.terminate();
    assert!(cluster.coordinator.wait().success());
    // The other processes wait longer for it than for the coordinator of a running job.
    std::thread::sleep(Duration::from_secs(10));
    let dir = cluster.run_dir();
    std::fs::rename(&dir, dir.with_file_name("first")).unwrap();
    std::fs::write(dir.with_file_name("given.toml"), job("second", 3, "mlp")).unwrap();
    cluster.restart_coordinator_with(&STAY);
    eventually(|| has_done(&cluster, "second", 3 * 1437));
    assert!(dir.join("model.safetensors").exists());
    let status = cluster.status();
    let tasks = status["tasks"].as_array().unwrap();
    assert_eq!(tasks.len(), 3, "{status}");

    let members = cluster.ps.iter_mut().chain(&mut cluster.workers);
    for daemon in members.chain([&mut cluster.coordinator]) {
        daemon.terminate();
        assert!(daemon.wait().success(), "{}", daemon.log());
    }
}
