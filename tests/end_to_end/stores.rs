//! Stores of checkpoints that are shared with another run, full, or not writable; and metrics that are NaN or
//! infinite, for which JSON has no numbers.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use tempfile::TempDir;
use tests::{Cluster, Daemon, Program, eventually, say};

use crate::program;

/// A job that does not end by itself, with a checkpoint every few steps.
fn endless(location: &Path) -> String {
    format!(
        r#"
epochs = 100000
[model]
name = "odd"
[strategy]
mode = "async"
[cluster]
ps = 1
workers = 1
lease_seconds = 2.0
[checkpoint]
every_steps = 10
location = "{}"
"#,
        location.display()
    )
}

/// Starts a cluster with a worker; `restore` names the checkpoint to begin with.
fn start(job: &str, restore: &[&str]) -> Cluster {
    let mut cluster = Cluster::start_coordinator_with(program(), job, 1, restore);
    cluster.add_worker(&[("TEST_STEP_MILLISECONDS", "10")]);
    cluster
}

fn kill(cluster: &mut Cluster) {
    cluster.coordinator.kill();
    for daemon in cluster.ps.iter_mut().chain(&mut cluster.workers) {
        daemon.kill();
    }
}

fn newest(cluster: &Cluster) -> u64 {
    let number = &cluster.status()["checkpoint"]["number"];
    number.as_u64().unwrap_or(0)
}

/// Returns the manifests in a folder, by number.
fn manifests(location: &Path) -> Vec<Value> {
    let mut found: Vec<Value> = std::fs::read_dir(location)
        .unwrap()
        .filter_map(|entry| {
            let text = std::fs::read_to_string(entry.unwrap().path().join("manifest.json")).ok()?;
            serde_json::from_str(&text).ok()
        })
        .collect();
    found.sort_by_key(|manifest| manifest["number"].as_u64());
    found
}

