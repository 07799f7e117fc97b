//! Data of several kinds, from its files to predictions.

use std::path::{Path, PathBuf};

use serde_json::Value;
use tests::Program;

use crate::command_line::train;
use crate::{data_set, program};

#[test]
fn mnist_and_fashion_mnist_train_from_their_files() {
    for (data, model) in [("mnist", "mlp"), ("fashion-mnist", "cnn")] {
        let Some(folder) = data_set(data) else {
            continue;
        };
        let dir = tempfile::tempdir().unwrap();
        let folder = folder.to_str().unwrap();
        let arguments = [
            "--data",
            data,
            "--data-dir",
            folder,
            "--model",
            model,
            "--steps",
            "60",
        ];
        let outcome = train(dir.path(), &arguments);
        assert_eq!(outcome["steps"], 60);
        let accuracy = outcome["test_accuracy"].as_f64().unwrap();
        assert!(accuracy > 0.5, "{data} {model}: {accuracy}");
    }
}

/// Trains on points of two colours in a CSV file. The run is in the folder `run`.
fn train_on_points(dir: &Path) -> Value {
    let mut text = "x,y,colour\n".to_owned();
    for i in 0..400 {
        let (x, y) = (
            f64::from(i % 20) / 10.0 - 0.95,
            f64::from(i / 20) / 10.0 - 0.95,
        );
        let colour = if x + y > 0.0 { "red" } else { "blue" };
        text += &format!("{x},{y},{colour}\n");
    }
    std::fs::write(dir.join("train.csv"), text).unwrap();
    let folder = dir.to_str().unwrap();
    let run = dir.join("run");
    let arguments = [
        "--data",
        "csv",
        "--data-dir",
        folder,
        "--label",
        "colour",
        "--epochs",
        "20",
    ];
    train(&run, &arguments)
}

#[test]
fn a_csv_file_trains() {
    let dir = tempfile::tempdir().unwrap();
    let outcome = train_on_points(dir.path());
    let accuracy = outcome["test_accuracy"].as_f64().unwrap();
    assert!(accuracy > 0.9, "{outcome}");
}

#[test]
fn rows_of_a_later_table_are_predicted_with_the_transforms_of_training() {
    let dir = tempfile::tempdir().unwrap();
    train_on_points(dir.path());
    // Points far apart: their own mean and deviation are others than those of training.
    let later = dir.path().join("later.csv");
    std::fs::write(&later, "x,y\n5,4\n0.4,0.3\n-3,1\n8,-7\n").unwrap();
    let run = dir.path().join("run");
    let (run, file) = (run.to_str().unwrap(), later.to_str().unwrap());
    let predicted = program().run(&["predict", run, "--data-dir", file]);
    let text = String::from_utf8(predicted.stdout).unwrap();
    let mut lines = text.lines();
    assert_eq!(lines.next(), Some("prediction,probability"));
    let rows: Vec<(&str, f64)> = lines
        .map(|line| {
            let (label, probability) = line.split_once(',').unwrap();
            (label, probability.parse().unwrap())
        })
        .collect();
    let labels: Vec<&str> = rows.iter().map(|(label, _)| *label).collect();
    assert_eq!(labels, ["red", "red", "blue", "red"]);
    assert!(
        rows.iter().all(|(_, p)| (0.5..=1.0).contains(p)),
        "{rows:?}"
    );

    let table = dir.path().join("predictions.parquet");
    let out = table.to_str().unwrap();
    let written = program().run(&["predict", run, "--data-dir", file, "--out", out]);
    assert!(written.status.success(), "{written:?}");
    let table = std::fs::read(&table).unwrap();
    assert!(table.starts_with(b"PAR1") && table.ends_with(b"PAR1"));

    // Columns are found by their names, and can be copied.
    std::fs::write(&later, "id,y,x\nfar away,4,5\n").unwrap();
    let kept = program().run(&["predict", run, "--data-dir", file, "--keep", "id"]);
    let text = String::from_utf8(kept.stdout).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0], "id,prediction,probability");
    assert!(lines[1].starts_with("far away,red,"), "{text}");

    std::fs::write(&later, "y\n5\n").unwrap();
    let refused = program().run(&["predict", run, "--data-dir", file]);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(
        !refused.status.success() && said.contains("later.csv"),
        "{said}"
    );
    let folder = program().run(&["predict", run]);
    let said = String::from_utf8_lossy(&folder.stderr);
    assert!(said.contains("name the CSV file"), "{said}");

    // Without the transforms, the columns would be fitted again, perhaps to other data.
    std::fs::remove_file(dir.path().join("run/transforms.json")).unwrap();
    for command in ["predict", "eval"] {
        let refused = program().run(&[command, run]);
        let said = String::from_utf8_lossy(&refused.stderr);
        assert!(!refused.status.success(), "{command}");
        assert!(said.contains("there is no transforms.json"), "{said}");
    }
}

