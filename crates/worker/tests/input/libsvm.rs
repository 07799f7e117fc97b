//! LIBSVM files: dense and sparse features, targets, and what is refused.

use model::Batch;
use model::Feature;
use model::input::Fitted;

use super::*;

fn load_files(files: &[(&str, &str)], options: &str) -> Result<Dataset, String> {
    let folder = tempfile::tempdir().unwrap();
    for (name, content) in files {
        std::fs::write(folder.path().join(name), content).unwrap();
    }
    let mut data = data("libsvm", folder.path());
    data.options = options.parse().unwrap();
    load(&data, 1).map_err(|error| error.to_string())
}

fn read(samples: &mut Box<dyn Samples>) -> model::Batch {
    let all = 0..samples.count();
    Batch::of_samples(samples.read(Order::Stored, all).unwrap(), &Device::Cpu).unwrap()
}

#[test]
fn rows_are_dense_and_two_labels_are_binary() {
    // A blank at the end of a line, a bare label, a comment, indices from 1.
    let train = "-1 1:0.5 3:2 \n+1\n\n+1 2:1 # the third\n";
    let mut dataset = load_files(&[("x", train), ("x.t", "-1 2:4\n")], "").unwrap();
    assert_eq!(fields(&dataset), (vec![3], Some(2)));
    let batch = read(&mut dataset.training);
    let rows = batch.input().unwrap().to_vec2::<f32>().unwrap();
    assert_eq!(rows, [[0.5, 0.0, 2.0], [0.0; 3], [0.0, 1.0, 0.0]]);
    let labels = batch.target().unwrap().to_vec1::<f32>().unwrap();
    assert_eq!(labels, [0.0, 1.0, 1.0]);
    let held_out = read(&mut dataset.evaluation);
    assert_eq!(held_out.target().unwrap().to_vec1::<f32>().unwrap(), [0.0]);
    let rows = held_out.input().unwrap().to_vec2::<f32>().unwrap();
    assert_eq!(rows, [[0.0, 4.0, 0.0]]);
}

#[test]
fn a_byte_order_mark_is_no_part_of_the_first_line() {
    let train = "\u{feff}-1 1:0.5\n+1 2:1\n";
    let mut dataset = load_files(&[("x", train), ("x.t", "-1 2:4\n")], "").unwrap();
    let labels = read(&mut dataset.training)
        .target()
        .unwrap()
        .to_vec1::<f32>();
    assert_eq!(labels.unwrap(), [0.0, 1.0]);
    let nothing = load_files(&[("x", "\u{feff}"), ("x.t", "-1 2:4\n")], "").unwrap_err();
    assert!(nothing.contains("there is no sample"), "{nothing}");
}

#[test]
fn wide_samples_are_sparse_and_indices_may_begin_with_zero() {
    let train = "0 0:1 2000:2\n2 7:3\n1\n0 1:1\n0 1:1\n";
    let mut dataset = load_files(&[("x.train", train)], "").unwrap();
    assert_eq!(dataset.training.count() + dataset.evaluation.count(), 5);
    let signature = &dataset.signature;
    assert_eq!(signature.target().unwrap().categories, Some(3));
    let field = signature.input().unwrap();
    assert_eq!((field.ragged, field.categories), (true, Some(2001)));
    let mut found = Vec::new();
    for samples in [&mut dataset.training, &mut dataset.evaluation] {
        let batch = read(samples);
        let Some(Feature::Ragged(features)) = batch.inputs().get("features") else {
            panic!("{batch:?}");
        };
        found.extend(features.values.to_vec1::<u32>().unwrap());
    }
    found.sort_unstable();
    assert_eq!(found, [0, 1, 1, 7, 2000]);
    let dense = load_files(&[("x", "0 0:1\n1 0:2\n")], "width = 2").unwrap();
    assert_eq!(fields(&dense).0, [2]);
}

