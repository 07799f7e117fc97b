//! Processes that die, and the part of their work that counts.

use std::path::Path;

use tests::{Cluster, eventually};

use crate::program;

#[test]
fn a_worker_killed_while_training_loses_no_data() {
    let job = "epochs = 3\n[model]\nname = \"odd\"\n[cluster]\nps = 2\nworkers = 2\nlease_seconds = 1.0\n";
    let mut cluster = Cluster::start(program(), job, 2);
    for _ in 0..3 {
        cluster.add_worker(&[("TEST_STEP_MILLISECONDS", "20")]);
    }
    eventually(|| cluster.status()["samples"].as_u64().unwrap() > 500);
    cluster.workers[2].kill();
    let mut dead = cluster.workers.pop().unwrap();
    assert!(!dead.wait().success());
    let (summary, dir) = cluster.finish();
    // The other workers repeated the samples that it had not reported.
    assert_eq!(summary["samples"], 3 * 1437);
    let metrics = std::fs::read_to_string(dir.path().join("run/metrics.jsonl")).unwrap();
    assert!(
        metrics.contains("\"event\":\"left\"") && metrics.contains("worker-2"),
        "{metrics}"
    );
}

/// Returns the model of a run of [`recovers`].
fn model(dir: &tempfile::TempDir) -> Vec<u8> {
    std::fs::read(dir.path().join("run/model.safetensors")).unwrap()
}

/// Returns a job that is slow enough to be killed during its run, and writes checkpoints often enough to go back to
/// one.
fn recovers(mode: &str) -> String {
    format!(
        r#"
epochs = 4
[model]
name = "odd"
[optimizer]
name = "momentum"
[strategy]
mode = "{mode}"
[cluster]
ps = 2
workers = 2
lease_seconds = 2.0
[checkpoint]
every_steps = 20
"#
    )
}

fn start(job: &str) -> Cluster {
    let mut cluster = Cluster::start(program(), job, 2);
    for _ in 0..2 {
        cluster.add_worker(&[("TEST_STEP_MILLISECONDS", "10")]);
    }
    cluster
}

fn samples(cluster: &Cluster) -> u64 {
    cluster.status()["samples"].as_u64().unwrap()
}

#[test]
fn in_sync_mode_a_run_with_dead_servers_equals_one_without() {
    let job = format!("ema_decay = 0.9\n{}", recovers("sync"));
    let (expected, dir) = start(&job).finish();
    let expected_model = model(&dir);

    let mut cluster = start(&job);
    for (server, after) in [(1, 1500), (0, 3000)] {
        eventually(|| samples(&cluster) > after);
        cluster.ps[server].kill();
        cluster.restart_ps(server);
    }
    // All processes are killed at once.
    eventually(|| samples(&cluster) > 4000);
    for server in [0, 1] {
        cluster.ps[server].kill();
    }
    for server in [0, 1] {
        cluster.restart_ps(server);
    }
    let (summary, dir) = cluster.finish();
    assert_eq!(summary["samples"], expected["samples"]);
    assert_eq!(summary["test_accuracy"], expected["test_accuracy"]);
    assert_eq!(model(&dir), expected_model, "bit for bit");
    let metrics = std::fs::read_to_string(dir.path().join("run/metrics.jsonl")).unwrap();
    assert!(metrics.contains("\"event\":\"restored\""), "{metrics}");
}

#[test]
fn a_server_that_dies_goes_back_alone_and_says_what_was_lost() {
    let job = recovers("async");
    let mut cluster = start(&job);
    eventually(|| samples(&cluster) > 1500);
    let before = cluster.status();
    cluster.ps[1].kill();
    cluster.restart_ps(1);
    eventually(|| cluster.status()["lost_updates"].as_u64() > Some(0));
    let after = cluster.status();
    assert!(after["min_clock"].as_u64() >= before["min_clock"].as_u64());
    assert!(after["samples"].as_u64() >= before["samples"].as_u64());
    let (summary, dir) = cluster.finish();
    // No sample is lost: the data is counted by the coordinator.
    assert_eq!(summary["samples"], 4 * 1437);
    assert!(summary["lost_updates"].as_u64() > Some(0), "{summary}");
    let metrics = std::fs::read_to_string(dir.path().join("run/metrics.jsonl")).unwrap();
    assert!(metrics.contains("\"event\":\"lost\""), "{metrics}");
}

