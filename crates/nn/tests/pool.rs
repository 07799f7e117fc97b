//! Pooling: against finite differences, and against values worked out by hand.

#![allow(clippy::unwrap_used)]

mod gradients;

use candle_core::{DType, Device, Tensor, Var};
use flambeau_nn::{Pool2d, avg_pool2d, backward, global_avg_pool2d, max_pool2d};
use gradients::{Source, check, difference, values};

fn windows() -> Vec<Pool2d> {
    let windows = [
        (2, 2, 0),
        (2, 2, 1),
        (3, 2, 1),
        (3, 1, 1),
        (2, 3, 0),
        (3, 3, 0),
        (1, 1, 0),
        (3, 2, 0),
    ];
    let windows = windows.map(|(kernel, stride, padding)| Pool2d {
        kernel,
        stride,
        padding,
    });
    windows.to_vec()
}

#[test]
fn gradients_agree_with_finite_differences() {
    let mut source = Source::new();
    for windows in windows() {
        for shape in [[2, 3, 6, 4], [1, 2, 5, 7], [1, 1, 3, 3]] {
            let x = source.var(&shape, DType::F64);
            for pool in [max_pool2d, avg_pool2d] {
                let part = source.tensor(pool(&x, &windows).unwrap().dims(), DType::F64);
                check(&format!("{windows:?} {shape:?}"), &[&x], || {
                    (pool(&x, &windows)? * &part)?.sum_all()
                });
            }
            let part = source.tensor(&shape[..2], DType::F64);
            check("global", &[&x], || {
                (global_avg_pool2d(&x)? * &part)?.sum_all()
            });
        }
    }
}

#[test]
fn values_are_those_of_the_windows() {
    let x: Vec<f32> = (0..16).map(|i| (i * 7 % 16) as f32).collect();
    let x = Tensor::from_vec(x, (1, 1, 4, 4), &Device::Cpu).unwrap();
    // 0 7 14 5 / 12 3 10 1 / 8 15 6 13 / 4 11 2 9
    let numbers = |tensor: Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let pairs = Pool2d::new(2);
    assert_eq!(
        numbers(max_pool2d(&x, &pairs).unwrap()),
        [12.0, 14.0, 15.0, 13.0]
    );
    assert_eq!(
        numbers(avg_pool2d(&x, &pairs).unwrap()),
        [5.5, 7.5, 9.5, 7.5]
    );
    let overlapping = Pool2d {
        kernel: 3,
        stride: 2,
        padding: 1,
    };
    assert_eq!(
        numbers(max_pool2d(&x, &overlapping).unwrap()),
        [12.0, 14.0, 15.0, 15.0]
    );
    // Zeros of the border count.
    let means = numbers(avg_pool2d(&x, &overlapping).unwrap());
    assert_eq!(means[0], 22.0 / 9.0);
    assert_eq!(numbers(global_avg_pool2d(&x).unwrap()), [7.5]);
    // One-pixel borders are left out where they do not fill a window.
    let cut = max_pool2d(&x.narrow(2, 0, 3).unwrap(), &pairs).unwrap();
    assert_eq!(numbers(cut), [12.0, 14.0]);
}

#[test]
fn the_first_of_equal_values_has_the_gradient() {
    let windows = |kernel, stride, padding| Pool2d {
        kernel,
        stride,
        padding,
    };
    // The rows, and the columns, of the first pixels of all windows.
    for (windows, firsts) in [
        (windows(2, 2, 0), vec![0, 2]),
        (windows(2, 2, 1), vec![0, 1, 3]),
        (windows(3, 1, 0), vec![0, 1]),
        (windows(3, 2, 1), vec![0, 1]),
    ] {
        let x = Var::ones((1, 1, 4, 4), DType::F32, &Device::Cpu).unwrap();
        let y = max_pool2d(&x, &windows).unwrap();
        assert_eq!(y.dims(), [1, 1, firsts.len(), firsts.len()]);
        let gradients = backward(&y.sum_all().unwrap()).unwrap();
        let gradient = values(gradients.get(&x).unwrap());
        for (place, gradient) in gradient.iter().enumerate() {
            let first = firsts.contains(&(place / 4)) && firsts.contains(&(place % 4));
            assert_eq!(*gradient, f64::from(first), "{windows:?} at {place}");
        }
    }
}

