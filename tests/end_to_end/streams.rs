//! Data that stays in its files or in an object store while a job trains.

use std::fmt::Write;
use std::path::Path;

use safetensors::SafeTensors;
use serde_json::Value;
use storage::testing::Moto;
use tests::{Cluster, eventually};

use crate::program;

const SAMPLES: usize = 1500;
const EPOCHS: f32 = 3.0;

/// A line for each sample, with a class of its own, and text that makes the file larger than a window.
fn visits() -> String {
    let mut text = "x,class,note\n".to_owned();
    for i in 0..SAMPLES {
        writeln!(text, "{i},{i},{}", "-".repeat(2000)).unwrap();
    }
    text
}

fn job(data: &Path) -> String {
    format!(
        r#"
name = "visits"
epochs = {EPOCHS}
batch_size = 1
[data]
kind = "csv"
dir = "{}"
label = "class"
target = "class"
stream = true
shuffle_mebibytes = 1
columns = {{ note = {{ type = "ignore" }} }}
[model]
name = "visits"
[optimizer]
name = "sgd"
learning_rate = 1.0
[strategy]
mode = "bounded"
# The weights count the pushes.
correction = {{ enabled = false }}
staleness = 2
[cluster]
ps = 2
workers = 2
lease_seconds = 2.0
"#,
        data.display()
    )
}

#[test]
fn workers_that_are_killed_lose_no_streamed_sample() {
    let files = tempfile::tempdir().unwrap();
    let data = files.path().join("visits.csv");
    std::fs::write(&data, visits()).unwrap();
    let mut cluster = Cluster::start(program(), &job(&data), 2);
    for _ in 0..2 {
        cluster.add_worker(&[("TEST_STEP_MILLISECONDS", "2")]);
    }
    let mut killed = 0.0;
    for samples in [600, 1500, 2500] {
        eventually(|| cluster.status()["samples"].as_u64().unwrap() > samples);
        cluster.workers[0].kill();
        let slow = [("TEST_STEP_MILLISECONDS", "2")];
        cluster.workers[0] = cluster.member("worker", &format!("after-{samples}"), &[], &slow);
        killed += 1.0;
    }
    let (summary, dir) = cluster.finish();
    let model = std::fs::read(dir.path().join("run/model.safetensors")).unwrap();
    let model = SafeTensors::deserialize(&model).unwrap();
    let visits: Vec<f32> = model.tensors()[0]
        .1
        .data()
        .chunks_exact(4)
        .map(|value| f32::from_le_bytes(value.try_into().unwrap()))
        .collect();
    assert_eq!(visits.len(), SAMPLES);
    // Each sample to train on is visited in each pass, and again only if a worker was killed before it reported a step.
    let (held_out, trained): (Vec<f32>, Vec<f32>) = visits.iter().partition(|n| **n == 0.0);
    let share = SAMPLES / 5;
    assert!(
        held_out.len().abs_diff(share) < share / 5,
        "{}",
        held_out.len()
    );
    assert!(trained.iter().all(|n| *n >= EPOCHS), "{visits:?}");
    let again: f32 = trained.iter().map(|n| n - EPOCHS).sum();
    assert!(again <= 3.0 * killed, "{again} visits again: {summary}");
    assert_eq!(
        summary["samples"].as_f64(),
        Some(trained.len() as f64 * f64::from(EPOCHS))
    );
}

/// A line for each point of a square, with the side of its diagonal.
fn points() -> String {
    let mut text = "x,y,label\n".to_owned();
    for i in 0..400 {
        let (x, y) = (i % 20, i / 20);
        writeln!(text, "{x},{y},{}", u32::from(x + y > 19)).unwrap();
    }
    text
}

#[test]
fn data_in_a_bucket_trains_as_the_same_files_do() {
    let Some(moto) = Moto::start("data") else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let text = points();
    let (header, rows) = text.split_once('\n').unwrap();
    let rows: Vec<&str> = rows.lines().collect();
    for (day, rows) in rows.chunks(150).enumerate() {
        let name = format!("day-{day}.csv");
        let text = format!("{header}\n{}\n", rows.join("\n"));
        assert!(
            moto.request(&format!("PUT /bucket/points/{name}"), &text)
                .contains("200")
        );
        std::fs::write(dir.path().join(name), text).unwrap();
    }
    let train = |place: &str, more: &[&str]| {
        let run = tempfile::tempdir().unwrap();
        let arguments: [&[&str]; 4] = [
            &["train", "--json", "--run-dir", run.path().to_str().unwrap()],
            &["--data", "csv", "--data-dir", place, "--model", "logistic"],
            &["--epochs", "3", "--workers", "1", "--mode", "sync"],
            more,
        ];
        let mut command = program().command(&arguments.concat());
        command.envs(moto.variables()).output().unwrap()
    };
    for more in [&[][..], &["--set", "data.stream=true"]] {
        let metrics = |place: &str| {
            let output = train(place, more);
            let log = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{log}");
            let outcome: Value = serde_json::from_slice(&output.stdout).unwrap();
            outcome["metrics"].clone()
        };
        let local = metrics(dir.path().join("day-*.csv").to_str().unwrap());
        assert_eq!(metrics("s3://bucket/points/day-*.csv"), local);
    }
    for (place, named) in [
        ("s3://bucket/points/night-*.csv", "night-*.csv"),
        ("s3://bucket/nothing.csv", "nothing.csv"),
        ("s3://absent/points.csv", "s3://absent"),
        ("gs://bucket/points.csv", "s3://bucket/folder"),
        (
            "s3://user:hunter2@bucket/x",
            "must not have a user or password",
        ),
    ] {
        let refused = train(place, &[]);
        let said = String::from_utf8_lossy(&refused.stderr);
        assert!(
            !refused.status.success() && said.contains(named),
            "{place}: {said}"
        );
        for secret in ["c3VjaCBhIHNlY3JldCBrZXk", "hunter2"] {
            assert!(!said.contains(secret), "{said}");
        }
    }
}
