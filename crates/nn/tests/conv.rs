//! Convolutions: against finite differences, and against candle's own operations.

#![allow(clippy::unwrap_used)]

mod gradients;

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{Conv2dConfig, VarBuilder};
use flambeau_nn::{Conv2d, backward, conv2d, conv2d_relu};
use gradients::{Source, check, difference, values};

#[derive(Clone, Copy, Debug)]
struct Case {
    samples: usize,
    inputs: usize,
    outputs: usize,
    picture: (usize, usize),
    kernel: (usize, usize),
    config: Conv2dConfig,
}

fn case(
    (samples, inputs, outputs): (usize, usize, usize),
    picture: (usize, usize),
    kernel: (usize, usize),
    [padding, stride, dilation, groups]: [usize; 4],
) -> Case {
    let config = Conv2dConfig {
        padding,
        stride,
        dilation,
        groups,
        ..Conv2dConfig::default()
    };
    Case {
        samples,
        inputs,
        outputs,
        picture,
        kernel,
        config,
    }
}

fn cases() -> Vec<Case> {
    vec![
        case((1, 1, 1), (1, 1), (1, 1), [0, 1, 1, 1]),
        case((2, 3, 5), (4, 6), (3, 3), [1, 1, 1, 1]),
        case((2, 2, 9), (5, 4), (3, 2), [0, 1, 1, 1]),
        case((3, 2, 3), (7, 6), (3, 3), [1, 2, 1, 1]),
        case((1, 2, 2), (8, 8), (3, 3), [0, 2, 1, 1]),
        case((2, 1, 2), (9, 7), (5, 4), [2, 3, 1, 1]),
        case((1, 2, 2), (8, 7), (3, 3), [2, 1, 2, 1]),
        case((1, 2, 2), (9, 8), (3, 3), [1, 2, 3, 1]),
        case((1, 1, 2), (4, 4), (2, 2), [3, 1, 1, 1]),
        case((2, 3, 4), (5, 5), (1, 1), [0, 1, 1, 1]),
        case((2, 3, 4), (5, 5), (1, 1), [0, 2, 1, 1]),
        case((2, 3, 4), (5, 6), (1, 1), [1, 3, 1, 1]),
        case((2, 3, 4), (4, 5), (1, 1), [1, 1, 1, 1]),
        case((1, 2, 2), (9, 11), (2, 2), [0, 4, 1, 1]),
        case((1, 2, 2), (9, 11), (2, 3), [1, 4, 2, 1]),
        case((1, 2, 3), (13, 11), (3, 2), [2, 6, 4, 1]),
        case((2, 4, 4), (5, 6), (3, 3), [1, 1, 1, 4]),
        case((2, 3, 6), (6, 5), (3, 3), [1, 2, 1, 3]),
        case((1, 4, 6), (5, 5), (3, 3), [1, 1, 1, 2]),
        case((2, 6, 4), (3, 3), (1, 1), [0, 1, 1, 2]),
        case((1, 2, 1), (3, 40), (3, 3), [1, 1, 1, 1]),
    ]
}

/// Pictures as large as those of a model, too large for finite differences.
fn large() -> Vec<Case> {
    vec![
        case((3, 16, 17), (32, 32), (3, 3), [1, 1, 1, 1]),
        case((5, 24, 40), (16, 16), (3, 3), [1, 2, 1, 1]),
        case((70, 12, 20), (4, 4), (1, 1), [0, 1, 1, 1]),
        case((2, 12, 20), (17, 19), (1, 1), [0, 1, 1, 1]),
        case((5, 30, 30), (14, 14), (3, 3), [1, 1, 1, 30]),
        case((5, 30, 30), (15, 15), (5, 5), [2, 2, 1, 30]),
        case((40, 20, 20), (8, 8), (3, 3), [1, 1, 1, 1]),
    ]
}

