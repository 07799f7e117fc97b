//! CIFAR-10's binary files.

use super::*;

const RECORD: usize = 3073;

fn load_files(files: &[(&str, Vec<u8>)]) -> Result<Dataset, String> {
    let folder = tempfile::tempdir().unwrap();
    for (name, content) in files {
        std::fs::write(folder.path().join(name), content).unwrap();
    }
    load(&data("cifar10", folder.path()), 1).map_err(|error| error.to_string())
}

fn records(labels: &[u8]) -> Vec<u8> {
    let record = |label: &u8| std::iter::once(*label).chain((1..RECORD).map(|i| (i % 256) as u8));
    labels.iter().flat_map(record).collect()
}

#[test]
fn records_are_a_label_and_three_colours() {
    let files = [
        ("data_batch_2.bin", records(&[3])),
        ("data_batch_1.bin", records(&[9, 0])),
        ("test_batch.bin", records(&[5])),
        ("batches.meta.txt", b"airplane".to_vec()),
    ];
    let mut dataset = load_files(&files).unwrap();
    assert_eq!(fields(&dataset), (vec![3, 32, 32], Some(10)));
    let (pixels, labels) = all(&mut dataset.training);
    assert_eq!(labels, [9, 0, 3]);
    assert_eq!(pixels[..3], [1.0 / 255.0, 2.0 / 255.0, 3.0 / 255.0]);
    assert_eq!(self::labels(&mut dataset.evaluation), [5]);
}

#[test]
fn damaged_records_are_named_with_their_place() {
    let good = records(&[1]);
    for (train, parts) in [
        (good[..3000].to_vec(), ["byte 0", "3000 bytes follow"]),
        ([&good[..], &[1]].concat(), ["byte 3073", "1 bytes follow"]),
        (records(&[1, 10]), ["byte 3073", "label 10"]),
        (Vec::new(), ["byte 0", "0 bytes follow"]),
    ] {
        let files = [
            ("data_batch_1.bin", train),
            ("test_batch.bin", good.clone()),
        ];
        assert_says(&load_files(&files).unwrap_err(), &parts);
    }
    let error = load_files(&[("data_batch_1.bin", good)]).unwrap_err();
    assert_says(&error, &["test_batch*.bin"]);
}

#[test]
fn the_real_part_has_its_counts() {
    let Some(folder) = real("cifar10-subset") else {
        return;
    };
    let mut dataset = load(&data("cifar10", &folder), 1).unwrap();
    let training = [396, 366, 420, 384, 422, 393, 414, 385, 407, 413];
    assert_eq!(counts(&labels(&mut dataset.training)), training);
    let evaluation = [103, 89, 100, 103, 90, 86, 112, 102, 106, 109];
    assert_eq!(counts(&labels(&mut dataset.evaluation)), evaluation);
}
