//! `flambeau evaluator`: checkpoints evaluated by a process of its own, beside the training.

use std::path::Path;
use std::process::Stdio;

use serde_json::Value;
use tests::eventually;

use crate::program;

/// A job whose workers evaluate at the end alone, with a checkpoint every 20 steps.
const JOB: &str = "seed = 5\nepochs = 12\nevaluations = \"last\"\n[model]\nname = \"odd\"\n[cluster]\nps = 2\nworkers = 2\n[strategy]\nmode = \"sync\"\n[checkpoint]\nevery_steps = 20\nkeep = 2\n";

/// Returns the results of an evaluator.
fn results(run: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(run.join("evaluator.jsonl")).unwrap_or_default();
    let lines = text.lines().map(serde_json::from_str);
    lines.map(Result::unwrap).collect()
}

#[test]
fn an_evaluator_measures_checkpoints_as_they_come_and_its_death_does_not_matter() {
    let dir = tempfile::tempdir().unwrap();
    let (job, run) = (dir.path().join("job.toml"), dir.path().join("run"));
    std::fs::write(&job, JOB).unwrap();
    let evaluate = || {
        let mut command =
            program().command(&["evaluator", run.to_str().unwrap(), "--every", "0.1"]);
        let command = command.args(["--device", "cpu"]).stdout(Stdio::piped());
        command.spawn().unwrap()
    };
    // It may come before the run does.
    let mut first = evaluate();
    let mut training = program()
        .command(&["train", job.to_str().unwrap(), "--quiet", "--json"])
        .args(["--run-dir", run.to_str().unwrap()])
        .env("TEST_STEP_MILLISECONDS", "10")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    eventually(|| !results(&run).is_empty());
    // The training comes first: field 19 of its state is the niceness.
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", first.id())).unwrap();
    let (_, fields) = stat.rsplit_once(") ").unwrap();
    assert_eq!(fields.split(' ').nth(16), Some("10"), "{stat}");
    first.kill().unwrap();
    first.wait().unwrap();
    assert!(
        training.try_wait().unwrap().is_none(),
        "the training is over"
    );
    let second = evaluate();
    let output = training.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let summary: Value = serde_json::from_slice(&output.stdout).unwrap();
    // It ends with the run.
    let ended = second.wait_with_output().unwrap();
    assert!(ended.status.success(), "{ended:?}");

    let results = results(&run);
    let number = |result: &Value, name: &str| result[name].as_u64().unwrap();
    let numbers: Vec<u64> = results.iter().map(|r| number(r, "checkpoint")).collect();
    assert!(
        numbers.len() > 1 && numbers.is_sorted_by(|a, b| a < b),
        "{numbers:?}"
    );
    let last = results.last().unwrap();
    // The last checkpoint has the final weights.
    assert_eq!(last["steps"], summary["steps"]);
    let [found, expected] = [&last["metrics"]["accuracy"], &summary["test_accuracy"]];
    let [found, expected] = [found, expected].map(|value| value.as_f64().unwrap());
    assert!((found - expected).abs() < 1e-6, "{last} {summary}");
    // No worker has evaluated before the end.
    let records = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    assert_eq!(records.matches("\"event\":\"evaluation\"").count(), 1);
}

#[test]
fn an_evaluator_of_nothing_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let output = program().run(&["evaluator", dir.path().to_str().unwrap(), "--once"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success());
    assert!(said.contains("no checkpoints at"), "{said}");
}
