//! Fully connected layers and cross entropy: against finite differences, and against candle's own operations.

#![allow(clippy::unwrap_used)]

mod gradients;

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{Module, VarBuilder, VarMap};
use flambeau_nn::{Linear, backward, cross_entropy, linear, linear_gelu, linear_relu};
use gradients::{Source, check, difference, values};

/// Rows, inputs, outputs. Up to 64 rows with 64 outputs or more the product is made transposed.
const SHAPES: [(usize, usize, usize); 9] = [
    (1, 1, 1),
    (1, 7, 5),
    (3, 5, 2),
    (2, 3, 65),
    (5, 4, 130),
    (64, 9, 64),
    (65, 3, 64),
    (17, 31, 63),
    (1, 6, 70),
];

/// Returns the inputs, the weight and the bias of a layer.
fn variables(
    source: &mut Source,
    (rows, features, outputs): (usize, usize, usize),
    dtype: DType,
) -> [Var; 3] {
    let shapes = [vec![rows, features], vec![outputs, features], vec![outputs]];
    shapes.map(|shape| source.var(&shape, dtype))
}

#[test]
fn linear_layers_agree_with_finite_differences() {
    let mut source = Source::new();
    for (rows, features, outputs) in SHAPES {
        let [x, w, b] = variables(&mut source, (rows, features, outputs), DType::F64);
        // Each element of the result has its own part in the loss.
        let part = source.tensor(&[rows, outputs], DType::F64);
        for (what, layer) in [
            ("linear", linear as fn(&_, &_, &_) -> _),
            ("linear_relu", linear_relu),
            ("linear_gelu", linear_gelu),
        ] {
            check(
                &format!("{what} {rows}x{features}x{outputs}"),
                &[&x, &w, &b],
                || (layer(&x, &w, &b)? * &part)?.sum_all(),
            );
        }
    }
}

#[test]
fn cross_entropy_agrees_with_finite_differences() {
    let mut source = Source::new();
    for (samples, classes) in [(1, 1), (1, 4), (7, 3), (5, 10)] {
        let logits = source.var(&[samples, classes], DType::F64);
        let targets = source.targets(samples, classes);
        check("cross entropy", &[&logits], || {
            // Scaled, so that its own gradient is not 1.
            (cross_entropy(&logits, &targets)? * 3.0)?.sqr()
        });
    }
}

#[test]
fn a_variable_of_several_layers_has_the_sum_of_their_gradients() {
    let mut source = Source::new();
    let x = source.tensor(&[4, 6], DType::F64);
    let w = source.var(&[6, 6], DType::F64);
    let b = source.var(&[6], DType::F64);
    let targets = source.targets(4, 6);
    check("shared", &[&w, &b], || {
        let y = linear_relu(&linear_relu(&x, &w, &b)?, &w, &b)?;
        // This part uses candle's own operations, so that candle itself keeps the gradient.
        cross_entropy(&(y.matmul(&w.t()?)? + x.matmul(&w)?)?, &targets)
    });
}

#[test]
fn inputs_may_be_views() {
    let mut source = Source::new();
    let x = source.var(&[4, 12], DType::F64);
    let w = source.var(&[4, 70], DType::F64);
    let b = source.var(&[2, 70], DType::F64);
    let targets = source.targets(70, 6);
    check("views", &[&x, &w, &b], || {
        let bias = b.narrow(0, 1, 1)?.flatten_all()?;
        let y = linear_relu(&x.narrow(1, 3, 4)?, &w.t()?, &bias)?;
        let z = linear(
            &x.t()?.narrow(0, 2, 5)?,
            &w.t()?,
            &b.t()?.narrow(1, 0, 1)?.squeeze(1)?,
        )?;
        // A gradient that is a view comes back to the layers, and logits are one.
        let logits = Tensor::cat(&[&y.t()?, &z.t()?], 1)?.narrow(1, 1, 6)?;
        cross_entropy(&logits, &targets)
    });
}

#[test]
fn more_dimensions_are_rows() {
    let mut source = Source::new();
    let x = source.var(&[2, 3, 5], DType::F64);
    let w = source.var(&[4, 5], DType::F64);
    let b = source.var(&[4], DType::F64);
    assert_eq!(linear(&x, &w, &b).unwrap().dims(), [2, 3, 4]);
    check("three dimensions", &[&x, &w, &b], || {
        linear_relu(&x, &w, &b)?.sqr()?.sum_all()
    });
    check("three dimensions with GELU", &[&x, &w, &b], || {
        linear_gelu(&x, &w, &b)?.sqr()?.sum_all()
    });
}