fn verify(location: &Path) {
    let output = program().run(&["checkpoint", "verify", location.to_str().unwrap()]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
}

#[test]
fn a_metric_that_is_no_number_is_kept_and_gone_on_with() {
    let dir = TempDir::new().unwrap();
    let location = dir.path().join("checkpoints");
    let job = format!("non_finite = \"skip\"\n{}", endless(&location))
        .replace("odd", "mlp")
        .replace(
            "[strategy]",
            "[optimizer]\nname = \"sgd\"\nlearning_rate = 1e38\n[strategy]",
        );
    let mut cluster = start(&job, &[]);
    let loss = |cluster: &Cluster| {
        let status = cluster.status();
        let newest = status["evaluations"].as_array().unwrap().last().cloned();
        newest.map(|newest| newest["metrics"]["loss"].clone())
    };
    eventually(|| loss(&cluster).is_some());
    cluster.coordinator.kill();
    cluster.restart_coordinator();
    assert_eq!(loss(&cluster).unwrap(), "NaN");
    let before = newest(&cluster);
    eventually(|| newest(&cluster) > before + 1);
    let metrics = cluster.run_dir().join("metrics.jsonl");
    // The line of the first evaluation may be lost with the coordinator; the next evaluation has another one.
    let written = || std::fs::read_to_string(&metrics).unwrap();
    eventually(|| written().contains("\"loss\":\"NaN\""));
    cluster.coordinator.terminate();
    cluster.coordinator.wait();
    kill(&mut cluster);

    verify(&location);
    let restore = ["--restore", location.to_str().unwrap()];
    let mut cluster = start(&job, &restore);
    // The evaluation of the checkpoint counts until the next one is made.
    eventually(|| loss(&cluster).is_some());
    assert_eq!(loss(&cluster).unwrap(), "NaN");
    let before = newest(&cluster);
    eventually(|| newest(&cluster) > before);
    kill(&mut cluster);
}

#[test]
fn a_checkpoint_with_values_that_are_not_finite_is_restored_only_by_a_job_that_takes_them() {
    let dir = tempfile::tempdir().unwrap();
    let run = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (first, second, third) = (run("first"), run("second"), run("third"));
    let skip = ["--set", "non_finite=\"skip\""];
    let large = ["--learning-rate", "1e38", "--epochs", "1"];
    let train = |run_dir: &str, more: &[&str]| {
        let base = ["train", "--model", "mlp", "--quiet", "--run-dir", run_dir];
        program().run(&[&base, more].concat())
    };
    let output = train(&first, &[large, ["--set", skip[1], "--ps", "1"]].concat());
    assert!(output.status.success(), "{output:?}");

    // The run brings its job along, with its settings.
    let restore = ["--restore", &first, "--epochs", "2"];
    let fail = ["--set", "non_finite=\"fail\""];
    let output = train(&second, &[&restore[..], &fail].concat());
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{said}");
    assert!(said.contains("that are NaN or infinite"), "{said}");
    let output = train(&third, &restore);
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn two_runs_at_one_location_do_each_other_no_harm() {
    let dir = TempDir::new().unwrap();
    let location = dir.path().join("checkpoints");
    let job = endless(&location);
    let restore = ["--restore", location.to_str().unwrap()];
    let mut first = start(&job, &[]);
    eventually(|| newest(&first) > 2);
    let id = first.status()["run"].as_str().unwrap().to_owned();

    // While the first run lives, a second one at its location ends and changes nothing. A run at another
    // location may begin with its checkpoints.
    let file = dir.path().join("job.toml");
    std::fs::write(&file, &job).unwrap();
    for more in [&restore[..], &[]] {
        let run_dir = dir.path().join(format!("refused-{}", more.len()));
        let mut arguments = vec!["coordinator", file.to_str().unwrap()];
        arguments.extend(["--listen", "127.0.0.1:0", "--run-dir"]);
        arguments.push(run_dir.to_str().unwrap());
        arguments.extend(more);
        let output = program().run(&arguments);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success(), "{said}");
        let address = first.coordinator.address();
        for part in ["another run is at work", &id, &address] {
            assert!(said.contains(part), "{part:?} is not in {said}");
        }
    }
    let elsewhere = dir.path().join("elsewhere");
    let mut other = start(&endless(&elsewhere), &restore);
    eventually(|| newest(&other) > 0);
    kill(&mut other);
    let of_first = |m: &Value| m["run"] == id.as_str();
    assert!(manifests(&location).iter().all(of_first));

    // The first run continues, and its coordinator may restart.
    let before = newest(&first);
    eventually(|| newest(&first) > before);
    first.coordinator.kill();
    first.restart_coordinator();
    assert_eq!(first.status()["run"], id.as_str());
    let before = newest(&first);
    eventually(|| newest(&first) > before);
    kill(&mut first);

    // Once the first run is dead, the next one waits for a while, continues with higher numbers, and leaves the
    // first run's checkpoints alone.
    let left = manifests(&location);
    let mut second = start(&job, &restore);
    let highest = left.last().unwrap()["number"].as_u64().unwrap();
    eventually(|| newest(&second) > highest + 5);
    let log = second.coordinator.log();
    assert!(log.contains("no sign of life"), "{log}");
    let now = manifests(&location);
    assert_eq!(now[..left.len()], left, "nothing of the first is touched");
    let of_second = &now[left.len()..];
    assert!(of_second.iter().all(|m| !of_first(m)), "{of_second:?}");
    verify(&location);

    // The first run comes back, and finds that its location is taken.
    first.restart_coordinator();
    assert!(!first.coordinator.wait().success());
    let log = first.coordinator.log();
    let id = second.status()["run"].as_str().unwrap().to_owned();
    for part in ["another run is at work", &id, "writes no more there"] {
        assert!(log.contains(part), "{part:?} is not in {log}");
    }
    let before = newest(&second);
    eventually(|| newest(&second) > before);
    kill(&mut second);
}

/// Returns a program that cannot write files beyond a small size, as on a full disk.
fn cramped(dir: &Path) -> Program {
    use std::os::unix::fs::PermissionsExt;
    let Program(built) = program();
    let script = dir.join("cramped");
    // A write that is too large fails, and does not end the process.
    let text = format!(
        "#!/bin/sh\ntrap '' XFSZ\nulimit -f 64\nexec '{}' \"$@\"\n",
        built.display()
    );
    std::fs::write(&script, text).unwrap();
    let all = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(&script, all).unwrap();
    Program(script)
}

fn bytes(folder: &Path) -> u64 {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return 0;
    };
    let size = |path: PathBuf| match path.metadata() {
        Ok(found) if found.is_dir() => bytes(&path),
        Ok(found) => found.len(),
        Err(_) => 0,
    };
    entries.map(|entry| size(entry.unwrap().path())).sum()
}

/// A job with shards of about 1.2 MB of weights and slots each.
const LARGE: &str = r#"
steps = 40
[data]
kind = "random"
[model]
name = "mlp"
[optimizer]
name = "adam"
[strategy]
mode = "async"
[cluster]
ps = 2
workers = 1
lease_seconds = 2.0
"#;

#[test]
fn a_server_that_cannot_write_does_not_fill_the_store() {
    let dir = TempDir::new().unwrap();
    let location = dir.path().join("checkpoints");
    let job = format!(
        "{LARGE}[checkpoint]\nlocation = \"{}\"\n",
        location.display()
    );
    let mut cluster = Cluster::start(program(), &job, 1);
    let coordinator = cluster.coordinator.address();
    let cramped = Daemon::start(
        &cramped(dir.path()),
        dir.path().join("cramped.log"),
        &[
            "ps-server",
            "--identity",
            "ps-1",
            "--coordinator",
            &coordinator,
        ],
        &[],
    );
    cluster.ps.push(cramped);
    cluster.add_worker(&[]);
    let failures = |cluster: &Cluster| {
        let metrics = cluster.coordinator.http("/metrics");
        let line = metrics
            .lines()
            .find(|line| line.starts_with("flambeau_coordinator_failed_checkpoints_total"));
        line.and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
    };
    // Each attempt would leave the other server's part.
    eventually(|| failures(&cluster) >= Some(4.0));
    let error = cluster.status()["checkpoint_error"].to_string();
    assert!(error.contains("times in a row, tried again"), "{error}");
    eventually(|| bytes(&location) < 64 << 10);
    // A server that can write comes in its place.
    cluster.ps[1].kill();
    cluster.restart_ps(1);
    let (summary, _) = cluster.finish();
    assert_eq!(summary["steps"], 40);
    verify(&location);
}

