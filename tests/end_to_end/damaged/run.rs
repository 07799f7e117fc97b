//! State, checkpoints and claims of a run, all of whose processes start again.

use std::path::{Path, PathBuf};

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::Value;
use tests::{Cluster, Daemon, eventually, free_address};

use super::{damage, damages};
use crate::program;

/// The job trains 90 steps: a pass over 1,437 samples has 45.
fn job(mode: &str) -> String {
    format!(
        r#"
epochs = 2
batch_size = 32
[model]
name = "odd"
[optimizer]
name = "momentum"
[strategy]
mode = "{mode}"
[cluster]
ps = 1
workers = 1
lease_seconds = 2.0
stall_seconds = 4.0
[checkpoint]
every_steps = 20
"#
    )
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let to = to.join(entry.file_name());
        match entry.file_type().unwrap().is_dir() {
            true => copy(&entry.path(), &to),
            false => drop(std::fs::copy(entry.path(), to).unwrap()),
        }
    }
}

/// Returns all files of a run that a start reads.
fn files(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        let is_read = name.starts_with("coordinator.state")
            || name.starts_with("owner-")
            || folder.to_str().unwrap().contains("checkpoint-");
        match path.is_dir() {
            true => files.extend(self::files(&path)),
            false if is_read => files.push(path),
            false => {}
        }
    }
    files.sort();
    files
}

/// The outcome of a run whose processes have started again.
enum Outcome {
    /// The summary, and the model's file.
    Done(Value, Vec<u8>),
    /// The logs of the processes.
    Refused(String),
}

/// Starts all processes of a run again, and waits for the end of the job.
fn go_on(folder: &Path, more: &[&str]) -> Outcome {
    let address = free_address();
    let text = |path: &Path| path.to_str().unwrap().to_owned();
    let (file, run) = (text(&folder.join("given.toml")), text(&folder.join("run")));
    let arguments = [
        "coordinator",
        &file,
        "--listen",
        &address,
        "--run-dir",
        &run,
    ];
    let log = folder.join("again.log");
    let arguments = [&arguments[..], more].concat();
    let mut coordinator = match Daemon::try_start(&program(), log, &arguments, &[]) {
        Ok(coordinator) => coordinator,
        Err(said) => return Outcome::Refused(said),
    };
    let member = |role: &str, identity: &str| {
        let arguments = [role, "--identity", identity, "--coordinator", &address];
        let log = folder.join(format!("{identity}-again.log"));
        Daemon::start(&program(), log, &arguments, &[])
    };
    let members = [member("ps-server", "ps-0"), member("worker", "worker-0")];
    if !coordinator.wait().success() {
        let members = members.iter().map(Daemon::log);
        let logs: Vec<String> = members.chain([coordinator.log()]).collect();
        return Outcome::Refused(logs.join("\n"));
    }
    let read = |name: &str| std::fs::read(folder.join("run").join(name)).unwrap();
    let summary = serde_json::from_slice(&read("summary.json")).unwrap();
    Outcome::Done(summary, read("model.safetensors"))
}

#[test]
fn a_damaged_run_ends_as_if_undisturbed_or_is_refused() {
    let mut rng = ChaCha8Rng::seed_from_u64(5);
    let (mut done, mut refused) = (0, 0);
    for mode in ["sync", "async"] {
        let mut cluster = Cluster::start(program(), &job(mode), 1);
        cluster.add_worker(&[("TEST_STEP_MILLISECONDS", "60")]);
        eventually(|| cluster.status()["steps"].as_u64() > Some(65));
        cluster.coordinator.kill();
        for member in cluster.ps.iter_mut().chain(&mut cluster.workers) {
            member.kill();
        }
        assert!(!cluster.run_dir().join("summary.json").exists());
        let folder = cluster.run_dir().parent().unwrap().to_owned();
        let trials = tempfile::tempdir().unwrap();
        let trial = |number: &str| {
            let to = trials.path().join(number);
            copy(&folder, &to);
            to
        };
        let undisturbed = trial("undisturbed");
        let (expected, model) = match go_on(&undisturbed, &[]) {
            Outcome::Done(summary, model) => (summary, model),
            Outcome::Refused(said) => panic!("{mode}: {said}"),
        };
        std::fs::remove_dir_all(undisturbed).unwrap();
        for number in 0..damages(4) {
            let trial = trial(&number.to_string());
            let files = files(&trial.join("run"));
            let what = damage(&files[rng.random_range(0..files.len())], None, &mut rng);
            match go_on(&trial, &[]) {
                Outcome::Done(summary, trained) => {
                    done += 1;
                    assert_eq!(summary["samples"], expected["samples"], "{mode}, {what}");
                    if mode == "sync" {
                        assert!(trained == model, "{mode}, {what}: another model");
                    }
                }
                Outcome::Refused(said) => {
                    refused += 1;
                    let damaged = what.split(": ").next().unwrap();
                    let name = Path::new(damaged).file_name().unwrap().to_str().unwrap();
                    let name = name.trim_end_matches(".0").trim_end_matches(".1");
                    assert!(said.contains(name), "{mode}, {what}: {said}");
                    if name.starts_with("owner-") {
                        assert!(said.contains("delete the file"), "{mode}, {what}: {said}");
                        std::fs::remove_file(damaged).unwrap();
                        match go_on(&trial, &[]) {
                            Outcome::Done(summary, _) => {
                                assert_eq!(summary["samples"], expected["samples"]);
                            }
                            Outcome::Refused(said) => panic!("{mode}, {what}: {said}"),
                        }
                    }
                }
            }
            std::fs::remove_dir_all(trial).unwrap();
        }
    }
    println!("{done} runs went on, and {refused} were refused");
    assert!(done > 0);
}

/// A run directory is moved, and the run goes on there.
#[test]
fn a_run_directory_that_was_moved_goes_on() {
    let mut cluster = Cluster::start(program(), &job("sync"), 1);
    cluster.add_worker(&[("TEST_STEP_MILLISECONDS", "60")]);
    eventually(|| cluster.status()["steps"].as_u64() > Some(45));
    cluster.coordinator.kill();
    for member in cluster.ps.iter_mut().chain(&mut cluster.workers) {
        member.kill();
    }
    assert!(!cluster.run_dir().join("summary.json").exists());
    let folder = cluster.run_dir().parent().unwrap().to_owned();
    let moved = folder.join("moved");
    std::fs::create_dir(&moved).unwrap();
    std::fs::rename(folder.join("run"), moved.join("run")).unwrap();
    std::fs::copy(folder.join("given.toml"), moved.join("given.toml")).unwrap();
    match go_on(&moved, &[]) {
        Outcome::Done(summary, _) => assert_eq!(summary["samples"], 2 * 1437),
        Outcome::Refused(said) => panic!("{said}"),
    }
}