#[test]
fn what_cannot_be_read_is_named_with_its_line() {
    for (train, test, options, parts) in [
        ("1 1:x\n", "1\n", "", ["line 1", "\"1:x\""]),
        (
            "1 1:2\n1 2:1 2:1\n",
            "1\n",
            "",
            ["line 2", "index 2 comes after"],
        ),
        (
            "1 1:2\n1:3\n",
            "1\n",
            "",
            ["line 2", "where the label belongs"],
        ),
        ("1 1:inf\n", "1\n", "", ["line 1", "finite"]),
        (
            "1 1:2\n0 2:1\n",
            "1 3:1\n",
            "",
            ["x.t, line 1", "data.options.width"],
        ),
        (
            "1 1:2\n0 2:1\n",
            "7\n",
            "",
            ["x.t, line 1", "\"7\" does not occur"],
        ),
        (
            "1 1:2\n0 2:1\n",
            "1\n",
            "width = -1",
            ["width", "whole number"],
        ),
        ("\n", "1\n", "", ["x, line 1", "no sample"]),
        ("1 1\n", "1\n", "", ["line 1", "3:0.5"]),
    ] {
        let error = load_files(&[("x", train), ("x.t", test)], options).unwrap_err();
        assert_says(&error, &parts);
    }
    // The end of line 2 splits a character of two bytes.
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("x"), b"1 1:2\n0 2:1 # \xc3\n\xa9 1:1\n").unwrap();
    std::fs::write(folder.path().join("x.t"), "1\n").unwrap();
    let error = load(&data("libsvm", folder.path()), 1).map_err(|error| error.to_string());
    assert_says(&error.err().unwrap(), &["line 2", "UTF-8"]);
    let error = load_files(&[("a", "1 1:1\n"), ("b", "1 1:1\n")], "").unwrap_err();
    assert_says(&error, &["several files", "data.options.train"]);
    let error = load_files(&[], "").unwrap_err();
    assert_says(&error, &["no file to train on"]);
}

#[test]
fn the_real_a9a_has_its_counts() {
    let Some(folder) = real("a9a") else { return };
    let mut dataset = load(&data("libsvm", &folder), 1).unwrap();
    assert_eq!(
        (dataset.training.count(), dataset.evaluation.count()),
        (32_561, 16_281)
    );
    assert_eq!(fields(&dataset), (vec![123], Some(2)));
    let positives = |samples: &mut Box<dyn Samples>| {
        let batch = read(samples);
        batch
            .target()
            .unwrap()
            .sum_all()
            .unwrap()
            .to_scalar::<f32>()
            .unwrap()
    };
    assert_eq!(positives(&mut dataset.training), 7_841.0);
    assert_eq!(positives(&mut dataset.evaluation), 3_846.0);
}

/// Opens a file for a purpose.
fn open(content: &str, purpose: Purpose) -> Result<Dataset, String> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("x");
    std::fs::write(&file, content).unwrap();
    let opened = Registry::builtin().open(&data("libsvm", &file), 1, purpose);
    opened.map_err(|error| error.to_string())
}

#[test]
fn later_files_are_read_with_the_features_and_labels_of_the_training() {
    let trained = open("3 0:1 2:2\n5 1:1\n7 1:3\n3 0:2\n5 2:1\n", Purpose::Training).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("transforms.json");
    trained.transforms.unwrap().save(&path).unwrap();
    let fitted = Fitted::load(&path).unwrap();
    // Neither file has index 0, and the first one has one label of three.
    let mut evaluated = open("5 1:4\n5 1:4\n", Purpose::Evaluation(&fitted)).unwrap();
    let batch = read(&mut evaluated.evaluation);
    let rows = batch.input().unwrap().to_vec2::<f32>().unwrap();
    assert_eq!(rows, [[0.0, 4.0, 0.0]]);
    assert_eq!(batch.target().unwrap().to_vec1::<u32>().unwrap(), [5]);
    let mut predicted = open("? 1:4\n? 2:6\n", Purpose::Prediction(&fitted)).unwrap();
    let batch = read(&mut predicted.evaluation);
    let rows = batch.input().unwrap().to_vec2::<f32>().unwrap();
    assert_eq!(rows, [[0.0, 4.0, 0.0], [0.0, 0.0, 6.0]]);

    let beyond = open("3 1:4\n3 3:4\n", Purpose::Evaluation(&fitted)).err();
    assert_says(&beyond.unwrap(), &["index 3", "3 features from 0 on"]);
    let unknown = open("4 1:4\n3 1:4\n", Purpose::Evaluation(&fitted)).err();
    assert_says(&unknown.unwrap(), &["\"4\" does not occur"]);
}