/// A small disk, unmounted with the test.
pub(crate) struct SmallDisk(TempDir);

impl SmallDisk {
    pub(crate) fn mount(kibibytes: u32) -> Option<Self> {
        let disk = Self(TempDir::new().unwrap());
        if disk.run(&["-t", "tmpfs", "-o", &format!("size={kibibytes}k"), "tmpfs"]) {
            return Some(disk);
        }
        say("SKIPPED: a full disk: no tmpfs can be mounted here (root can)");
        None
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    /// Writes a file that takes all room.
    pub(crate) fn fill(&self) {
        let mut others = std::fs::File::create(self.path().join("others")).unwrap();
        while std::io::Write::write_all(&mut others, &[1; 1024]).is_ok() {}
    }

    /// Removes the file that takes all room.
    pub(crate) fn empty(&self) {
        std::fs::remove_file(self.path().join("others")).unwrap();
    }

    fn run(&self, arguments: &[&str]) -> bool {
        let mut mount = Command::new("mount");
        let output = mount.args(arguments).arg(self.0.path()).output();
        output.is_ok_and(|output| output.status.success())
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

#[test]
fn a_full_store_is_named_and_gone_on_with_once_it_has_room() {
    let Some(disk) = SmallDisk::mount(1024) else {
        return;
    };
    let location = disk.path().join("checkpoints");
    let job = format!(
        "{LARGE}[checkpoint]\nlocation = \"{}\"\n",
        location.display()
    );
    let mut cluster = Cluster::start(program(), &job, 2);
    cluster.add_worker(&[]);
    eventually(|| cluster.status()["checkpoint_store_full"] == true);
    let error = cluster.status()["checkpoint_error"].to_string();
    assert!(
        error.contains("the store of checkpoints is full"),
        "{error}"
    );
    eventually(|| {
        let metrics = cluster.coordinator.http("/metrics");
        metrics.contains("flambeau_coordinator_checkpoint_store_full 1")
    });
    assert!(disk.run(&["-o", "remount,size=64m"]));
    let (summary, _) = cluster.finish();
    assert_eq!(summary["steps"], 40);
    verify(&location);
}

#[test]
fn a_job_that_stops_on_a_full_disk_ends_with_the_reason() {
    let Some(disk) = SmallDisk::mount(1024) else {
        return;
    };
    let location = disk.path().join("checkpoints");
    let job = format!(
        "{LARGE}[checkpoint]\nlocation = \"{}\"\non_full_disk = \"stop\"\n",
        location.display()
    );
    let mut cluster = Cluster::start(program(), &job, 2);
    cluster.add_worker(&[]);
    for daemon in [&mut cluster.coordinator, &mut cluster.workers[0]] {
        assert!(!daemon.wait().success(), "{}", daemon.log());
        let log = daemon.log();
        assert!(log.contains("there is no room for a checkpoint"), "{log}");
    }
}

/// Other files fill the disk of the run directory while the job trains. The coordinator continues and ends well.
#[test]
fn a_coordinator_on_a_full_disk_goes_on_to_the_end() {
    let Some(disk) = SmallDisk::mount(16 << 10) else {
        return;
    };
    let run_dir = disk.path().join("run");
    let dir = TempDir::new().unwrap();
    let location = dir.path().join("checkpoints");
    let job = endless(&location).replace("epochs = 100000", "epochs = 20");
    let file = dir.path().join("job.toml");
    std::fs::write(&file, &job).unwrap();
    let start = |arguments: &[&str]| {
        let log = dir.path().join(format!("{}.log", arguments[0]));
        Daemon::start(
            &program(),
            log,
            arguments,
            &[("TEST_STEP_MILLISECONDS", "10")],
        )
    };
    let run = run_dir.to_str().unwrap();
    let file = file.to_str().unwrap();
    let mut coordinator = start(&[
        "coordinator",
        file,
        "--listen",
        "127.0.0.1:0",
        "--run-dir",
        run,
    ]);
    let address = coordinator.address();
    let _server = start(&["ps-server", "--identity", "p", "--coordinator", &address]);
    let _worker = start(&[
        "worker",
        "--identity",
        "w",
        "--coordinator",
        &address,
        "--run-dir",
        dir.path().to_str().unwrap(),
    ]);
    eventually(|| manifests(&location).len() > 1);
    disk.fill();
    let status = coordinator.wait();
    let log = coordinator.log();
    assert!(status.success(), "{log}");
    let summary = std::fs::read_to_string(run_dir.join("summary.json")).unwrap();
    let summary: Value = serde_json::from_str(&summary).unwrap();
    assert_eq!(summary["samples"], 20 * 1437);
}