#[test]
fn a_second_backward_pass_gives_the_same_gradients() {
    let mut source = Source::new();
    let [x, w, b] = variables(&mut source, (3, 5, 4), DType::F32);
    let loss = linear_gelu(&x, &w, &b).unwrap().sum_all().unwrap();
    let (first, second) = (backward(&loss).unwrap(), backward(&loss).unwrap());
    for var in [&x, &w, &b] {
        let (first, second) = (first.get(var).unwrap(), second.get(var).unwrap());
        assert_eq!(values(first), values(second));
    }
}

#[test]
fn layers_agree_with_candle() {
    let mut source = Source::new();
    for (rows, features, outputs) in SHAPES.into_iter().chain([(64, 784, 512), (300, 40, 70)]) {
        let [x, w, b] = variables(&mut source, (rows, features, outputs), DType::F32);
        let targets = source.targets(rows, outputs);
        let fused = linear_relu(&x, &w, &b).unwrap();
        let layer = candle_nn::Linear::new(w.as_tensor().clone(), Some(b.as_tensor().clone()));
        let plain = layer.forward(&x).unwrap().relu().unwrap();
        assert!(difference(&fused, &plain) < 1e-5);
        let (fused_gelu, sum) = (linear_gelu(&x, &w, &b), layer.forward(&x).unwrap());
        let (fused_gelu, plain_gelu) = (fused_gelu.unwrap(), sum.gelu_erf().unwrap());
        assert!(difference(&fused_gelu, &plain_gelu) < 1e-5);
        let of_gelu = backward(&fused_gelu.sqr().unwrap().sum_all().unwrap()).unwrap();
        let of_plain = plain_gelu.sqr().unwrap().sum_all().unwrap().backward();
        let of_plain = of_plain.unwrap();
        for var in [&x, &w, &b] {
            let (ours, candles) = (of_gelu.get(var).unwrap(), of_plain.get(var).unwrap());
            let largest = values(candles)
                .into_iter()
                .fold(1.0, |most: f64, g| most.max(g.abs()));
            assert!(difference(ours, candles) < 1e-5 * largest);
        }

        let fused = (linear(&x, &w, &b).unwrap() + fused).unwrap();
        let fused = cross_entropy(&fused, &targets).unwrap();
        let plain = (layer.forward(&x).unwrap() + plain).unwrap();
        let plain = candle_nn::loss::cross_entropy(&plain, &targets).unwrap();
        assert!(difference(&fused, &plain) < 1e-5);
        let fused: GradStore = backward(&fused).unwrap();
        let plain = plain.backward().unwrap();
        for var in [&x, &w, &b] {
            let error = difference(fused.get(var).unwrap(), plain.get(var).unwrap());
            assert!(error < 1e-5, "{rows}x{features}x{outputs}: {error:.1e}");
        }
    }
}

#[test]
fn other_types_agree_with_f32() {
    let mut source = Source::new();
    let [x, w, b] = variables(&mut source, (5, 7, 4), DType::BF16);
    let targets = source.targets(5, 4);
    let run = |[x, w, b]: [&Var; 3]| {
        let y = linear_relu(x, w, b).unwrap();
        let loss = cross_entropy(&y, &targets).unwrap();
        let gradients = backward(&loss).unwrap();
        (
            loss,
            [x, w, b].map(|var| gradients.get(var).unwrap().clone()),
        )
    };
    let (other, of_other) = run([&x, &w, &b]);
    let all = [&x, &w, &b].map(|var| Var::from_tensor(&var.to_dtype(DType::F32).unwrap()).unwrap());
    let (ours, of_ours) = run([&all[0], &all[1], &all[2]]);
    assert!(difference(&other, &ours) < 0.02);
    for (other, ours) in of_other.iter().zip(&of_ours) {
        let error = difference(other, ours);
        assert!(error < 0.05, "{:?}: {error:.1e}", ours.shape());
    }
}

#[test]
fn relu_does_as_pytorch_does() {
    let x = Tensor::new(&[[0f32], [f32::NAN], [-2.0], [3.0]], &Device::Cpu).unwrap();
    let w = Var::new(&[[1f32]], &Device::Cpu).unwrap();
    let b = Var::new(&[0f32], &Device::Cpu).unwrap();
    let y = linear_relu(&x, &w, &b).unwrap();
    let values: Vec<f32> = y.flatten_all().unwrap().to_vec1().unwrap();
    assert!(values[1].is_nan());
    assert_eq!([values[0], values[2], values[3]], [0.0, 0.0, 3.0]);
    // 0 + NaN's 1 + 0 + 1.
    let gradients = backward(&y.sum_all().unwrap()).unwrap();
    let of_bias: Vec<f32> = gradients.get(&b).unwrap().to_vec1().unwrap();
    assert_eq!(of_bias, [2.0]);
}