impl Case {
    fn tensors(&self, source: &mut Source, dtype: DType) -> (Var, Var, Var, Tensor) {
        let of_group = self.inputs / self.config.groups;
        let ((rows, columns), kernel) = (self.picture, self.kernel);
        let x = source.var(&[self.samples, self.inputs, rows, columns], dtype);
        let w = source.var(&[self.outputs, of_group, kernel.0, kernel.1], dtype);
        let b = source.var(&[self.outputs], dtype);
        let shape = conv2d(&x, &w, None, &self.config).unwrap();
        // Each element of the result has its own part in the loss.
        let part = source.tensor(shape.dims(), dtype);
        (x, w, b, part)
    }
}

#[test]
fn gradients_agree_with_finite_differences() {
    let mut source = Source::new();
    for case in cases() {
        let (x, w, b, part) = case.tensors(&mut source, DType::F64);
        check(&format!("{case:?}"), &[&x, &w], || {
            (conv2d(&x, &w, None, &case.config)? * &part)?.sum_all()
        });
        check(&format!("relu {case:?}"), &[&x, &w, &b], || {
            (conv2d_relu(&x, &w, Some(&b), &case.config)? * &part)?.sum_all()
        });
    }
}

fn candles(x: &Tensor, w: &Tensor, b: &Tensor, config: &Conv2dConfig) -> Tensor {
    let c = config;
    let y = x.conv2d(w, c.padding, c.stride, c.dilation, c.groups);
    let b = b.reshape((1, (), 1, 1)).unwrap();
    y.unwrap().broadcast_add(&b).unwrap()
}

#[test]
fn convolutions_agree_with_candle() {
    let mut source = Source::new();
    for case in cases().into_iter().chain(large()) {
        for dtype in [DType::F32, DType::F64] {
            let most = if dtype == DType::F32 { 2e-5 } else { 1e-13 };
            let (x, w, b, part) = case.tensors(&mut source, dtype);
            let ours = conv2d(&x, &w, Some(&b), &case.config).unwrap();
            let theirs = candles(&x, &w, &b, &case.config);
            let error = difference(&ours, &theirs);
            assert!(error < most, "{case:?}: {error:.1e}");
            let ours = backward(&(ours * &part).unwrap().sum_all().unwrap()).unwrap();
            let theirs = (theirs * &part).unwrap().sum_all().unwrap();
            let Ok(theirs) = theirs.backward() else {
                // candle's fails where a stride leaves more columns over than rows.
                assert!(case.config.stride > 1);
                continue;
            };
            for var in [&x, &w, &b] {
                let error = difference(ours.get(var).unwrap(), theirs.get(var).unwrap());
                assert!(error < most, "{case:?} {:?}: {error:.1e}", var.shape());
            }
        }
    }
}

#[test]
fn the_same_bits_in_each_run() {
    let mut source = Source::new();
    for case in large() {
        let (x, w, b, part) = case.tensors(&mut source, DType::F32);
        let run = || {
            let y = conv2d_relu(&x, &w, Some(&b), &case.config).unwrap();
            let gradients = backward(&(&y * &part).unwrap().sum_all().unwrap()).unwrap();
            let bits = |tensor: &Tensor| {
                let numbers = tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
                numbers.into_iter().map(f32::to_bits).collect::<Vec<_>>()
            };
            let gradients = [&x, &w, &b].map(|var| bits(gradients.get(var).unwrap()));
            (bits(&y), gradients)
        };
        let first = run();
        for _ in 0..3 {
            assert!(run() == first, "{case:?}");
        }
    }
}

#[test]
fn numbers_that_are_not_finite_stay_where_they_are() {
    // A neighbour in memory must not get into a sum by way of a border.
    for bad in [f32::NAN, f32::INFINITY] {
        let mut pixels = vec![1f32; 2 * 5 * 5];
        pixels[12] = bad;
        let x = Tensor::from_vec(pixels, (2, 1, 5, 5), &Device::Cpu).unwrap();
        let w = Var::ones((1, 1, 3, 3), DType::F32, &Device::Cpu).unwrap();
        let config = Conv2dConfig {
            padding: 1,
            ..Conv2dConfig::default()
        };
        let y = conv2d(&x, &w, None, &config).unwrap();
        let y = y.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        for (i, y) in y.iter().enumerate() {
            let near = i < 25 && (1..4).contains(&(i / 5)) && (1..4).contains(&(i % 5));
            assert_eq!(!y.is_finite(), near, "{bad} at {i}");
        }
    }
}

