//! Folders of NumPy arrays.

use candle_core::{DType, Tensor};

use super::*;

fn load_arrays(arrays: &[(&str, Tensor)]) -> Result<Dataset, String> {
    let folder = tempfile::tempdir().unwrap();
    for (name, array) in arrays {
        array.write_npy(folder.path().join(name)).unwrap();
    }
    load(&data("npy", folder.path()), 1).map_err(|error| error.to_string())
}

fn bytes(shape: &[usize]) -> Tensor {
    let count = shape.iter().product::<usize>() as u32;
    let values = Tensor::arange(0, count, &Device::Cpu).unwrap();
    let values = (values.to_dtype(DType::F32).unwrap() / 2.0).unwrap();
    values.to_dtype(DType::U8).unwrap().reshape(shape).unwrap()
}

#[test]
fn each_file_is_a_class_and_squares_are_pictures() {
    let arrays = [
        ("dog.npy", bytes(&[5, 784])),
        ("cat.npy", bytes(&[10, 1, 784])),
    ];
    let mut dataset = load_arrays(&arrays).unwrap();
    assert_eq!(fields(&dataset), (vec![1, 28, 28], Some(2)));
    // A fifth of each class is held out. Classes are in the order of the names.
    assert_eq!(counts(&labels(&mut dataset.training))[..2], [8, 4]);
    assert_eq!(counts(&labels(&mut dataset.evaluation))[..2], [2, 1]);
    let (pixels, _) = all(&mut dataset.training);
    assert!(pixels.iter().all(|v| (0.0..=1.0).contains(v)) && pixels.contains(&1.0));

    let numbers = |value: f64| Tensor::full(value as f32, (4, 3), &Device::Cpu).unwrap();
    let arrays = [("a.npy", numbers(1.5)), ("b.npy", numbers(-2.0))];
    assert_eq!(fields(&load_arrays(&arrays).unwrap()), (vec![3], Some(2)));
}

#[test]
fn arrays_that_do_not_fit_are_named() {
    let floats = |shape: &[usize]| bytes(shape).to_dtype(DType::F32).unwrap();
    let nan = (floats(&[3, 2]) * f64::NAN).unwrap();
    for (second, said) in [
        (bytes(&[3, 5]), "shape [5], but samples of the first class"),
        (floats(&[3, 4]), "f32 of shape [4]"),
        (bytes(&[1, 4]), "a single sample"),
        (bytes(&[4, 0]), "no sample is read"),
    ] {
        let error = load_arrays(&[("a.npy", bytes(&[4, 4])), ("b.npy", second)]).unwrap_err();
        assert_says(&error, &["b.npy", said]);
    }
    assert_says(
        &load_arrays(&[("a.npy", nan)]).unwrap_err(),
        &["a.npy", "sample 0 holds NaN"],
    );
    assert_says(&load_arrays(&[]).unwrap_err(), &["*.npy"]);

    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a.npy");
    for (header, said) in [
        (
            "'descr': '|u1', 'fortran_order': False, 'shape': (4611686018427387904,)",
            "damaged",
        ),
        (
            "'descr': '|u1', 'fortran_order': False, 'shape': (4294967296, 4294967296)",
            "damaged",
        ),
        (
            "'descr': '|u1', 'fortran_order': False, 'shape': (0, 4294967296, 4294967296)",
            "no sample is read",
        ),
        (
            "'descr': '|b1', 'fortran_order': False, 'shape': (2,)",
            "of type |b1",
        ),
        (
            "'descr': '|u1', 'fortran_order': True, 'shape': (2,)",
            "Fortran",
        ),
        (
            "'descr': '|u1', 'fortran_order': False, 'shape': (-2,)",
            "no list of sizes",
        ),
        ("'descr': '|u1'", "no type or shape"),
    ] {
        let header = format!("{{{header}}}\n");
        let mut content = b"\x93NUMPY\x01\x00".to_vec();
        content.extend((header.len() as u16).to_le_bytes());
        content.extend(header.as_bytes());
        if !header.contains("(0,") {
            content.extend([7, 8]);
        }
        std::fs::write(&file, content).unwrap();
        let error = load(&data("npy", folder.path()), 1)
            .unwrap_err()
            .to_string();
        assert_says(&error, &["a.npy", said]);
    }
    bytes(&[100, 784]).write_npy(&file).unwrap();
    let whole = std::fs::read(&file).unwrap();
    for end in [0, 5, 40, 1000] {
        std::fs::write(&file, &whole[..end]).unwrap();
        let error = load(&data("npy", folder.path()), 1)
            .unwrap_err()
            .to_string();
        assert_says(&error, &["a.npy", "cannot be read"]);
    }
}