#[test]
fn pictures_of_other_types_are_pooled_alike() {
    let mut source = Source::new();
    for windows in windows() {
        let x = source.tensor(&[2, 2, 5, 7], DType::BF16);
        let (other, x) = (
            Var::from_tensor(&x).unwrap(),
            Var::from_tensor(&x.to_dtype(DType::F32).unwrap()).unwrap(),
        );
        for pool in [max_pool2d, avg_pool2d] {
            let (y, others) = (pool(&x, &windows).unwrap(), pool(&other, &windows).unwrap());
            let error = difference(&others, &y);
            assert!(error < 0.02, "{windows:?}: {error:.1e}");
            let gradient = |x: &Var, y: &Tensor| {
                let gradients = backward(&y.sum_all().unwrap()).unwrap();
                gradients.get(x).unwrap().clone()
            };
            let error = difference(&gradient(&other, &others), &gradient(&x, &y));
            assert!(error < 0.02, "{windows:?}: {error:.1e}");
        }
    }
}

#[test]
fn a_stride_much_larger_than_the_picture_takes_no_memory() {
    let windows = Pool2d {
        kernel: 2,
        stride: usize::MAX,
        padding: 0,
    };
    for dtype in [DType::F32, DType::BF16] {
        let x = Tensor::new(&[[1f32, 2.0], [3.0, 6.0]], &Device::Cpu).unwrap();
        let x = x.reshape((1, 1, 2, 2)).unwrap().to_dtype(dtype).unwrap();
        assert_eq!(values(&max_pool2d(&x, &windows).unwrap()), [6.0]);
        assert_eq!(values(&avg_pool2d(&x, &windows).unwrap()), [3.0]);
    }
}

#[test]
fn no_samples_make_no_results() {
    for dtype in [DType::F32, DType::BF16] {
        let x = Tensor::zeros((0, 3, 5, 5), dtype, &Device::Cpu).unwrap();
        for pool in [max_pool2d, avg_pool2d] {
            assert_eq!(pool(&x, &Pool2d::new(2)).unwrap().dims(), [0, 3, 2, 2]);
        }
        assert_eq!(global_avg_pool2d(&x).unwrap().dims(), [0, 3]);
    }
    let x = Tensor::zeros((2, 3, 0, 5), DType::F32, &Device::Cpu).unwrap();
    let error = global_avg_pool2d(&x).unwrap_err().to_string();
    assert!(error.contains("0 x 5 pixels have no mean"), "{error}");
}

#[test]
fn a_nan_is_the_largest() {
    for at in 0..4 {
        let mut values = [1f32, 2.0, 3.0, 4.0];
        values[at] = f32::NAN;
        let x = Var::from_slice(&values, (1, 1, 2, 2), &Device::Cpu).unwrap();
        for windows in [
            Pool2d::new(2),
            Pool2d {
                kernel: 2,
                stride: 1,
                padding: 0,
            },
        ] {
            let y = max_pool2d(&x, &windows).unwrap();
            assert!(y.sum_all().unwrap().to_scalar::<f32>().unwrap().is_nan());
            let gradients = backward(&y.sum_all().unwrap()).unwrap();
            let gradient = gradients.get(&x).unwrap().flatten_all().unwrap();
            assert_eq!(gradient.to_vec1::<f32>().unwrap()[at], 1.0);
        }
    }
}

#[test]
fn windows_that_do_not_fit_are_an_error() {
    let x = Tensor::zeros((1, 1, 3, 3), DType::F32, &Device::Cpu).unwrap();
    const HALF: usize = usize::MAX / 2 + 1;
    for (kernel, stride, padding) in [
        (4, 1, 0),
        (0, 1, 0),
        (2, 0, 0),
        (2, 2, 2),
        // Twice the padding, and the padded pixels, are beyond the numbers of 64 bits.
        (1, 1, HALF),
        (usize::MAX, 1, HALF - 1),
        // The area of the window is.
        (1 << 40, 1, 1 << 39),
    ] {
        let windows = Pool2d {
            kernel,
            stride,
            padding,
        };
        assert!(max_pool2d(&x, &windows).is_err(), "{windows:?}");
        assert!(avg_pool2d(&x, &windows).is_err(), "{windows:?}");
        let halves = x.to_dtype(DType::BF16).unwrap();
        assert!(max_pool2d(&halves, &windows).is_err(), "{windows:?}");
    }
    let error = max_pool2d(&x, &Pool2d::new(4)).unwrap_err().to_string();
    assert!(error.contains("do not fit 3 pixels"), "{error}");
    assert!(max_pool2d(&x.squeeze(0).unwrap(), &Pool2d::new(2)).is_err());
}