#[test]
fn what_does_not_fit_is_an_error() {
    let mut source = Source::new();
    let mut tensor = |shape: &[usize]| source.tensor(shape, DType::F32);
    let x = tensor(&[1, 4, 5, 5]);
    let config = |stride, groups| Conv2dConfig {
        stride,
        groups,
        ..Conv2dConfig::default()
    };
    let run = |w: &Tensor, b: Option<&Tensor>, config| conv2d(&x, w, b, &config);
    assert!(run(&tensor(&[2, 4, 3, 3]), None, config(1, 1)).is_ok());
    assert!(run(&tensor(&[2, 3, 3, 3]), None, config(1, 1)).is_err());
    assert!(run(&tensor(&[3, 2, 3, 3]), None, config(1, 2)).is_err());
    assert!(run(&tensor(&[2, 4, 6, 3]), None, config(1, 1)).is_err());
    assert!(run(&tensor(&[2, 4, 3, 3]), None, config(0, 1)).is_err());
    let error = run(&tensor(&[2, 4, 3, 3]), Some(&tensor(&[3])), config(1, 1)).unwrap_err();
    assert!(error.to_string().contains("a bias [outputs]"), "{error}");
}

#[test]
fn without_inputs_the_result_is_the_bias() {
    let tensor = |shape: &[usize], dtype| Tensor::ones(shape, dtype, &Device::Cpu).unwrap();
    let config = Conv2dConfig {
        padding: 2,
        ..Conv2dConfig::default()
    };
    for dtype in [DType::F32, DType::BF16] {
        let bias = tensor(&[2], dtype);
        for (inputs, weight, result) in [
            ([0, 4, 5, 6], [2, 4, 3, 3], [0, 2, 7, 8]),
            ([3, 0, 5, 6], [2, 0, 3, 3], [3, 2, 7, 8]),
            ([3, 4, 0, 6], [2, 4, 3, 3], [3, 2, 2, 8]),
        ] {
            let (x, w) = (tensor(&inputs, dtype), tensor(&weight, dtype));
            assert_eq!(conv2d(&x, &w, None, &config).unwrap().dims(), result);
            let y = conv2d_relu(&x, &w, Some(&bias), &config).unwrap();
            assert_eq!(y.dims(), result);
            assert!(values(&y).iter().all(|y| *y == 1.0));
        }
        let (x, w) = (tensor(&[3, 4, 5, 6], dtype), tensor(&[0, 4, 3, 3], dtype));
        assert_eq!(conv2d(&x, &w, None, &config).unwrap().dims(), [3, 0, 7, 8]);
    }
}

#[test]
fn other_types_agree_with_f32() {
    let mut source = Source::new();
    for (case, dtype) in cases()
        .into_iter()
        .flat_map(|c| [(c, DType::BF16), (c, DType::F16)])
    {
        let (x, w, b, part) = case.tensors(&mut source, dtype);
        let run = |dtype| {
            let var = |tensor: &Tensor| Var::from_tensor(&tensor.to_dtype(dtype).unwrap()).unwrap();
            let (x, w, b, part) = (var(&x), var(&w), var(&b), var(&part));
            let y = conv2d_relu(&x, &w, Some(&b), &case.config).unwrap();
            let loss = (&y * part.as_tensor()).unwrap().sum_all().unwrap();
            let gradients = backward(&loss).unwrap();
            let gradients = [x, w, b].map(|var| gradients.get(&var).unwrap().clone());
            (y, gradients)
        };
        let ((other, of_other), (ours, of_ours)) = (run(dtype), run(DType::F32));
        assert_eq!(other.dtype(), dtype);
        let error = difference(&other, &ours);
        assert!(error < 0.01, "{case:?}: {error:.1e}");
        for (other, ours) in of_other.iter().zip(&of_ours) {
            let error = difference(other, ours);
            assert!(error < 0.02, "{case:?} {:?}: {error:.1e}", ours.shape());
        }
    }
}

