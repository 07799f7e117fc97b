//! Data sets: the samples that are read, and the errors of files that are refused.

#![allow(clippy::unwrap_used)]

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

fn idx(sizes: &[u32], values: &[u8]) -> Vec<u8> {
    let mut file = vec![0, 0, 8, sizes.len() as u8];
    file.extend(sizes.iter().flat_map(|s| s.to_be_bytes()));
    file.extend_from_slice(values);
    file
}

fn gzip(content: &[u8]) -> Vec<u8> {
    let mut gz = GzEncoder::new(Vec::new(), Compression::fast());
    gz.write_all(content).unwrap();
    gz.finish().unwrap()
}

/// Three pictures of 2x2 to learn from, and one held out.
fn small_mnist() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let pixels: Vec<u8> = (0..12).map(|i| i * 20).collect();
    for (name, content) in PARTS.into_iter().zip([
        idx(&[3, 2, 2], &pixels),
        idx(&[3], &[7, 0, 9]),
        idx(&[1, 2, 2], &[255; 4]),
        idx(&[1], &[1]),
    ]) {
        std::fs::write(folder.path().join(name), content).unwrap();
    }
    folder
}

fn load_idx(folder: &Path) -> Result<Dataset, String> {
    load(&data("mnist", folder), 1).map_err(|error| error.to_string())
}

#[test]
fn idx_files_are_read_compressed_or_not() {
    let folder = small_mnist();
    let plain = load_idx(folder.path()).unwrap();
    for name in &PARTS[..2] {
        let path = folder.path().join(name);
        let content = std::fs::read(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        std::fs::write(folder.path().join(format!("{name}.gz")), gzip(&content)).unwrap();
    }
    for mut dataset in [plain, load_idx(folder.path()).unwrap()] {
        assert_eq!(
            (dataset.sample_shape.as_slice(), dataset.classes),
            ([1, 2, 2].as_slice(), 10)
        );
        let (features, labels) = all(&mut dataset.training);
        assert_eq!(labels, [7, 0, 9]);
        assert_eq!(features[11], 220.0 / 255.0);
        assert_eq!(all(&mut dataset.evaluation), (vec![1.0; 4], vec![1]));
    }
}

#[test]
fn damaged_idx_files_are_refused() {
    let [images, labels, test_images, _] = PARTS;
    let pixels = [1; 12];
    let good = idx(&[3, 2, 2], &pixels);
    let compressed = gzip(&good);
    let mut flipped = compressed.clone();
    let end = flipped.len();
    flipped[end - 6] ^= 1; // in the checksum
    let trailing = [&compressed[..], b"more"].concat();
    for (name, content, parts) in [
        (
            images,
            idx(&[3], &[1, 2, 3]),
            ["byte 0", "0x00000801", "0x00000803"],
        ),
        (
            images,
            good[..27].to_vec(),
            ["byte 27", "after 11 of the 12", "get it again"],
        ),
        (
            images,
            good[..9].to_vec(),
            ["byte 9", "header of 16 bytes", "get it again"],
        ),
        (
            images,
            Vec::new(),
            ["byte 0", "header of 16 bytes", "get it again"],
        ),
        (
            images,
            [&good[..], &[0]].concat(),
            ["byte 28", "goes on", "12 elements"],
        ),
        (
            images,
            idx(&[u32::MAX; 3], &pixels),
            ["byte 4", "4294967295", "larger than any file"],
        ),
        (
            images,
            idx(&[u32::MAX, 1000, 1000], &pixels),
            [
                "byte 28",
                "after 12 of the 4294967295000000",
                "get it again",
            ],
        ),
        (
            images,
            idx(&[3, 0, 2], &[]),
            ["byte 8", "size of 0", "at least 1"],
        ),
        (
            labels,
            idx(&[2], &[1, 2]),
            ["byte 4", "2 labels", "3 pictures"],
        ),
        (
            labels,
            idx(&[3], &[1, 10, 2]),
            ["byte 9", "label 10", "0 to 9"],
        ),
        (
            test_images,
            idx(&[1, 1, 1], &[0]),
            ["byte 8", "[1, 1, 1]", "[1, 2, 2]"],
        ),
        (
            "train-images-idx3-ubyte.gz",
            flipped,
            ["byte 28", "reading failed", "get it again"],
        ),
        (
            "train-images-idx3-ubyte.gz",
            trailing,
            ["byte 28", "reading failed", "get it again"],
        ),
        (
            "train-images-idx3-ubyte.gz",
            compressed[..end - 9].to_vec(),
            ["byte", "reading failed", "get it again"],
        ),
        (
            "train-images-idx3-ubyte.gz",
            b"no gzip at all".to_vec(),
            ["byte 0", "reading failed", "get it again"],
        ),
    ] {
        let folder = small_mnist();
        let _ = std::fs::remove_file(folder.path().join(name.trim_end_matches(".gz")));
        std::fs::write(folder.path().join(name), content).unwrap();
        let error = load_idx(folder.path()).unwrap_err();
        assert_says(&error, &[name]);
        assert_says(&error, &parts);
    }
}

#[test]
fn missing_files_are_named() {
    let folder = small_mnist();
    std::fs::remove_file(folder.path().join(PARTS[3])).unwrap();
    let error = load_idx(folder.path()).unwrap_err();
    let names = "t10k-labels-idx1-ubyte or t10k-labels-idx1-ubyte.gz";
    assert_says(&error, &[names, &folder.path().display().to_string()]);

    let error = load(&data("csv", folder.path()), 1).unwrap_err();
    assert_says(&error.to_string(), &["train.csv"]);
    let nowhere = Data {
        dir: None,
        ..data("csv", folder.path())
    };
    assert_says(&load(&nowhere, 1).unwrap_err().to_string(), &["data.dir"]);
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
        "SKIPPED: {} is not there; let FLAMBEAU_TEST_DATA name a folder with mnist/ and fashion-mnist/ in it",
        folder.display()
    );
    None
}