#[test]
fn large_logits_do_not_overflow() {
    let logits = Var::new(&[[1000f32, 0.0], [-1000.0, 0.0]], &Device::Cpu).unwrap();
    let targets = Tensor::new(&[0u32, 0], &Device::Cpu).unwrap();
    let loss = cross_entropy(&logits, &targets).unwrap();
    assert_eq!(loss.to_scalar::<f32>().unwrap(), 500.0);
    let gradients = backward(&loss).unwrap();
    let gradient: Vec<Vec<f32>> = gradients.get(&logits).unwrap().to_vec2().unwrap();
    assert_eq!(gradient, [[0.0, 0.0], [-0.5, 0.5]]);
}

#[test]
fn what_is_no_variable_has_no_gradient() {
    let mut source = Source::new();
    let x = source.tensor(&[3, 4], DType::F32);
    let w = source.var(&[2, 4], DType::F32);
    let b = source.tensor(&[2], DType::F32);
    let loss = linear(&x, &w, &b).unwrap().sum_all().unwrap();
    for gradients in [loss.backward().unwrap(), backward(&loss).unwrap()] {
        assert!(gradients.get(&w).is_some());
        assert!(gradients.get(&x).is_none() && gradients.get(&b).is_none());
    }
}

#[test]
fn initial_values_and_names_are_those_of_candle() {
    let map = VarMap::new();
    let vars = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu);
    let ours = Linear::new(5, 3, vars.pp("a")).unwrap();
    // Both layers have the same variables.
    let candles = candle_nn::linear(5, 3, vars.pp("a")).unwrap();
    let x = Source::new().tensor(&[2, 5], DType::F32);
    let (ours, candles) = (ours.forward(&x).unwrap(), candles.forward(&x).unwrap());
    assert!(difference(&ours, &candles) < 1e-6);
    let mut names: Vec<String> = map.data().lock().unwrap().keys().cloned().collect();
    names.sort();
    assert_eq!(names, ["a.bias", "a.weight"]);
}

#[test]
fn what_does_not_fit_is_an_error() {
    let mut source = Source::new();
    let mut tensor = |shape: &[usize]| source.tensor(shape, DType::F32);
    let (x, w, b) = (tensor(&[2, 3]), tensor(&[4, 3]), tensor(&[4]));
    assert!(linear(&tensor(&[3]), &w, &b).is_err());
    assert!(linear(&x, &tensor(&[4, 2]), &b).is_err());
    assert!(linear(&x, &w.to_dtype(DType::F64).unwrap(), &b).is_err());
    let error = linear(&x, &w, &tensor(&[3])).unwrap_err().to_string();
    assert!(error.contains("[out, in]"), "{error}");

    let logits = tensor(&[2, 3]);
    let targets = |values: &[u32]| Tensor::new(values, &Device::Cpu).unwrap();
    let error = cross_entropy(&logits, &targets(&[0, 3]))
        .unwrap_err()
        .to_string();
    assert!(error.contains("no class 3; there are 3"), "{error}");
    assert!(cross_entropy(&logits, &targets(&[0])).is_err());
    assert!(cross_entropy(&b, &targets(&[0, 1])).is_err());
    let floats = Tensor::new(&[0f32, 1.0], &Device::Cpu).unwrap();
    let error = cross_entropy(&logits, &floats).unwrap_err().to_string();
    assert!(error.contains("u32"), "{error}");
    assert!(cross_entropy(&tensor(&[0, 3]), &targets(&[])).is_err());
}

#[test]
fn without_inputs_the_result_is_the_bias() {
    let ones = |shape: &[usize], dtype| Tensor::ones(shape, dtype, &Device::Cpu).unwrap();
    for dtype in [DType::F32, DType::BF16] {
        for (rows, features, outputs) in [(0, 3, 4), (2, 0, 4), (2, 3, 0)] {
            let x = ones(&[rows, features], dtype);
            let (w, b) = (ones(&[outputs, features], dtype), ones(&[outputs], dtype));
            for (layer, result) in [
                (linear as fn(&_, &_, &_) -> _, 1.0),
                (linear_relu, 1.0),
                (linear_gelu, 0.841),
            ] {
                let y: Tensor = layer(&x, &w, &b).unwrap();
                assert_eq!(y.dims(), [rows, outputs]);
                assert!(values(&y).iter().all(|y| (y - result).abs() < 1e-2));
            }
        }
    }
}
