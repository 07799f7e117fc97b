//! Disks that are full, or that servers and the coordinator do not share.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use serde_json::Value;
use tests::{Cluster, Daemon, Program, eventually, say};

use super::{end, ended, job as job_of, submit, submit_to};
use crate::program;
use crate::stores::SmallDisk;

/// A server sees another disk than the coordinator. It reports this and leaves, and the job fails with the reason. The next job
/// needs no checkpoints, and is done.
#[test]
fn a_job_whose_server_cannot_see_its_checkpoints_fails_with_the_reason() {
    let sizes = "[cluster]\nps = 1\nworkers = 1\n";
    let mut cluster = Cluster::start_coordinator_with(program(), sizes, 0, &["--no-job"]);
    let hidden = cluster.run_dir().join("runs");
    std::fs::create_dir_all(&hidden).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let Some(apart) = on_another_disk(dir.path(), &hidden) else {
        return;
    };
    let address = cluster.coordinator.address();
    let member = ["ps-server", "--identity", "ps-0", "--coordinator", &address];
    let log = dir.path().join("ps-0.log");
    let server = Daemon::start(&apart, log, &member, &[]);
    cluster.ps.push(server);
    let worker = cluster.member("worker", "a", &[], &[]);
    cluster.workers.push(worker);

    let job = "epochs = 2\n[cluster]\nps = 1\nworkers = 1\nstall_seconds = 12.0\n";
    let id = submit(&cluster, job);
    let cause = "the checkpoints of the coordinator cannot be seen in";
    let waits = |job: &Value| job["waiting_for"].as_str().unwrap().contains(cause);
    eventually(|| waits(&job_of(&cluster, id)));
    let failed = ended(&cluster, id);
    assert_eq!(failed["state"], "failed", "{failed}");
    let error = failed["error"].as_str().unwrap();
    assert!(error.contains(cause) && error.contains("ps-0"), "{error}");
    let without = format!("{job}[checkpoint]\nenabled = false\n");
    let done = ended(&cluster, submit(&cluster, &without));
    assert_eq!(done["state"], "done", "{done}");
    end(cluster);
}

/// Returns a program that sees an empty disk in this folder; none where a test may not mount one.
fn on_another_disk(dir: &Path, hidden: &Path) -> Option<Program> {
    let script = dir.join("apart");
    let Program(built) = program();
    let text = format!(
        "#!/bin/sh\nexec unshare --mount sh -c 'mount -t tmpfs tmpfs \"$0\" && exec \"$@\"' '{}' '{}' \"$@\"\n",
        hidden.display(),
        built.display()
    );
    std::fs::write(&script, text).unwrap();
    let all = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(&script, all).unwrap();
    let works = std::process::Command::new(&script)
        .arg("--version")
        .output();
    if works.is_ok_and(|output| output.status.success()) {
        return Some(Program(script));
    }
    say("SKIPPED: a server with another disk: no mount namespace can be made here (root can)");
    None
}

/// Nothing is begun or forgotten while the disk of the coordinator is full, and the jobs go on once it has room.
#[test]
fn a_full_disk_does_not_end_the_coordinator_of_a_queue() {
    let Some(disk) = SmallDisk::mount(4 << 10) else {
        return;
    };
    let run = disk.path().join("run");
    let dir = tempfile::tempdir().unwrap();
    let arguments = [
        "coordinator",
        "--no-job",
        "--listen",
        "127.0.0.1:0",
        "--run-dir",
    ];
    let arguments = [&arguments[..], &[run.to_str().unwrap()]].concat();
    let coordinator = Daemon::start(&program(), dir.path().join("coordinator"), &arguments, &[]);
    let address = coordinator.address();
    let id = submit_to(&address, "epochs = 1000000", &[])["id"]
        .as_u64()
        .unwrap();
    let list = || {
        let output = program().run(&["jobs", "--json", "--coordinator", &address]);
        serde_json::from_slice::<Value>(&output.stdout).unwrap()["jobs"].clone()
    };
    eventually(|| list()[0]["state"] == "running");

    disk.fill();
    // The file of the queue may have some room left.
    let file = dir.path().join("job.toml");
    let long = format!(
        "[model]\noptions = {{ text = \"{}\" }}\n",
        "x".repeat(200 << 10)
    );
    std::fs::write(&file, long).unwrap();
    let submission = ["submit", file.to_str().unwrap(), "--coordinator", &address];
    let submission = [&submission[..], &["--patience-seconds", "1"]].concat();
    let refused = (0..50).find_map(|_| {
        let output = program().run(&submission);
        (!output.status.success()).then_some(output)
    });
    let said = String::from_utf8_lossy(&refused.unwrap().stderr).into_owned();
    assert!(said.contains("look at its disk"), "{said}");
    assert_eq!(list()[0]["state"], "running");
    disk.empty();
    let cancelled = program().run(&[
        "cancel",
        &id.to_string(),
        "--now",
        "--coordinator",
        &address,
    ]);
    assert!(cancelled.status.success(), "{cancelled:?}");
    eventually(|| list()[0]["state"] == "cancelled");
    coordinator.terminate();
}