/// Returns the files in a folder with names that begin with a prefix.
fn files(folder: &Path, prefix: &str) -> Vec<std::path::PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    let begins = |path: &std::path::PathBuf| {
        let name = path.file_name().unwrap().to_string_lossy();
        name.starts_with(prefix) && !name.contains("partial")
    };
    paths.filter(begins).collect()
}

/// A rolling upgrade takes the next server once this one is ready.
#[test]
fn a_server_that_comes_back_is_ready_once_it_has_its_shard() {
    let mut cluster = start(&recovers("async"));
    eventually(|| samples(&cluster) > 1000);
    assert!(cluster.ps[1].http("/readyz").contains("200 OK"));
    cluster.ps[1].kill();
    // If its parts are written, a checkpoint can still be completed until the coordinator gives the server up.
    eventually(|| cluster.coordinator.log().contains("a member is gone"));
    // The files cannot be read at present, because they are links to themselves.
    let checkpoints = std::fs::read_dir(cluster.run_dir().join("checkpoints")).unwrap();
    let manifests: Vec<_> = checkpoints
        .map(|entry| entry.unwrap().path().join("manifest.json"))
        .filter(|manifest| manifest.exists())
        .collect();
    let aside = |manifest: &Path| manifest.with_extension("aside");
    for manifest in &manifests {
        std::fs::rename(manifest, aside(manifest)).unwrap();
        std::os::unix::fs::symlink("manifest.json", manifest).unwrap();
    }
    cluster.restart_ps(1);
    let server = &cluster.ps[1];
    eventually(|| server.log().contains("cannot load a shard"));
    assert!(server.http("/healthz").contains("200 OK"));
    assert!(server.http("/readyz").contains("503"));
    for manifest in &manifests {
        std::fs::rename(aside(manifest), manifest).unwrap();
    }
    eventually(|| server.http("/readyz").contains("200 OK"));
    assert!(server.log().contains("loaded a shard"), "{}", server.log());
    let (summary, _) = cluster.finish();
    assert_eq!(summary["samples"], 4 * 1437);
}

#[test]
fn a_coordinator_that_dies_comes_back_and_nobody_else_starts_again() {
    for mode in ["sync", "async"] {
        let job = recovers(mode);
        let (expected, dir) = start(&job).finish();
        let expected_model = model(&dir);

        let mut cluster = start(&job);
        for after in [1000, 2500, 4000] {
            eventually(|| samples(&cluster) > after);
            cluster.coordinator.kill();
            // Servers recognise the store by these files; an operator has deleted them.
            let checkpoints = cluster.run_dir().join("checkpoints");
            let owners = || files(&checkpoints, "owner-");
            for owner in owners() {
                std::fs::remove_file(owner).unwrap();
            }
            cluster.restart_coordinator();
            eventually(|| !owners().is_empty());
        }
        let (summary, dir) = cluster.finish();
        assert_eq!(summary["lost_updates"], 0);
        if mode == "sync" {
            assert_eq!(summary["samples"], expected["samples"]);
            assert_eq!(model(&dir), expected_model, "bit for bit");
        }
        let metrics = std::fs::read_to_string(dir.path().join("run/metrics.jsonl")).unwrap();
        let left = |line: &&str| line.contains("\"left\"") && !line.contains("it has left");
        assert_eq!(metrics.lines().find(left), None);
    }
}

#[test]
fn a_killed_worker_comes_back_under_its_name() {
    let mut cluster = start(&recovers("bounded"));
    eventually(|| samples(&cluster) > 1000);
    cluster.workers[1].kill();
    cluster.restart_worker(1, &[("TEST_STEP_MILLISECONDS", "10")]);
    let back = |status: &serde_json::Value| {
        let tasks = status["tasks"].as_array().unwrap();
        let mut same = tasks.iter().filter(|task| task["identity"] == "worker-1");
        same.any(|task| task["generation"] == 2 && task["clock"].as_u64() > Some(0))
    };
    eventually(|| back(&cluster.status()));
    let (summary, _) = cluster.finish();
    assert_eq!(summary["samples"], 4 * 1437);
}

