//! The command line: arguments, output and exit codes.

use std::path::Path;
use std::process::Stdio;

use serde_json::Value;
use tests::{Cluster, Daemon, children, eventually, exists, terminate};

use crate::program;

/// Runs `flambeau train` with these arguments and a run directory of its own, and returns the JSON that it prints.
pub(crate) fn train(dir: &Path, arguments: &[&str]) -> Value {
    let mut all = vec!["train", "--json", "--run-dir", dir.to_str().unwrap()];
    all.extend(arguments);
    let output = program().run(&all);
    let log = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{log}");
    serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error} in {:?}", String::from_utf8_lossy(&output.stdout)))
}

#[test]
fn the_first_command_trains_and_its_run_can_be_evaluated_again() {
    let dir = tempfile::tempdir().unwrap();
    let outcome = train(dir.path(), &[]);
    for key in [
        "mode",
        "staleness",
        "ps",
        "workers",
        "epochs",
        "steps",
        "samples",
        "seconds",
        "samples_per_second",
        "test_accuracy",
        "test_loss",
        "max_clock_lead",
        "mean_gradient_staleness",
        "run_dir",
    ] {
        assert!(!outcome[key].is_null(), "{key} is missing in {outcome}");
    }
    let accuracy = outcome["test_accuracy"].as_f64().unwrap();
    assert!(accuracy >= 0.95, "{outcome}");
    assert_eq!(
        (outcome["ps"].as_u64(), outcome["workers"].as_u64()),
        (Some(2), Some(2))
    );
    assert!(outcome["max_clock_lead"].as_u64().unwrap() <= 4);
    let epochs = outcome["epochs"].as_u64().unwrap();
    assert_eq!(
        outcome["samples"].as_u64(),
        Some(1437 * epochs),
        "each sample once an epoch"
    );

    for file in [
        "metrics.jsonl",
        "report.html",
        "job.toml",
        "model.safetensors",
        "summary.json",
    ] {
        assert!(
            dir.path().join(file).metadata().unwrap().len() > 0,
            "{file}"
        );
    }
    let saved = std::fs::read(dir.path().join("model.safetensors")).unwrap();
    let saved = safetensors::SafeTensors::deserialize(&saved).unwrap();
    let mut names = saved.names();
    names.sort_unstable();
    assert_eq!(
        names,
        [
            "hidden.0.bias",
            "hidden.0.weight",
            "output.bias",
            "output.weight"
        ]
    );

    let again = program().run(&["eval", "--json", dir.path().to_str().unwrap()]);
    let again: Value = serde_json::from_slice(&again.stdout).unwrap();
    assert_eq!(again["test_accuracy"], outcome["test_accuracy"]);
    assert_eq!(again["test_loss"], outcome["test_loss"]);
}

#[test]
fn half_the_bytes_train_as_well() {
    for wire in ["bf16", "f16"] {
        let dir = tempfile::tempdir().unwrap();
        let outcome = train(dir.path(), &["--wire", wire]);
        let accuracy = outcome["test_accuracy"].as_f64().unwrap();
        assert!(accuracy >= 0.95, "{wire}: {outcome}");
    }
}

#[test]
fn settings_come_from_flags_over_environment_over_file() {
    let dir = tempfile::tempdir().unwrap();
    let job = dir.path().join("job.toml");
    let template = program().run(&["job", "init", job.to_str().unwrap()]);
    assert!(template.status.success());
    let again = program().run(&["job", "init", job.to_str().unwrap()]);
    assert!(
        !again.status.success(),
        "a file that is there is left alone"
    );

    let text = std::fs::read_to_string(&job).unwrap();
    let text = text
        .replace("epochs = 20", "epochs = 5")
        .replace("batch_size = 32", "batch_size = 64");
    std::fs::write(&job, text).unwrap();
    let run = dir.path().join("run");
    let mut command =
        program().command(&["train", job.to_str().unwrap(), "--epochs", "2", "--json"]);
    command.args(["--run-dir", run.to_str().unwrap()]);
    let output = command
        .env("FLAMBEAU_EPOCHS", "3")
        .env("FLAMBEAU_WORKERS", "1")
        .output()
        .unwrap();
    let outcome: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        (outcome["epochs"].as_u64(), outcome["workers"].as_u64()),
        (Some(2), Some(1))
    );
    let ran = std::fs::read_to_string(run.join("job.toml")).unwrap();
    assert!(ran.contains("batch_size = 64"), "{ran}");

    std::fs::write(&job, "epoch = 3").unwrap();
    let output = program().run(&["train", job.to_str().unwrap()]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("epoch"), "{said}");
}

