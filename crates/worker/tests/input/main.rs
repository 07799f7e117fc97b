//! Data sets: the samples that are read, and the errors of files that are refused.

#![allow(clippy::unwrap_used)]

mod cifar;
mod columns;
mod criteo;
mod csv;
mod docs;
mod forms;
mod idx;
mod images;
mod labels;
mod libsvm;
mod npy;
mod parquet;
mod streams;

use model::Batch;
use std::io::Write;
use std::path::{Path, PathBuf};

use candle_core::Device;
use flate2::Compression;
use flate2::write::GzEncoder;
use model::input::{Column, Dataset, InMemory, InputError, Order, Purpose, Samples};
use model::registry::Registry;
use shared_proto::job::{Data, Job};
use tempfile::TempDir;

fn load(data: &Data, seed: u64) -> Result<Dataset, InputError> {
    Registry::builtin().open(data, seed, Purpose::Training)
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
    let batch = Batch::of_samples(samples.read(Order::Stored, all).unwrap(), &Device::Cpu).unwrap();
    let features = batch.input().unwrap().flatten_all().unwrap();
    let labels = batch.target().unwrap().to_vec1().unwrap();
    (features.to_vec1().unwrap(), labels)
}

/// The shape of the input, and the number of classes.
fn fields(dataset: &Dataset) -> (Vec<usize>, Option<u64>) {
    let signature = &dataset.signature;
    let shape = signature.input().unwrap().shape.clone();
    (shape, signature.target().unwrap().categories)
}

/// Samples of one number each.
fn numbers(values: Vec<f32>, labels: Vec<u32>) -> InMemory {
    let numbers = Column::numbers("x", vec![1], values);
    InMemory::new(vec![numbers], vec![Column::category("y", labels, 10)]).unwrap()
}

fn counts(labels: &[u32]) -> Vec<usize> {
    (0..10)
        .map(|class| labels.iter().filter(|l| **l == class).count())
        .collect()
}

/// The folder of the real data sets: `FLAMBEAU_TEST_DATA`, or `shared/data` beside the repository.
fn real(name: &str) -> Option<PathBuf> {
    let beside = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data");
    let folder = std::env::var_os("FLAMBEAU_TEST_DATA").map_or_else(beside, PathBuf::from);
    let folder = folder.join(name);
    if folder.is_dir() {
        return Some(folder);
    }
    // Past the capture of the test's output.
    let _ = writeln!(
        std::io::stderr(),
        "SKIPPED: {} is not there; let FLAMBEAU_TEST_DATA name a folder that has it",
        folder.display()
    );
    None
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
    assert_eq!(fields(&digits), (vec![1, 8, 8], Some(10)));

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
    let inputs = Column::numbers("x", vec![2, 2], features.clone());
    let labels = Column::category("y", vec![7, 0, 9], 10);
    let samples = InMemory::new(vec![inputs], vec![labels]).unwrap();
    let batch = Batch::of_samples(samples.select(&[2, 1, 2]).unwrap(), &Device::Cpu).unwrap();
    let inputs = batch.input().unwrap();
    assert_eq!(inputs.dims(), [3, 2, 2]);
    let found: Vec<f32> = inputs.flatten_all().unwrap().to_vec1().unwrap();
    let sample = |i: usize| &features[i * 4..][..4];
    assert_eq!(found, [sample(2), sample(1), sample(2)].concat());
    let targets: Vec<u32> = batch.target().unwrap().to_vec1().unwrap();
    assert_eq!(targets, [9, 0, 9]);

    let error = samples.select(&[0, 3]).unwrap_err();
    assert_says(&error.to_string(), &["no sample 3"]);
    assert!(samples.select(&[]).is_err());
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
        kind: "arrow".to_owned(),
        ..Data::default()
    };
    let error = load(&unknown, 1).unwrap_err().to_string();
    assert_says(
        &error,
        &[
            "\"arrow\"",
            "cifar10, clicks, criteo, csv, digits, fashion-mnist, image-folder, libsvm, mnist, npy, parquet, random",
        ],
    );
}