#[test]
fn a_data_source_of_ones_own_trains_and_is_evaluated_again() {
    let program = Program(PathBuf::from(env!("CARGO_BIN_EXE_own-data")));
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().to_str().unwrap();
    let output = program.run(&[
        "train",
        "--data",
        "spirals",
        "--hidden",
        "64",
        "--learning-rate",
        "0.01",
        "--quiet",
        "--json",
        "--set",
        "data.options.arms=2",
        "--set",
        "data.prefetch=3",
        "--run-dir",
        run,
    ]);
    assert!(output.status.success(), "{output:?}");
    let trained: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let accuracy = trained["test_accuracy"].as_f64().unwrap();
    assert!(accuracy > 0.9, "{trained}");
    let output = program.run(&["eval", run, "--json"]);
    let again: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(again["test_accuracy"], trained["test_accuracy"]);

    let wrong = program.run(&[
        "train",
        "--data",
        "spirals",
        "--quiet",
        "--set",
        "data.options.arms=1",
    ]);
    let said = String::from_utf8_lossy(&wrong.stderr);
    assert!(said.contains("`data.options.arms`"), "{said}");
}

#[test]
fn damaged_data_is_refused_with_its_file_and_the_job_ends() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("train-images-idx3-ubyte");
    std::fs::write(&file, [0, 0, 8, 3, 0, 0]).unwrap();
    let folder = dir.path().to_str().unwrap();
    let run = dir.path().join("run");
    let run = run.to_str().unwrap();
    let output = program().run(&[
        "train",
        "--data",
        "mnist",
        "--data-dir",
        folder,
        "--run-dir",
        run,
    ]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        !output.status.success() && said.contains("train-images-idx3-ubyte"),
        "{said}"
    );
}

/// Returns MovieLens' ratings, in their archive, if they are there.
fn ratings() -> Option<PathBuf> {
    let folder = data_set("movielens-latest-small")?;
    Some(folder.join("ml-latest-small.zip/ratings.csv"))
}

#[test]
fn two_towers_find_films_for_users() {
    let dir = tempfile::tempdir().unwrap();
    let Some(ratings) = ratings() else {
        return;
    };
    let job = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/jobs/two-tower.toml");
    let arguments = [
        job.to_str().unwrap(),
        "--data-dir",
        ratings.to_str().unwrap(),
        "--epochs=3",
    ];
    let outcome = train(&dir.path().join("run"), &arguments);
    // By chance it is 0.003, and without the correction for frequent films 0.006 after the third epoch.
    let recall = outcome["metrics"]["recall_10"].as_f64().unwrap();
    assert!(recall > 0.015, "{outcome}");
}

#[test]
fn ratings_with_categories_train_a_factorization_machine() {
    let dir = tempfile::tempdir().unwrap();
    let Some(ratings) = ratings() else {
        return;
    };
    let arguments = [
        "--data",
        "csv",
        "--data-dir",
        ratings.to_str().unwrap(),
        "--label",
        "rating",
        "--set",
        "data.target=number",
        "--set",
        "data.columns.userId.type=category",
        "--set",
        "data.columns.movieId.type=category",
        "--set",
        "data.columns.timestamp.type=ignore",
        "--model",
        "factorization-machine",
        "--batch-size",
        "512",
        "--learning-rate",
        "0.01",
        "--epochs",
        "3",
    ];
    let outcome = train(&dir.path().join("run"), &arguments);
    // The mean of all ratings has an error of 1.04.
    let error = outcome["metrics"]["rmse"].as_f64().unwrap();
    assert!(error < 0.95, "{outcome}");
}

#[test]
fn pictures_are_varied_and_normalised() {
    let dir = tempfile::tempdir().unwrap();
    let arguments = [
        "--model",
        "cnn",
        "--epochs",
        "4",
        "--set",
        "data.pictures={ resize = 12, crop = 1, mean = [0.3], deviation = [0.4] }",
    ];
    let outcome = train(dir.path(), &arguments);
    let accuracy = outcome["test_accuracy"].as_f64().unwrap();
    assert!(accuracy > 0.8, "{outcome}");
    let again = program().run(&["eval", "--json", dir.path().to_str().unwrap()]);
    let again: Value = serde_json::from_slice(&again.stdout).unwrap();
    assert_eq!(again["test_loss"], outcome["test_loss"]);
}
