//! The files of a run for those who watch it: TensorBoard's events and the report.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use super::program;

/// Returns a Python that has TensorBoard. If there is none, prints that the test is skipped.
fn tensorboard() -> Option<PathBuf> {
    let given = std::env::var_os("FLAMBEAU_TEST_TENSORBOARD").map(PathBuf::from);
    let python = given.unwrap_or_else(|| "python3".into());
    let found = Command::new(&python)
        .args(["-c", "import tensorboard"])
        .output();
    if found.is_ok_and(|found| found.status.success()) {
        return Some(python);
    }
    tests::say(&format!(
        "SKIPPED: event files are NOT held against TensorBoard's reader: {} has no tensorboard. pip install \
         tensorboard, or put the path of a Python that has it into FLAMBEAU_TEST_TENSORBOARD",
        python.display()
    ));
    None
}

fn train(run: &Path, more: &[&str]) {
    let mut command = program().command(&["train", "--quiet", "--run-dir"]);
    let output = command.arg(run).args(more).output().unwrap();
    assert!(output.status.success(), "{output:?}");
}

fn event_files(run: &Path) -> usize {
    let entries = std::fs::read_dir(run).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names
        .filter(|name| name.starts_with("events.out.tfevents."))
        .count()
}

#[test]
fn tensorboards_own_reader_finds_the_values_of_a_run() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    // The histograms are of checkpoints, which have the newest weights and not their average.
    let newest = ["--set", "strategy.correction.average=0"];
    train(&run, &[&["--epochs", "4"], &newest[..]].concat());
    assert_eq!(event_files(&run), 1);
    let Some(python) = tensorboard() else { return };
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("end_to_end/compare_events.py");
    let output = Command::new(python).arg(script).arg(&run).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let compared: Value = serde_json::from_slice(&output.stdout).unwrap();
    // Loss and accuracy of four evaluations, and some steps; weights and biases of two layers.
    assert!(compared["scalars"].as_u64().unwrap() > 8, "{compared}");
    assert_eq!(compared["histograms"], 4, "{compared}");
}

#[test]
fn a_run_that_has_ended_has_a_report() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    train(&run, &["--epochs", "2"]);
    let report = run.join("report.html");
    let page = std::fs::read_to_string(&report).unwrap();
    let data = page.split("id=\"data\">").nth(1).unwrap();
    let data: Value = serde_json::from_str(data.split("</script>").next().unwrap()).unwrap();
    let summary = std::fs::read_to_string(run.join("summary.json")).unwrap();
    let summary: Value = serde_json::from_str(&summary).unwrap();
    assert_eq!(data["summary"], summary);
    let evaluations = data["history"]["evaluations"].as_array().unwrap();
    assert_eq!(evaluations.len(), 2);
    assert_eq!(evaluations[1]["metrics"]["loss"], summary["test_loss"]);
    assert!(data["settings"].as_str().unwrap().contains("epochs = 2"));
    // `report` writes it again.
    std::fs::remove_file(&report).unwrap();
    let output = program().run(&["report", run.to_str().unwrap()]);
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        said.contains("report.html") && report.exists(),
        "{output:?}"
    );
    let none = program().run(&["report", dir.path().to_str().unwrap()]);
    let said = String::from_utf8_lossy(&none.stderr);
    assert!(
        !none.status.success() && said.contains("has not ended"),
        "{said}"
    );
}