#[test]
fn settings_that_a_source_does_not_take_are_refused_with_those_it_takes() {
    for (kind, options, parts) in [
        (
            "digits",
            "width = 3",
            ["`data.options.width`", "\"digits\"", "takes none"],
        ),
        (
            "mnist",
            "most = 3",
            ["`data.options.most`", "\"mnist\"", "takes none"],
        ),
        (
            "cifar10",
            "most = 3",
            ["`data.options.most`", "\"cifar10\"", "takes none"],
        ),
        (
            "random",
            "count = 3",
            ["`data.options.count`", "\"random\"", "takes samples, size"],
        ),
        (
            "csv",
            "delimiter = ';'",
            ["`data.options.delimiter`", "\"csv\"", "takes none"],
        ),
        (
            "npy",
            "max = 3",
            ["`data.options.max`", "\"npy\"", "takes most"],
        ),
        (
            "criteo",
            "bucket = 3",
            ["bucket`", "\"criteo\"", "train, test, buckets"],
        ),
        (
            "libsvm",
            "widht = 3",
            ["widht`", "\"libsvm\"", "train, test, width, sparse"],
        ),
        ("libsvm", "train = 3", ["train`", "is 3", "text in quotes"]),
        ("libsvm", "sparse = 1", ["sparse`", "is 1", "true or false"]),
        ("npy", "most = 1.5", ["most`", "is 1.5", "whole number"]),
        ("npy", "most = -1", ["most`", "is -1", "at least 0"]),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let file = match kind {
            "libsvm" => "1 1:2\n0 1:1\n",
            _ => "",
        };
        std::fs::write(folder.path().join("a.npy"), file).unwrap();
        let mut data = data(kind, folder.path());
        data.options = options.parse().unwrap();
        assert_says(&load(&data, 1).unwrap_err().to_string(), &parts);
    }
}

#[test]
fn the_digest_tells_data_sets_apart_as_the_protocol_says() {
    use sha2::{Digest, Sha256};
    let samples = |value: f32, label| numbers(vec![value], vec![label]);
    let digest = |value, label| {
        let data = Dataset::in_memory(samples(value, label), samples(2.0, 1)).unwrap();
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
    let samples = |count: usize| numbers(vec![0.0; count], vec![0; count]);
    let others = Column::numbers("x", vec![2], vec![0.0; 2]);
    let others = InMemory::new(vec![others], vec![Column::category("y", vec![0], 10)]);
    for (training, evaluation, said) in [
        (samples(0), samples(1), "no sample to train on"),
        (samples(1), samples(0), "no sample held out"),
        (samples(1), others.unwrap(), "\"x\" of f32 and shape [2]"),
    ] {
        let error = Dataset::in_memory(training, evaluation).err().unwrap();
        assert_says(&error.to_string(), &[said]);
    }
}

#[test]
fn the_noise_has_the_sizes_that_are_asked_for() {
    let open = |options: &str| {
        let data = format!("[data]\nkind = \"random\"\n[data.options]\n{options}");
        let job = Job::from_toml(&data).unwrap();
        Registry::builtin().open(&job.data, job.seed, Purpose::Training)
    };
    let data = open("samples = 40\nsize = 6\nchannels = 3\nclasses = 4").unwrap();
    assert_eq!((data.training.count(), data.evaluation.count()), (40, 40));
    assert_eq!(data.signature.inputs[0].shape, [3, 6, 6]);
    for (options, problem) in [
        ("size = 0", "`data.options.size` is 0"),
        ("size = 4294967296", "bytes are possible"),
        ("samples = 68719476736\nsize = 1", "bytes are possible"),
        (
            "classes = 4294967296",
            "`data.options.classes` is 4294967296",
        ),
    ] {
        let error = open(options).err().unwrap().to_string();
        assert!(error.contains(problem), "{options}: {error}");
    }
}
