//! Workers that cannot work, and jobs in which no worker can.

use std::path::Path;
use std::process::Output;

use serde_json::Value;
use tests::{Cluster, eventually};

use crate::program;

/// Returns a job that is slow enough for workers to join and leave while it trains.
fn job(data: &Path) -> String {
    format!(
        r#"
epochs = 12
batch_size = 10
[data]
kind = "csv"
dir = "{}"
label = "colour"
[model]
name = "odd"
[cluster]
ps = 2
lease_seconds = 1.0
stall_seconds = 3.0
[checkpoint]
every_steps = 20
"#,
        data.display()
    )
}

const SAMPLES: u64 = 12 * 320;

/// Returns the environment of workers that are slow until this file is removed.
fn slow(file: &Path) -> [(&str, &str); 1] {
    [("TEST_SLOW_WHILE", file.to_str().unwrap())]
}

/// Writes a data set of 400 samples, of which 80 are held out.
fn data() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let mut text = "x,y,colour\n".to_owned();
    for i in 0..400 {
        let colour = if i % 20 > i / 20 { "red" } else { "blue" };
        text += &format!("{},{},{colour}\n", i % 20, i / 20);
    }
    std::fs::write(dir.path().join("train.csv"), text).unwrap();
    dir
}

/// The failure of a worker, its arguments and environment, and a text that its message contains.
type Case<'a> = (&'a str, &'a [&'a str], &'a [(&'a str, &'a str)], &'a str);