#[test]
fn an_unknown_model_is_refused_by_name_with_those_that_exist() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().to_str().unwrap();
    let output = program().run(&["train", "--model", "oracle", "--run-dir", run]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{said}");
    assert!(
        said.contains("\"oracle\"") && said.contains("softmax"),
        "{said}"
    );
}

/// A job that would take hours.
const ENDLESS: &[&str] = &[
    "train",
    "--model",
    "odd",
    "--epochs",
    "100000",
    "--quiet",
    "--run-dir",
];

#[test]
fn sigterm_ends_every_process_of_a_run() {
    for kill in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let mut command = program().command(ENDLESS);
        command
            .arg(dir.path())
            .stderr(Stdio::null())
            .stdout(Stdio::null());
        let mut train = command.spawn().unwrap();
        let mut processes = Vec::new();
        eventually(|| {
            processes = children(train.id());
            processes.len() == 5 && dir.path().join("metrics.jsonl").exists()
        });
        if kill {
            // The process cannot tell its children that it ends, so they must notice it by themselves.
            train.kill().unwrap();
        } else {
            terminate(train.id());
        }
        let status = train.wait().unwrap();
        assert!(!status.success());
        eventually(|| processes.iter().all(|process| !exists(*process)));
    }
}

#[test]
fn a_run_directory_in_which_a_coordinator_is_at_work_is_left_alone() {
    let cluster = Cluster::start(program(), "[checkpoint]\nenabled = false\n", 1);
    let dir = cluster.run_dir();
    let refused = program().run(&["train", "--run-dir", dir.to_str().unwrap()]);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(1), "{said}");
    assert!(said.contains("another coordinator is at work"), "{said}");
    assert!(dir.join("coordinator.state").exists());
}

#[test]
fn a_child_that_dies_is_named_with_its_last_words() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = program().command(&["train", "--model", "odd", "--run-dir"]);
    let output = command
        .arg(dir.path())
        .env("TEST_PANIC_AT", "3")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{said}");
    assert!(
        said.contains("worker-") && said.contains("told to panic at step 3"),
        "{said}"
    );
}

#[test]
fn a_nan_ends_the_job_and_names_the_variable() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = program().command(&["train", "--model", "odd", "--run-dir"]);
    let output = command
        .arg(dir.path())
        .env("TEST_NAN_AT", "5")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{said}");
    assert!(
        said.contains("\"line.bias\"") && said.contains("NaN"),
        "{said}"
    );
}

#[test]
fn daemons_by_hand_serve_metrics_and_stay_when_told_to() {
    let job = "epochs = 30\n[optimizer]\nname = \"sgd\"\n[model]\nname = \"odd\"\n[strategy]\nwire = \"bf16\"\n[cluster]\nworkers = 2\nps = 2";
    let mut cluster = Cluster::start_with(program(), job, 2, &["--after-job", "wait"]);
    for _ in 0..2 {
        cluster.add_worker(&[("FLAMBEAU_AFTER_JOB", "wait")]);
    }
    eventually(|| cluster.status()["phase"] == "done");
    let status = cluster.status();
    assert_eq!(status["tasks"].as_array().unwrap().len(), 4, "{status}");
    assert_eq!(status["shards"][0]["blocks"], 1, "{status}");
    assert_eq!(status["samples"], 30 * 1437);
    // A number has two bytes on the wire, and four bytes on a server with SGD.
    let shard = &status["shards"][0];
    let [held, updates] = ["bytes", "updates"].map(|key| shard[key].as_u64().unwrap());
    let received = format!("flambeau_ps_received_bytes_total {}", held / 2 * updates);
    let metrics = cluster.ps[0].http("/metrics");
    assert!(
        metrics.contains(&received),
        "{received} is not in {metrics}"
    );

    // The job is over before its end is counted.
    let ended = "flambeau_coordinator_jobs_ended_total{outcome=\"done\"} 1";
    eventually(|| cluster.coordinator.http("/metrics").contains(ended));

    let documented = include_str!("../../docs/metrics.md");
    let expected: [(&Daemon, &[&str]); 3] = [
        (
            &cluster.coordinator,
            &[
                "flambeau_coordinator_live_tasks",
                "flambeau_coordinator_min_clock_steps",
                "flambeau_coordinator_jobs_waiting 0",
                ended,
            ],
        ),
        (
            &cluster.ps[0],
            &[
                "flambeau_ps_pushes_total",
                "flambeau_ps_pulls_total",
                "flambeau_ps_received_bytes_total",
                "flambeau_ps_sent_bytes_total",
                "flambeau_ps_apply_seconds_bucket",
                "flambeau_ps_pull_wait_seconds_bucket",
                "flambeau_ps_gradient_staleness_updates_bucket",
                "flambeau_ps_clock_lead_steps_bucket",
                "flambeau_ps_live_workers",
                "flambeau_ps_blocks",
                "flambeau_ps_held_bytes",
            ],
        ),
        (
            &cluster.workers[0],
            &[
                "flambeau_worker_loss",
                "flambeau_worker_samples_per_second",
                "flambeau_worker_steps_total",
            ],
        ),
    ];
    for (daemon, names) in expected {
        assert!(daemon.http("/healthz").contains("200 OK"));
        assert!(daemon.http("/readyz").contains("200 OK"));
        let metrics = daemon.http("/metrics");
        for name in names {
            assert!(metrics.contains(name), "{name} is not in {metrics}");
        }
        for line in metrics
            .lines()
            .filter_map(|line| line.strip_prefix("# TYPE "))
        {
            let name = line.split(' ').next().unwrap();
            assert!(
                documented.contains(name),
                "{name} is not in docs/metrics.md"
            );
        }
    }
    let everybody = || {
        std::iter::once(&cluster.coordinator)
            .chain(&cluster.ps)
            .chain(&cluster.workers)
    };
    everybody().for_each(Daemon::terminate);
    let (summary, _dir) = cluster.finish();
    assert!(
        summary["test_accuracy"].as_f64().unwrap() > 0.9,
        "{summary}"
    );
}