#[test]
fn mnist_and_fashion_mnist_are_read() {
    let mnist = (
        [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
        [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009],
    );
    for (name, kind, (training, evaluation)) in [
        ("mnist", "mnist", mnist),
        ("fashion-mnist", "fashion-mnist", ([6000; 10], [1000; 10])),
    ] {
        let Some(folder) = real(name) else { continue };
        let mut dataset = load(&data(kind, &folder), 1).unwrap();
        assert_eq!(
            (dataset.sample_shape.as_slice(), dataset.classes),
            ([1, 28, 28].as_slice(), 10)
        );
        assert_eq!(counts(&labels(&mut dataset.training)), training);
        assert_eq!(counts(&labels(&mut dataset.evaluation)), evaluation);
        let (features, _) = all(&mut dataset.evaluation);
        assert!(features.contains(&1.0) && features.iter().all(|v| (0.0..=1.0).contains(v)));
    }
}

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

fn load_csv(files: &[(&str, &str)], seed: u64) -> Result<Dataset, String> {
    let folder = tempfile::tempdir().unwrap();
    for (name, content) in files {
        std::fs::write(folder.path().join(name), content).unwrap();
    }
    // A single file is named itself.
    let place = match files {
        [(name, _)] if *name != "train.csv" => folder.path().join(name),
        _ => folder.path().to_owned(),
    };
    load(&data("csv", &place), seed).map_err(|error| error.to_string())
}

#[test]
fn csv_columns_are_standardised_by_the_training_part() {
    let train = "x, label ,constant,y\n1,0,5,-1\n3, 2 ,5,1\n";
    let test = "x,label,constant,y\n\n5,2,6,0\n";
    let mut dataset = load_csv(&[("train.csv", train), ("test.csv", test)], 1).unwrap();
    assert_eq!(
        (dataset.sample_shape.as_slice(), dataset.classes),
        ([3].as_slice(), 3)
    );
    let expected = (vec![-1.0, 0.0, -1.0, 1.0, 0.0, 1.0], vec![0, 2]);
    assert_eq!(all(&mut dataset.training), expected);
    assert_eq!(all(&mut dataset.evaluation), (vec![3.0, 1.0, 0.0], vec![2]));
}

#[test]
fn names_are_classes_in_sorted_order() {
    let train = "label,x\ncat,1\nant,2\n\"bee, big\",3\nant,4\n";
    let mut dataset =
        load_csv(&[("train.csv", train), ("test.csv", "label,x\ncat,1\n")], 1).unwrap();
    assert_eq!(
        (labels(&mut dataset.training), dataset.classes),
        (vec![2, 0, 1, 0], 3)
    );
    assert_eq!(labels(&mut dataset.evaluation), [2]);
}

#[test]
fn a_share_is_held_out_where_there_is_no_test_file() {
    let rows: String = (0..10).map(|i| format!("{i},{i}\n")).collect();
    let content = format!("x,label\n{rows}");
    let mut seen = std::collections::BTreeSet::new();
    for seed in 0..10 {
        let mut single = load_csv(&[("any.csv", &content)], seed).unwrap();
        let mut folder = load_csv(&[("train.csv", &content)], seed).unwrap();
        assert_eq!(all(&mut single.training), all(&mut folder.training));
        assert_eq!((single.training.count(), single.evaluation.count()), (8, 2));
        let mut both = [labels(&mut single.training), labels(&mut single.evaluation)].concat();
        both.sort_unstable();
        assert!(both.into_iter().eq(0..10));
        seen.insert(labels(&mut single.evaluation));
    }
    assert!(seen.len() > 3, "the seed does not decide: {seen:?}");
}

#[test]
fn bad_csv_files_are_refused() {
    let good = "x,y,label\n1,2,0\n3,4,1\n";
    for (train, test, parts) in [
        ("", "", ["train.csv", "line 1", "empty"]),
        ("x,y,label\n", "", ["train.csv", "line 1", "no sample"]),
        (
            "x,y,label\n1,2,0\n",
            "",
            ["train.csv", "line 2", "single sample"],
        ),
        (
            "x,y,class\n1,2,0\n",
            "",
            ["line 1", "\"label\"", "[\"x\", \"y\", \"class\"]"],
        ),
        ("x,x,label\n1,2,0\n", "", ["line 1", "\"x\"", "two columns"]),
        ("label\n1\n", "", ["line 1", "\"label\"", "only column"]),
        (
            "x,y,label\n1,2,0\n3,four,1\n",
            "",
            ["line 3", "\"y\"", "\"four\""],
        ),
        ("x,y,label\n1,,0\n3,4,1\n", "", ["line 2", "\"y\"", "\"\""]),
        (
            "x,y,label\n1,NaN,0\n3,4,1\n",
            "",
            ["line 2", "\"y\"", "\"NaN\""],
        ),
        (
            "x,y,label\n-inf,2,0\n3,4,1\n",
            "",
            ["line 2", "\"x\"", "\"-inf\""],
        ),
        (
            "x,y,label\n1e39,2,0\n3,4,1\n",
            "",
            ["line 2", "\"x\"", "\"1e39\""],
        ),
        (
            "x,y,label\n1,2,0\n\n3,4\n",
            "",
            ["line 4", "2 fields", "3 expected"],
        ),
        (
            "x,y,label\n1,2,0,0\n",
            "",
            ["line 2", "4 fields", "3 expected"],
        ),
        (
            "x,y,label\n1,2,\n3,4,1\n",
            "",
            ["line 2", "\"label\"", "empty"],
        ),
        (
            "x,y,label\n1,2,4000000000\n",
            "",
            ["line 2", "4000000000", "65536"],
        ),
        (
            good,
            "x,y,label\n1,2,1\n1,2,2\n",
            ["test.csv, line 3", "\"2\"", "training"],
        ),
        (
            good,
            "y,x,label\n1,2,1\n",
            ["test.csv, line 1", "[\"y\", \"x\"]", "[\"x\", \"y\"]"],
        ),
    ] {
        let mut files = vec![("train.csv", train)];
        if !test.is_empty() {
            files.push(("test.csv", test));
        }
        assert_says(&load_csv(&files, 1).unwrap_err(), &parts);
    }
}

#[test]
fn text_that_is_not_unicode_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("train.csv"), b"x,label\n1,a\n2,\xff\n").unwrap();
    let error = load(&data("csv", folder.path()), 1).unwrap_err();
    assert_says(&error.to_string(), &["train.csv", "line 3"]);
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