/// Runs a worker to its end.
fn worker(cluster: &Cluster, name: &str, more: &[&str], env: &[(&str, &str)]) -> Output {
    let address = cluster.coordinator.address();
    let mut arguments = vec!["worker", "--coordinator", &address, "--identity", name];
    // Also with a coordinator that stays.
    arguments.extend(["--after-job", "exit"]);
    arguments.extend(more);
    let mut command = program().command(&arguments);
    command.envs(env.iter().copied()).output().unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn task(status: &Value, identity: &str) -> Value {
    let tasks = status["tasks"].as_array().unwrap();
    let found = tasks.iter().find(|task| task["identity"] == identity);
    found.unwrap_or(&Value::Null).clone()
}

fn samples(cluster: &Cluster) -> u64 {
    cluster.status()["samples"].as_u64().unwrap()
}

#[test]
fn a_worker_that_cannot_work_is_rejected_alone_and_joins_once_it_can() {
    let data = data();
    let mut cluster = Cluster::start(program(), &job(data.path()), 2);
    let brake = data.path().join("brake");
    std::fs::write(&brake, "").unwrap();
    for _ in 0..2 {
        cluster.add_worker(&slow(&brake));
    }
    eventually(|| samples(&cluster) > 100);
    let empty = tempfile::tempdir().unwrap();
    let nothing = empty.path().to_str().unwrap();
    let file = data.path().join("train.csv/run");
    // A data set of as many samples, of which one differs.
    let other = tempfile::tempdir().unwrap();
    let text = std::fs::read_to_string(data.path().join("train.csv")).unwrap();
    let changed = text.replacen("0,1,", "0.5,1,", 1);
    assert_ne!(changed, text);
    std::fs::write(other.path().join("train.csv"), changed).unwrap();
    let cases: [Case; 5] = [
        ("data", &["--data-dir", nothing], &[], nothing),
        (
            "refused",
            &["--data-dir", other.path().to_str().unwrap()],
            &[],
            "digest",
        ),
        ("device", &["--device", "cuda:7"], &[], "cuda:7"),
        (
            "run_directory",
            &["--run-dir", file.to_str().unwrap()],
            &[],
            "train.csv",
        ),
        ("model", &[], &[("TEST_NO_MODEL", "1")], "told to be none"),
    ];
    for (failure, more, env, named) in cases {
        let output = worker(&cluster, failure, more, env);
        let said = said(&output);
        assert_eq!(output.status.code(), Some(3), "{failure}: {said}");
        assert!(
            said.contains("this worker cannot work") && said.contains(named),
            "{failure}: {said}"
        );
        let status = cluster.status();
        assert_eq!(status["phase"], "training", "{status}");
        let task = task(&status, failure);
        assert_eq!(task["failure"], failure, "{status}");
        assert!(
            task["trouble"].as_str().unwrap().contains(named),
            "{status}"
        );
        let counted =
            format!("flambeau_coordinator_worker_failures_total{{failure=\"{failure}\"}} 1");
        eventually(|| cluster.coordinator.http("/metrics").contains(&counted));
    }
    let address = cluster.coordinator.address();
    let table = program().run(&["status", "--coordinator", &address]);
    let table = String::from_utf8_lossy(&table.stdout).into_owned();
    assert!(table.contains("cannot work (data): "), "{table}");

    // The same worker has its data now.
    let again = cluster.member("worker", "data", &[], &slow(&brake));
    cluster.workers.push(again);
    eventually(|| task(&cluster.status(), "data")["samples"].as_u64() > Some(0));
    assert_eq!(task(&cluster.status(), "data")["trouble"], "");
    std::fs::remove_file(&brake).unwrap();
    let (summary, dir) = cluster.finish();
    assert_eq!(summary["samples"], SAMPLES);
    let metrics = std::fs::read_to_string(dir.path().join("run/metrics.jsonl")).unwrap();
    assert!(metrics.contains("\"event\":\"cannot_work\""), "{metrics}");
}

#[test]
fn a_job_that_no_worker_can_work_on_fails_and_goes_on_when_it_is_started_again() {
    let data = data();
    let stays = ["--after-job", "wait"];
    let mut cluster = Cluster::start_with(program(), &job(data.path()), 2, &stays);
    let brake = data.path().join("brake");
    std::fs::write(&brake, "").unwrap();
    cluster.add_worker(&slow(&brake));
    eventually(|| {
        let status = cluster.status();
        status["samples"].as_u64() > Some(200) && status["checkpoint"]["number"].as_u64() > Some(0)
    });
    // The last worker that can work leaves, and one that cannot joins.
    cluster.workers[0].terminate();
    assert!(cluster.workers[0].wait().success());
    let empty = tempfile::tempdir().unwrap();
    let nothing = empty.path().to_str().unwrap();
    let output = worker(&cluster, "bad", &["--data-dir", nothing], &[]);
    assert_eq!(output.status.code(), Some(3), "{}", said(&output));
    let before = samples(&cluster);
    // The coordinator ends although it is told to stay after the job: its next start resumes the job.
    assert!(!cluster.coordinator.wait().success());
    let log = cluster.coordinator.log();
    assert!(
        log.contains("no worker could work") && log.contains(nothing),
        "{log}"
    );
    // The servers stay, and wait for a job.
    for server in &mut cluster.ps {
        eventually(|| server.log().contains("waiting for the next job"));
        server.terminate();
        assert!(server.wait().success(), "{}", server.log());
    }

    cluster.restart_coordinator();
    for server in 0..2 {
        cluster.restart_ps(server);
    }
    cluster.restart_worker(0, &[]);
    let status = cluster.status();
    assert!(status["samples"].as_u64() >= Some(before), "{status}");
    let (summary, dir) = cluster.finish();
    assert_eq!(summary["samples"], SAMPLES);
    assert!(summary["error"].is_null(), "{summary}");
    let metrics = std::fs::read_to_string(dir.path().join("run/metrics.jsonl")).unwrap();
    assert!(metrics.contains("\"event\":\"taken_up\""), "{metrics}");
}

#[test]
fn a_job_that_is_at_fault_itself_fails_and_is_taken_up_when_told_to() {
    let data = data();
    let mut cluster = Cluster::start(program(), &job(data.path()), 2);
    cluster.add_worker(&[("TEST_NAN_AT", "100")]);
    assert!(!cluster.coordinator.wait().success());
    let log = cluster.coordinator.log();
    assert!(log.contains("line.bias"), "{log}");
    // A restarted coordinator does not resume the job by itself, because every worker would fail likewise.
    cluster.restart_coordinator();
    assert_eq!(cluster.status()["phase"], "failed");
    cluster.coordinator.kill();
    for server in &mut cluster.ps {
        server.kill();
    }
    cluster.restart_coordinator_with(&["--resume-failed"]);
    for server in 0..2 {
        cluster.restart_ps(server);
    }
    cluster.restart_worker(0, &[]);
    let (summary, _) = cluster.finish();
    assert_eq!(summary["samples"], SAMPLES);
    assert!(summary["error"].is_null(), "{summary}");
}
