//! Processes that a launcher made for TensorFlow starts: all with one command, and `TF_CONFIG`.

use std::path::Path;

use serde_json::{Value, json};
use tests::{Daemon, free_address};

use crate::program;

/// Starts a task of a cluster.
fn task(dir: &Path, cluster: &Value, kind: &str, index: u32, more: &[&str]) -> Daemon {
    let config = json!({
        "cluster": cluster,
        "task": { "type": kind, "index": index },
        "environment": "cloud",
    });
    let mut arguments = vec!["tf-task"];
    arguments.extend(more);
    let run = dir.join("run");
    arguments.extend(["--run-dir", run.to_str().unwrap()]);
    let log = dir.join(format!("{kind}-{index}.log"));
    Daemon::start(
        &program(),
        log,
        &arguments,
        &[("TF_CONFIG", &config.to_string())],
    )
}

fn read(path: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

#[test]
fn chief_worker_ps_and_evaluator_come_up_by_tf_config_alone() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("job.toml");
    let job = "epochs = 8\n[strategy]\nmode = \"sync\"\n[checkpoint]\nevery_steps = 20\n";
    std::fs::write(&file, job).unwrap();
    let file = file.to_str().unwrap();
    let [chief, worker, ps] = [(); 3].map(|()| free_address());
    let cluster = json!({ "chief": [chief], "worker": [worker], "ps": [ps] });
    // In any order; the chief is last.
    let tasks = [("evaluator", 0), ("ps", 0), ("worker", 0), ("chief", 0)];
    let start = |(kind, index)| {
        let (dir, cluster, file) = (dir.path(), cluster.clone(), file.to_owned());
        let dir = dir.to_owned();
        // A process prints its address once it is registered, which it is once all are there.
        std::thread::spawn(move || task(&dir, &cluster, kind, index, &[&file]))
    };
    let started = tasks.map(start);
    for mut daemon in started.map(|daemon| daemon.join().unwrap()) {
        assert!(daemon.wait().success(), "{}", daemon.log());
    }
    let run = dir.path().join("run");
    let summary = read(&run.join("summary.json"));
    assert_eq!(
        (&summary["ps"], &summary["workers"]),
        (&1.into(), &2.into()),
        "{summary}"
    );
    assert!(run.join("model.safetensors").exists());
    // The last evaluation is of the final weights.
    let evaluations = std::fs::read_to_string(run.join("evaluator.jsonl")).unwrap();
    let last: Value = serde_json::from_str(evaluations.lines().last().unwrap()).unwrap();
    assert_eq!(last["steps"], summary["steps"], "{evaluations}");
    let accuracy = |object: &Value| object["metrics"]["accuracy"].as_f64().unwrap();
    assert!(
        (accuracy(&last) - accuracy(&summary)).abs() < 1e-6,
        "{last} {summary}"
    );
}

#[test]
fn workers_alone_are_a_ring_with_the_first_as_chief() {
    let dir = tempfile::tempdir().unwrap();
    let cluster = json!({ "worker": [free_address(), free_address()] });
    let start = |index| {
        let (dir, cluster) = (dir.path().to_owned(), cluster.clone());
        std::thread::spawn(move || task(&dir, &cluster, "worker", index, &["--epochs", "3"]))
    };
    for mut daemon in [0, 1].map(start).map(|daemon| daemon.join().unwrap()) {
        assert!(daemon.wait().success(), "{}", daemon.log());
    }
    let run = dir.path().join("run");
    let job = std::fs::read_to_string(run.join("job.toml")).unwrap();
    assert!(job.contains("multi-worker-mirrored"), "{job}");
    let summary = read(&run.join("summary.json"));
    assert_eq!(
        (&summary["ps"], &summary["workers"]),
        (&0.into(), &2.into()),
        "{summary}"
    );
}

#[test]
fn a_tf_config_that_makes_no_sense_is_an_error_that_names_the_place() {
    let worker =
        json!({ "cluster": { "worker": ["a:1"] }, "task": { "type": "worker", "index": 4 } });
    let no_ps =
        json!({ "cluster": { "chief": ["127.0.0.1:1"] }, "task": { "type": "chief", "index": 0 } });
    for (config, more, named) in [
        (None, &[][..], "not found"),
        (Some("{".to_owned()), &[], "JSON"),
        (Some(worker.to_string()), &[], "worker 4"),
        (
            Some(no_ps.to_string()),
            &["--strategy", "parameter-server"],
            "has no ps",
        ),
    ] {
        let mut arguments = vec!["tf-task"];
        arguments.extend(more);
        let mut command = program().command(&arguments);
        command.env_remove("TF_CONFIG");
        if let Some(config) = &config {
            command.env("TF_CONFIG", config);
        }
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{config:?}: {said}");
        assert!(said.contains(named) && said.contains("TF_CONFIG"), "{said}");
        assert!(!said.contains("panicked"), "{said}");
    }
}
