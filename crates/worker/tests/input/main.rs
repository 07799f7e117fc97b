//! Data sets: the samples that are read, and the errors of files that are refused.

#![allow(clippy::unwrap_used)]

mod csv;
mod idx;

use std::io::Write;
use std::path::{Path, PathBuf};

use candle_core::Device;
use flate2::Compression;
use flate2::write::GzEncoder;
use shared_proto::job::Data;
use tempfile::TempDir;
use worker::input::{Dataset, InMemory, InputError, Pass, Samples};
use worker::registry::Registry;

fn load(data: &Data, seed: u64) -> Result<Dataset, InputError> {
    Registry::builtin().open(data, seed)
}

fn data(kind: &str, dir: &Path) -> Data {
    Data {
        kind: kind.to_owned(),
        dir: Some(dir.to_owned()),
        ..Data::default()
    }
}

fn labels(samples: &mut Box<dyn Samples>) -> Vec<u32> {
    all(samples).1
}

/// Features and labels of all samples.
fn all(samples: &mut Box<dyn Samples>) -> (Vec<f32>, Vec<u32>) {
    let all = 0..samples.count();
    let batch = samples.read(Pass::Stored, all, &Device::Cpu).unwrap();
    let features = batch.inputs.flatten_all().unwrap().to_vec1().unwrap();
    (features, batch.targets.to_vec1().unwrap())
}

fn counts(labels: &[u32]) -> Vec<usize> {
    (0..10)
        .map(|class| labels.iter().filter(|l| **l == class).count())
        .collect()
}

fn assert_says(error: &str, parts: &[&str]) {
    for part in parts {
        assert!(error.contains(part), "{part:?} is not in: {error}");
    }
}

#[test]
fn digits_are_always_the_same() {
    let mut digits = load(&Data::default(), 1).unwrap();
    assert_eq!(
        (digits.training.count(), digits.evaluation.count()),
        (1437, 360)
    );
    assert_eq!(
        (digits.sample_shape.as_slice(), digits.classes),
        ([1, 8, 8].as_slice(), 10)
    );

    let (features, training) = all(&mut digits.training);
    let (_, evaluation) = all(&mut digits.evaluation);
    assert!(
        features
            .iter()
            .all(|v| (0.0..=1.0).contains(v) && (v * 16.0).fract() == 0.0)
    );
    let sum: Vec<usize> = counts(&training)
        .iter()
        .zip(counts(&evaluation))
        .map(|(a, b)| a + b)
        .collect();
    assert_eq!(sum, [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]);
    assert!(
        counts(&evaluation).iter().all(|n| *n > 20),
        "{evaluation:?}"
    );

    let mut other_seed = load(&Data::default(), 2).unwrap();
    assert_eq!(all(&mut other_seed.training), all(&mut digits.training));
    // A change would make results of different versions incomparable.
    assert_eq!(training[..10], [1, 0, 6, 3, 1, 5, 4, 8, 4, 2]);
}

#[test]
fn a_batch_holds_the_samples_asked_for() {
    let features: Vec<f32> = (0u8..12).map(f32::from).collect();
    let samples = InMemory::floats(vec![2, 2], features.clone(), vec![7, 0, 9]).unwrap();
    let batch = samples.batch(&[2, 1, 2], &Device::Cpu).unwrap();
    assert_eq!(batch.inputs.dims(), [3, 2, 2]);
    let found: Vec<f32> = batch.inputs.flatten_all().unwrap().to_vec1().unwrap();
    let sample = |i: usize| &features[i * 4..][..4];
    assert_eq!(found, [sample(2), sample(1), sample(2)].concat());
    let targets: Vec<u32> = batch.targets.to_vec1().unwrap();
    assert_eq!(targets, [9, 0, 9]);

    let error = samples.batch(&[0, 3], &Device::Cpu).unwrap_err();
    assert_says(&error.to_string(), &["no sample 3"]);
    assert!(samples.batch(&[], &Device::Cpu).is_err());
}

const PARTS: [&str; 4] = [
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
];

#[test]
fn random_pictures_are_the_same_everywhere() {
    let random = |seed| {
        let job = Data {
            kind: "random".to_owned(),
            ..Data::default()
        };
        let mut dataset = load(&job, seed).unwrap();
        assert_eq!(
            (dataset.training.count(), dataset.evaluation.count()),
            (60_000, 1_000)
        );
        assert!(
            labels(&mut dataset.training)
                .iter()
                .all(|label| *label < 10)
        );
        all(&mut dataset.evaluation)
    };
    assert_eq!(random(1), random(1));
    assert_ne!(random(1), random(2));
}

#[test]
fn an_unknown_source_is_refused_with_those_that_exist() {
    let unknown = Data {
        kind: "parquet".to_owned(),
        ..Data::default()
    };
    let error = load(&unknown, 1).unwrap_err().to_string();
    assert_says(
        &error,
        &["\"parquet\"", "csv, digits, fashion-mnist, mnist, random"],
    );
}

#[test]
fn the_digest_tells_data_sets_apart_as_the_protocol_says() {
    use sha2::{Digest, Sha256};
    let samples = |value: f32, label| InMemory::floats(vec![1], vec![value], vec![label]).unwrap();
    let digest = |value, label| {
        let data = Dataset::in_memory(samples(value, label), samples(2.0, 1), 3).unwrap();
        data.digest()
    };
    let mut content = Vec::new();
    for (value, label) in [(1.5f32, 0u32), (2.0, 1)] {
        content.extend(value.to_le_bytes());
        content.extend(label.to_le_bytes());
    }
    assert_eq!(digest(1.5, 0)[..], Sha256::digest(&content)[..]);
    assert_ne!(digest(1.5, 0), digest(1.5, 2));
    assert_ne!(digest(1.5, 0), digest(1.25, 0));
    let random = Data {
        kind: "random".to_owned(),
        ..Data::default()
    };
    assert!(load(&random, 1).unwrap().digest().is_empty());
}

#[test]
fn data_that_no_model_could_learn_is_refused() {
    let samples = |count: usize, label| {
        InMemory::floats(vec![1], vec![0.0; count], vec![label; count]).unwrap()
    };
    for (training, evaluation, classes, said) in [
        (samples(0, 0), samples(1, 0), 2, "no sample to train on"),
        (samples(1, 0), samples(0, 0), 2, "no sample held out"),
        (samples(1, 0), samples(1, 2), 2, "label 2"),
    ] {
        let error = Dataset::in_memory(training, evaluation, classes)
            .err()
            .unwrap();
        assert_says(&error.to_string(), &[said]);
    }
}