#[test]
fn a_job_goes_on_from_a_checkpoint_on_other_shards() {
    let job = recovers("sync");
    let (whole, dir) = start(&job).finish();
    let expected = model(&dir);

    // Two shards make half of the steps and three the rest: the sums are the same.
    let half = format!("steps = 50\n{job}");
    let (_, first) = start(&half).finish();
    let run = first.path().join("run");
    let three = job.replace("ps = 2", "ps = 3");
    let restore = ["--restore", run.to_str().unwrap()];
    let mut cluster = Cluster::start_coordinator_with(program(), &three, 3, &restore);
    for _ in 0..2 {
        cluster.add_worker(&[]);
    }
    let (summary, dir) = cluster.finish();
    assert_eq!(summary["samples"], whole["samples"]);
    assert_eq!(model(&dir), expected, "bit for bit");
}

#[test]
fn a_checkpoint_of_another_job_or_with_damage_is_refused_by_name() {
    let job = recovers("sync");
    let (_, dir) = start(&format!("steps = 50\n{job}")).finish();
    let run = dir.path().join("run");
    let refused = |job: &str, run: &std::path::Path| {
        let other = tempfile::TempDir::new().unwrap();
        let file = other.path().join("job.toml");
        std::fs::write(&file, job).unwrap();
        let output = program().run(&[
            "train",
            file.to_str().unwrap(),
            "--run-dir",
            other.path().join("run").to_str().unwrap(),
            "--restore",
            run.to_str().unwrap(),
        ]);
        assert!(!output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let said = refused(&job.replace("momentum", "adam"), &run);
    assert!(
        said.contains("optimizer.name is momentum there, and adam here"),
        "{said}"
    );

    // A byte of the newest checkpoint is changed: it is named, and the one before is offered.
    let mut checkpoints: Vec<_> = std::fs::read_dir(run.join("checkpoints"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.is_dir())
        .collect();
    checkpoints.sort();
    let newest = checkpoints.last().unwrap();
    let part = files(newest, "shard-0-part-0000").remove(0);
    let mut bytes = std::fs::read(&part).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&part, bytes).unwrap();
    let said = refused(&job, newest);
    let name = part.file_name().unwrap().to_str().unwrap();
    assert!(said.contains(name), "{said}");
    let before = checkpoints[checkpoints.len() - 2].file_name().unwrap();
    assert!(said.contains(before.to_str().unwrap()), "{said}");
}

#[test]
fn gradients_that_are_not_finite_are_left_out_where_the_job_says_so() {
    for mode in ["sync", "async"] {
        let job = format!("non_finite = \"skip\"\n{}", recovers(mode));
        let mut cluster = Cluster::start(program(), &job, 2);
        cluster.add_worker(&[]);
        cluster.add_worker(&[("TEST_NAN_AT", "20")]);
        let (summary, _) = cluster.finish();
        assert!(summary["skipped_steps"].as_u64() > Some(0), "{summary}");
        assert_eq!(summary["samples"], 4 * 1437);
        assert!(summary["test_accuracy"].as_f64() > Some(0.8), "{summary}");
    }
}

#[test]
fn without_checkpoints_a_server_that_dies_ends_the_job_with_its_name() {
    let job = "epochs = 10000\n[checkpoint]\nenabled = false\n[model]\nname = \"odd\"\n[cluster]\nps = 2\nworkers = 1\nlease_seconds = 1.0\n";
    let mut cluster = Cluster::start(program(), job, 2);
    cluster.add_worker(&[]);
    eventually(|| cluster.status()["samples"].as_u64().unwrap() > 500);
    cluster.ps[1].kill();
    for daemon in [
        &mut cluster.coordinator,
        &mut cluster.ps[0],
        &mut cluster.workers[0],
    ] {
        assert!(!daemon.wait().success(), "{}", daemon.log());
        assert!(
            daemon.log().contains("the server of shard 1, is gone"),
            "{}",
            daemon.log()
        );
    }
}

#[test]
fn sigterm_ends_each_daemon_well() {
    let job = "epochs = 10000\n[model]\nname = \"odd\"\n[cluster]\nps = 1\nworkers = 1\n";
    let mut cluster = Cluster::start(program(), job, 1);
    cluster.add_worker(&[]);
    cluster.add_worker(&[]);
    eventually(|| cluster.status()["samples"].as_u64().unwrap() > 500);
    for daemon in [&mut cluster.workers[0], &mut cluster.coordinator] {
        daemon.terminate();
        assert!(daemon.wait().success(), "{}", daemon.log());
    }
}
