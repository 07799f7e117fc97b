//! MNIST and Fashion-MNIST: IDX files, whole, damaged and missing.

use super::*;

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
        assert_eq!(fields(&dataset), (vec![1, 2, 2], Some(10)));
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
        assert_eq!(fields(&dataset), (vec![1, 28, 28], Some(10)));
        assert_eq!(counts(&labels(&mut dataset.training)), training);
        assert_eq!(counts(&labels(&mut dataset.evaluation)), evaluation);
        let (features, _) = all(&mut dataset.evaluation);
        assert!(features.contains(&1.0) && features.iter().all(|v| (0.0..=1.0).contains(v)));
    }
}
