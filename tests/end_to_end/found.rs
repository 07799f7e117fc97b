//! `flambeau status` without an address: the clusters of this machine.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;
use tests::Daemon;

use super::program;

/// A folder of running coordinators that the other tests do not use.
struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn coordinator(&self, name: &str, more: &[(&str, &str)]) -> Daemon {
        let run = self.run_dir(name);
        let arguments = [
            "coordinator",
            "--listen",
            "127.0.0.1:0",
            "--name",
            name,
            "--run-dir",
            run.to_str().unwrap(),
        ];
        let mut env = vec![("XDG_RUNTIME_DIR", self.0.path().to_str().unwrap())];
        env.extend(more);
        let log = self.0.path().join(format!("{name}.log"));
        Daemon::start(&program(), log, &arguments, &env)
    }

    fn run_dir(&self, name: &str) -> PathBuf {
        self.0.path().join(format!("run of {name}"))
    }

    fn status(&self, more: &[&str]) -> Output {
        self.command(more).output().unwrap()
    }

    fn command(&self, more: &[&str]) -> Command {
        let mut command = program().command(&["status"]);
        command.args(more).env("XDG_RUNTIME_DIR", self.0.path());
        command
    }

    fn json(&self) -> Value {
        let output = self.status(&["--json"]);
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// Returns the files of running coordinators.
    fn files(&self) -> Vec<PathBuf> {
        let folder = self.0.path().join("flambeau");
        let entries = std::fs::read_dir(folder).unwrap();
        entries.map(|entry| entry.unwrap().path()).collect()
    }
}

fn text(bytes: &[u8]) -> std::borrow::Cow<'_, str> {
    String::from_utf8_lossy(bytes)
}

#[test]
fn one_cluster_is_shown_and_several_are_listed() {
    let place = Place::new();
    let mut first = place.coordinator("first", &[]);
    let output = place.status(&[]);
    let said = text(&output.stdout);
    assert!(output.status.success(), "{output:?}");
    assert!(said.contains("job \"first\": starting"), "{said}");
    assert!(said.contains(&first.address()), "{said}");
    assert_eq!(place.json()["job"], "first");

    let second = place.coordinator("second", &[]);
    let listed = place.json();
    let addresses = [first.address(), second.address()];
    let mut jobs = Vec::new();
    for cluster in listed["clusters"].as_array().unwrap() {
        let address = cluster["coordinator"].as_str().unwrap();
        assert!(addresses.iter().any(|known| known == address), "{listed}");
        assert_eq!(cluster["phase"], "starting");
        jobs.push(cluster["job"].as_str().unwrap().to_owned());
    }
    jobs.sort();
    assert_eq!(jobs, ["first", "second"]);
    let said = place.status(&[]).stdout;
    let said = text(&said);
    assert!(said.contains("choose one with --coordinator"), "{said}");
    let one = place.status(&["--coordinator", &second.address(), "--json"]);
    assert!(text(&one.stdout).contains("\"second\""));

    // A coordinator that is killed leaves its file behind, which nothing holds any more.
    first.kill();
    assert_eq!(place.files().len(), 2);
    assert_eq!(place.json()["job"], "second");
    assert_eq!(place.files().len(), 1);
    // One that ends takes its file along.
    second.terminate();
    let mut second = second;
    second.wait();
    assert_eq!(place.files(), Vec::<PathBuf>::new());
}

#[test]
fn without_any_cluster_it_says_where_it_looked() {
    let place = Place::new();
    let output = place.status(&[]);
    let said = text(&output.stderr);
    // Another coordinator of this machine may listen on the usual port.
    if output.status.success() || !said.contains("no cluster of this user") {
        let listens = std::net::TcpStream::connect("127.0.0.1:7070").is_ok();
        assert!(listens, "{output:?}");
        return;
    }
    let folder = place.0.path().join("flambeau");
    assert!(said.contains(folder.to_str().unwrap()), "{said}");
    assert!(said.contains("--coordinator"), "{said}");
}

#[test]
fn a_cluster_that_is_found_still_demands_its_token() {
    let place = Place::new();
    let file = place.0.path().join("token");
    std::fs::write(&file, "a-token-of-thirty-two-characters-\n").unwrap();
    let file = file.to_str().unwrap();
    let _coordinator = place.coordinator("secret", &[("FLAMBEAU_TOKEN_FILE", file)]);
    let refused = place.status(&[]);
    assert_eq!(refused.status.code(), Some(1));
    let said = text(&refused.stderr);
    assert!(said.contains("token is missing"), "{said}");
    assert!(!text(&refused.stdout).contains("secret"), "{refused:?}");
    let shown = place.status(&["--token-file", file]);
    assert!(text(&shown.stdout).contains("job \"secret\""), "{shown:?}");
}

#[test]
fn a_local_run_is_found() {
    let place = Place::new();
    let run = place.run_dir("train");
    let arguments = ["train", "--quiet", "--epochs", "100000", "--run-dir"];
    let mut command = program().command(&arguments);
    command.arg(&run).env("XDG_RUNTIME_DIR", place.0.path());
    let mut train = command.spawn().unwrap();
    let mut found = Value::Null;
    let folder: &Path = &place.0.path().join("flambeau");
    tests::eventually(|| {
        let registered = folder.is_dir() && !place.files().is_empty();
        registered && {
            found = place.json();
            found["phase"] == "training"
        }
    });
    train.kill().unwrap();
    train.wait().unwrap();
    // The coordinator ends with the run, and its file with it.
    tests::eventually(|| place.files().is_empty());
}