#[test]
fn with_json_each_line_is_an_object() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    let arguments = [
        "train",
        "--epochs",
        "2",
        "--quiet",
        "--run-dir",
        run.to_str().unwrap(),
    ];
    let mut command = program().command(&arguments);
    let output = command.env("FLAMBEAU_LOG_FORMAT", "json").output().unwrap();
    assert!(output.status.success(), "{output:?}");
    for log in std::fs::read_dir(run.join("logs")).unwrap() {
        let text = std::fs::read_to_string(log.unwrap().path()).unwrap();
        assert!(!text.is_empty());
        for line in text.lines() {
            let object: Value = serde_json::from_str(line).unwrap();
            assert!(object["message"].is_string(), "{line}");
            assert!(object["timestamp"].is_string(), "{line}");
            assert!(object["level"].is_string(), "{line}");
        }
    }

    // Invalid settings have the same effect.
    let wrong = [
        "coordinator",
        "--log",
        "info=loud",
        "--listen",
        "127.0.0.1:0",
    ];
    let mut command = program().command(&wrong);
    let output = command.env("FLAMBEAU_LOG_FORMAT", "json").output().unwrap();
    let line = String::from_utf8(output.stderr).unwrap();
    let object: Value = serde_json::from_str(&line).unwrap();
    assert_eq!(object["level"], "ERROR", "{line}");
    assert!(object["timestamp"].is_string(), "{line}");
    assert!(
        object["message"].as_str().unwrap().contains("--log"),
        "{line}"
    );
}

#[test]
fn a_daemon_that_does_not_know_what_to_log_says_so() {
    let arguments = ["coordinator", "--log", "info,ps_server=loud"];
    let output = program().command(&arguments).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("ps_server=loud"), "{said}");
}

#[test]
fn training_steps_of_models_are_measured() {
    let arguments = ["bench", "models", "mlp", "transformer", "--seconds", "0.1"];
    let output = program().run(&[&arguments[..], &["--threads", "2", "--json"]].concat());
    assert!(output.status.success(), "{output:?}");
    let measured: Value = serde_json::from_slice(&output.stdout).unwrap();
    let rows = measured["rows"].as_array().unwrap();
    for (row, model) in rows.iter().zip(["mlp", "transformer"]) {
        assert_eq!((&row["model"], &row["threads"]), (&model.into(), &2.into()));
        assert!(row["samples_per_second"].as_f64().unwrap() > 0.0, "{row}");
    }
    assert_eq!(rows.len(), 2);
    let output = program().run(&["bench", "models", "resnet21"]);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(
        error.contains("resnet20") && !output.status.success(),
        "{error}"
    );
}