#[test]
fn a_stride_much_larger_than_the_picture_takes_no_memory() {
    let mut source = Source::new();
    let x = source.var(&[2, 2, 3, 4], DType::F64);
    let w = source.var(&[3, 2, 2, 2], DType::F64);
    let part = source.tensor(&[2, 3, 1, 1], DType::F64);
    let of_stride = |stride| {
        let config = Conv2dConfig {
            stride,
            ..Conv2dConfig::default()
        };
        check(&format!("stride {stride}"), &[&x, &w], || {
            (conv2d(&x, &w, None, &config)? * &part)?.sum_all()
        });
        conv2d(&x, &w, None, &config).unwrap()
    };
    let y = of_stride(usize::MAX);
    assert_eq!(y.dims(), [2, 3, 1, 1]);
    assert_eq!(values(&y), values(&of_stride(4)));
    // With padding the kernel reads the first pixel alone, by its last tap.
    let padded = Conv2dConfig {
        stride: usize::MAX,
        padding: 1,
        ..Conv2dConfig::default()
    };
    let next = Conv2dConfig {
        stride: 5,
        ..padded
    };
    check("a stride with padding", &[&x, &w], || {
        (conv2d(&x, &w, None, &padded)? * &part)?.sum_all()
    });
    let y = [padded, next].map(|config| conv2d(&x, &w, None, &config).unwrap());
    assert_eq!(values(&y[0]), values(&y[1]));
    // Three positions of the kernel, two of them in the padding.
    let config = Conv2dConfig {
        stride: 1 << 30,
        padding: 1 << 30,
        ..Conv2dConfig::default()
    };
    let y = conv2d(&x, &w, None, &config).unwrap();
    assert_eq!(y.dims(), [2, 3, 3, 3]);
    let middle = y.narrow(2, 1, 1).unwrap().narrow(3, 1, 1).unwrap();
    assert_eq!(values(&middle), values(&of_stride(4)));
}

#[test]
fn sizes_beyond_memory_are_an_error() {
    let mut source = Source::new();
    let x = source.tensor(&[1, 1, 5, 5], DType::F32);
    let w = source.tensor(&[1, 1, 3, 3], DType::F32);
    let config = |padding, stride, dilation| Conv2dConfig {
        padding,
        stride,
        dilation,
        ..Conv2dConfig::default()
    };
    let many = usize::MAX;
    for config in [
        config(many, 1, 1),
        config(many / 2, 1, 1),
        config(1, 1, many),
        config(1, 1, many / 2 + 1),
        config(1 << 40, 1 << 40, 1),
        config(1 << 30, 1, 1),
        config(1 << 30, 1, 1 << 30),
    ] {
        let error = conv2d(&x, &w, None, &config).unwrap_err().to_string();
        let expected = ["does not fit 5 pixels", "more memory than there can be"];
        assert!(expected.iter().any(|e| error.contains(e)), "{error}");
    }
}

#[test]
fn groups_that_do_not_divide_the_channels_are_an_error() {
    let layer = |inputs, outputs, groups| {
        let config = Conv2dConfig {
            groups,
            ..Conv2dConfig::default()
        };
        let vars = || VarBuilder::zeros(DType::F32, &Device::Cpu);
        let new = Conv2d::new(inputs, outputs, 3, config, vars());
        let no_bias = Conv2d::no_bias(inputs, outputs, 3, config, vars());
        assert_eq!(new.is_ok(), no_bias.is_ok());
        new
    };
    assert!(layer(4, 6, 2).is_ok());
    for (inputs, outputs, groups) in [(4, 6, 0), (3, 6, 2), (4, 7, 2), (4, 6, 3)] {
        let error = layer(inputs, outputs, groups).unwrap_err().to_string();
        assert!(error.contains("groups do not divide"), "{error}");
    }
}
