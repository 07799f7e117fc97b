//! Ctrl-C keeps the work that was done, and another run can continue from it.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Stdio};

use serde_json::Value;
use tests::{children, eventually, exists, interrupt_group};

use crate::program;

const ALL: u64 = 4 * 1437;

/// Starts a run in its own process group, as a shell does for a command.
fn train(dir: &Path, mode: &str, env: (&str, &str)) -> Child {
    let run = dir.to_str().unwrap();
    let mut command = program().command(&["train", "--model", "odd", "--epochs", "4"]);
    command
        .args([
            "--mode",
            mode,
            "--run-dir",
            run,
            "--json",
            "--set",
            "log_every=1",
        ])
        .env(env.0, env.1)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0);
    command.spawn().unwrap()
}

/// Waits until steps have been finished.
fn until_it_trains(dir: &Path) {
    let steps = || std::fs::read_to_string(dir.join("metrics.jsonl")).unwrap_or_default();
    eventually(|| steps().contains("\"event\":\"steps\""));
}

#[test]
fn ctrl_c_keeps_what_was_done_and_the_run_goes_on_from_there() {
    for mode in ["sync", "bounded"] {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path().join("run");
        let brake = dir.path().join("brake");
        std::fs::write(&brake, "").unwrap();
        let process = train(&run, mode, ("TEST_SLOW_WHILE", brake.to_str().unwrap()));
        until_it_trains(&run);
        let processes = children(process.id());
        assert!(processes.len() >= 5, "{processes:?}");
        interrupt_group(process.id());
        let output = process.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(130), "{said}");
        eventually(|| processes.iter().all(|process| !exists(*process)));
        for file in ["summary.json", "model.safetensors", "report.html"] {
            assert!(run.join(file).exists(), "{file} is missing: {said}");
        }
        let summary: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(summary["stopped"], true, "{summary}");
        let samples = summary["samples"].as_u64().unwrap();
        assert!(samples > 0 && samples < ALL, "{summary}");
        assert!(!summary["test_accuracy"].is_null(), "{summary}");

        // Runs the command that it has printed.
        let command = said.lines().find(|line| line.contains(" resume "));
        let words: Vec<&str> = command.unwrap().split_whitespace().collect();
        let output = program()
            .command(&words[1..])
            .arg("--json")
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{command:?}: {said}");
        let summary: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(summary["samples"], ALL, "{summary}");
        assert!(summary["stopped"].is_null(), "{summary}");
    }
}

#[test]
fn a_second_ctrl_c_ends_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    // A worker needs most of a minute for the data that it holds.
    let mut process = train(&run, "async", ("TEST_STEP_MILLISECONDS", "8000"));
    until_it_trains(&run);
    let processes = children(process.id());
    interrupt_group(process.id());
    let mut lines = BufReader::new(process.stderr.take().unwrap());
    let mut line = String::new();
    while !line.contains("stopping") {
        line.clear();
        assert!(
            lines.read_line(&mut line).unwrap() > 0,
            "it has not said so"
        );
    }
    interrupt_group(process.id());
    let mut rest = String::new();
    lines.read_to_string(&mut rest).unwrap();
    assert_eq!(process.wait().unwrap().code(), Some(130), "{rest}");
    assert!(rest.contains("interrupted"), "{rest}");
    eventually(|| processes.iter().all(|process| !exists(*process)));
    assert!(!run.join("model.safetensors").exists());
}
