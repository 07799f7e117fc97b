//! Normalisation: against finite differences, and what it does to statistics.

#![allow(clippy::unwrap_used)]

mod gradients;

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use flambeau_nn::{Activation, BatchNorm, BatchNormConfig, GroupNorm, LayerNorm, backward};
use gradients::{Source, check, difference, values};

const ACTIVATIONS: [Activation; 3] = [Activation::Identity, Activation::Relu, Activation::Relu6];

fn layer(map: &VarMap, channels: usize, config: BatchNormConfig) -> BatchNorm {
    let vars = VarBuilder::from_varmap(map, DType::F64, &Device::Cpu);
    BatchNorm::new(channels, config, vars).unwrap()
}

#[test]
fn batch_norm_agrees_with_finite_differences() {
    let mut source = Source::new();
    for shape in [&[5, 3][..], &[4, 2, 3], &[2, 3, 4, 5], &[3, 1, 1, 17]] {
        for activation in ACTIVATIONS {
            let config = BatchNormConfig {
                activation,
                ..BatchNormConfig::default()
            };
            let map = VarMap::new();
            layer(&map, shape[1], config);
            let vars = map.data().lock().unwrap().clone();
            for (name, most) in [("weight", 3.0), ("bias", 1.5), ("running_mean", 0.5)] {
                let value = (source.tensor(&[shape[1]], DType::F64) * most).unwrap();
                vars[name].set(&value).unwrap();
            }
            let x = source.var(shape, DType::F64);
            let part = source.tensor(shape, DType::F64);
            let all = [&x, &vars["weight"], &vars["bias"]];
            let what = format!("{activation:?} {shape:?}");
            let layer = layer(&map, shape[1], config);
            check(&format!("train {what}"), &all, || {
                (layer.train(&x)?.0 * &part)?.sum_all()
            });
            check(&format!("evaluate {what}"), &all, || {
                (layer.evaluate(&x)? * &part)?.sum_all()
            });
        }
    }
}

#[test]
fn a_batch_is_normalised_and_remembered() {
    let mut source = Source::new();
    let x = ((source.tensor(&[6, 3, 5, 4], DType::F64) * 2.0).unwrap() + 100.0).unwrap();
    let map = VarMap::new();
    let layer = layer(&map, 3, BatchNormConfig::default());
    let (y, running) = layer.train(&x).unwrap();
    let channel = |x: &Tensor| x.transpose(0, 1).unwrap().flatten_from(1).unwrap();
    let (x, y) = (channel(&x), channel(&y));
    let zero = Tensor::zeros(3, DType::F64, &Device::Cpu).unwrap();
    assert!(difference(&y.mean(1).unwrap(), &zero) < 1e-9);
    let variance = y
        .var(1)
        .unwrap()
        .mean_all()
        .unwrap()
        .to_scalar::<f64>()
        .unwrap();
    // The unbiased variance of 120 elements.
    assert!((variance - 120.0 / 119.0).abs() < 1e-4);
    let mean = (x.mean(1).unwrap() * 0.1).unwrap();
    assert!(difference(&running.mean, &mean) < 1e-12);
    let variance = ((x.var(1).unwrap() * 0.1).unwrap() + 0.9).unwrap();
    assert!(difference(&running.variance, &variance) < 1e-12);
    // The layer itself keeps its statistics: they are variables of the caller.
    let kept = map.data().lock().unwrap()["running_mean"].clone();
    assert!(difference(&kept, &zero) < 1e-12);
}

#[test]
fn training_sets_the_variables_of_the_running_statistics() {
    let mut source = Source::new();
    let x = source.tensor(&[6, 3, 5], DType::F64);
    let map = VarMap::new();
    let layer = layer(&map, 3, BatchNormConfig::default());
    let vars = map.data().lock().unwrap().clone();
    let before = layer.evaluate(&x).unwrap();
    assert!(difference(&layer.forward(&x, false).unwrap(), &before) < 1e-12);
    let zero = Tensor::zeros(3, DType::F64, &Device::Cpu).unwrap();
    assert!(difference(&vars["running_mean"], &zero) < 1e-12);

    let (normal, running) = layer.train(&x).unwrap();
    assert!(difference(&layer.forward(&x, true).unwrap(), &normal) < 1e-12);
    assert!(difference(&vars["running_mean"], &running.mean) < 1e-12);
    assert!(difference(&vars["running_var"], &running.variance) < 1e-12);
    // The next evaluation is by the new statistics.
    let after = layer.evaluate(&x).unwrap();
    assert!(difference(&after, &before) > 1e-3);
    assert!(difference(&layer.forward(&x, false).unwrap(), &after) < 1e-12);
}

#[test]
fn frozen_statistics_and_single_elements_are_normalised_by_the_running_statistics() {
    let mut source = Source::new();
    let x = source.tensor(&[6, 3, 5], DType::F64);
    let map = VarMap::new();
    let trained = layer(&map, 3, BatchNormConfig::default());
    trained.forward(&x, true).unwrap();
    let evaluated = trained.evaluate(&x).unwrap();
    // The same values, but the running statistics are no variables.
    let vars = map.data().lock().unwrap().clone();
    let frozen = |name: &str| name.starts_with("running");
    let values = vars.iter().map(|(name, var)| match frozen(name) {
        true => (name.clone(), var.as_detached_tensor()),
        false => (name.clone(), var.as_tensor().clone()),
    });
    let vars = VarBuilder::from_tensors(values.collect(), DType::F64, &Device::Cpu);
    let frozen = BatchNorm::new(3, BatchNormConfig::default(), vars).unwrap();
    assert!(difference(&frozen.forward(&x, true).unwrap(), &evaluated) < 1e-12);
    // A channel of a single element has no variance.
    let single = source.tensor(&[1, 3], DType::F64);
    let before = trained.evaluate(&single).unwrap();
    assert!(difference(&trained.forward(&single, true).unwrap(), &before) < 1e-12);
    assert!(difference(&trained.evaluate(&single).unwrap(), &before) < 1e-12);
}

#[test]
fn equal_values_have_no_negative_variance() {
    // In `f32` the mean of these values is rounded, and the squared deviations come out below 0.
    let value = 131_072f32 + 1.0 / 64.0;
    let x = Tensor::full(value, (2, 1, 3), &Device::Cpu).unwrap();
    let map = VarMap::new();
    let vars = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu);
    let config = BatchNormConfig {
        momentum: 1.0,
        eps: 1e-30,
        ..BatchNormConfig::default()
    };
    let layer = BatchNorm::new(1, config, vars).unwrap();
    let (y, running) = layer.train(&x).unwrap();
    let variance = running.variance.to_vec1::<f32>().unwrap()[0];
    assert!(variance >= 0.0, "{variance}");
    assert!(values(&y).iter().all(|y| !y.is_nan()));
}

#[test]
fn infinite_and_missing_numbers_are_not_hidden() {
    let vars = || VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut numbers = [1f32, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0];
        numbers[1] = bad;
        let x = Tensor::from_slice(&numbers, (2, 4), &Device::Cpu).unwrap();
        let y = LayerNorm::new(4, 1e-5, vars())
            .unwrap()
            .forward(&x)
            .unwrap();
        let y = values(&y);
        assert!(y[..4].iter().all(|y| y.is_nan()), "{bad}: {y:?}");
        assert!(y[4..].iter().all(|y| y.is_finite()), "{bad}: {y:?}");
        let layer = BatchNorm::new(4, BatchNormConfig::default(), vars()).unwrap();
        let (y, running) = layer.train(&x).unwrap();
        let (y, variance) = (values(&y), values(&running.variance));
        assert!(y[1].is_nan() && y[5].is_nan() && variance[1].is_nan());
        assert!(y[0].is_finite() && variance[0].is_finite());
    }
}

#[test]
fn other_types_agree_with_f32() {
    let mut source = Source::new();
    let numbers = source.tensor(&[8, 4, 9], DType::BF16);
    let part = source.tensor(&[8, 4, 9], DType::BF16);
    let layers: [fn(VarBuilder, &Tensor) -> Result<Tensor>; 4] = [
        |vars, x| Ok(BatchNorm::new(4, relu(), vars)?.train(x)?.0),
        |vars, x| BatchNorm::new(4, relu(), vars)?.evaluate(x),
        |vars, x| LayerNorm::new(9, 1e-5, vars)?.forward(x),
        |vars, x| GroupNorm::new(2, 4, 1e-5, vars)?.forward(x),
    ];
    for (i, layer) in layers.into_iter().enumerate() {
        let run = |dtype| {
            let map = VarMap::new();
            let vars = VarBuilder::from_varmap(&map, dtype, &Device::Cpu);
            let x = Var::from_tensor(&numbers.to_dtype(dtype).unwrap()).unwrap();
            let y = layer(vars, &x).unwrap();
            let loss = (&y * part.to_dtype(dtype).unwrap())
                .unwrap()
                .sum_all()
                .unwrap();
            let gradients = backward(&loss).unwrap();
            let vars = map.data().lock().unwrap().clone();
            let all = [&x, &vars["weight"], &vars["bias"]];
            (y, all.map(|var| gradients.get(var).unwrap().clone()))
        };
        let ((other, of_other), (ours, of_ours)) = (run(DType::BF16), run(DType::F32));
        let error = difference(&other, &ours);
        assert!(error < 0.02, "layer {i}: {error:.1e}");
        for (other, ours) in of_other.iter().zip(&of_ours) {
            let error = difference(other, ours);
            assert!(error < 0.05, "layer {i} {:?}: {error:.1e}", ours.shape());
        }
    }
}

fn relu() -> BatchNormConfig {
    BatchNormConfig {
        activation: Activation::Relu,
        ..BatchNormConfig::default()
    }
}

#[test]
fn inputs_without_elements_come_back() {
    let vars = || VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
    let empty = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap();
    for shape in [&[0, 3][..], &[2, 0]] {
        let layer = LayerNorm::new(shape[1], 1e-5, vars()).unwrap();
        assert_eq!(layer.forward(&empty(shape)).unwrap().dims(), shape);
    }
    for shape in [&[0, 4, 3][..], &[2, 4, 0], &[2, 0, 3]] {
        let layer = GroupNorm::new(2, shape[1], 1e-5, vars()).unwrap();
        assert_eq!(layer.forward(&empty(shape)).unwrap().dims(), shape);
        let layer = BatchNorm::new(shape[1], BatchNormConfig::default(), vars()).unwrap();
        assert_eq!(layer.evaluate(&empty(shape)).unwrap().dims(), shape);
    }
    let layer = BatchNorm::new(0, BatchNormConfig::default(), vars()).unwrap();
    let (y, running) = layer.train(&empty(&[2, 0, 3])).unwrap();
    assert_eq!(y.dims(), [2, 0, 3]);
    assert_eq!(running.mean.dims(), [0]);
    let layer = BatchNorm::new(4, BatchNormConfig::default(), vars()).unwrap();
    let error = layer.train(&empty(&[0, 4, 3])).unwrap_err().to_string();
    assert!(error.contains("at least two elements"), "{error}");
}

#[test]
fn statistics_have_no_gradient() {
    let mut source = Source::new();
    let map = VarMap::new();
    let layer = layer(&map, 2, BatchNormConfig::default());
    let x = source.var(&[3, 2, 2], DType::F64);
    let loss = layer.train(&x).unwrap().0.sqr().unwrap().sum_all().unwrap();
    let gradients = backward(&loss).unwrap();
    let vars = map.data().lock().unwrap().clone();
    assert!(gradients.get(&vars["weight"]).is_some());
    assert!(gradients.get(&vars["running_mean"]).is_none());
    assert!(gradients.get(&vars["running_var"]).is_none());
}

#[test]
fn variance_does_not_suffer_from_a_large_mean() {
    let mut source = Source::new();
    let x = ((source.tensor(&[64, 1, 33], DType::F32) * 0.01).unwrap() + 1000.0).unwrap();
    let map = VarMap::new();
    let vars = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu);
    let config = BatchNormConfig {
        momentum: 1.0,
        ..BatchNormConfig::default()
    };
    let layer = BatchNorm::new(1, config, vars).unwrap();
    let (_, running) = layer.train(&x).unwrap();
    let exact = x
        .to_dtype(DType::F64)
        .unwrap()
        .flatten_all()
        .unwrap()
        .var(0)
        .unwrap();
    assert!(difference(&running.variance.squeeze(0).unwrap(), &exact) < 1e-3);
}

#[test]
fn layer_norm_agrees_with_finite_differences() {
    let mut source = Source::new();
    for shape in [&[3, 5][..], &[2, 3, 37], &[4, 16], &[7]] {
        let size = shape[shape.len() - 1];
        let map = VarMap::new();
        let vars = || VarBuilder::from_varmap(&map, DType::F64, &Device::Cpu);
        LayerNorm::new(size, 1e-5, vars()).unwrap();
        let all = map.data().lock().unwrap().clone();
        for name in ["weight", "bias"] {
            all[name].set(&source.tensor(&[size], DType::F64)).unwrap();
        }
        let layer = LayerNorm::new(size, 1e-5, vars()).unwrap();
        let x = source.var(shape, DType::F64);
        let part = source.tensor(shape, DType::F64);
        check(
            &format!("{shape:?}"),
            &[&x, &all["weight"], &all["bias"]],
            || (layer.forward(&x)? * &part)?.sum_all(),
        );
        let (weight, bias) = (all["weight"].as_tensor(), all["bias"].as_tensor());
        let slow = candle_nn::ops::layer_norm_slow(&x, weight, bias, 1e-5).unwrap();
        assert!(difference(&layer.forward(&x).unwrap(), &slow) < 1e-12);
    }
}

#[test]
fn group_norm_agrees_with_finite_differences() {
    let mut source = Source::new();
    for (groups, shape) in [
        (2, &[3, 4][..]),
        (1, &[2, 3, 5]),
        (3, &[2, 6, 3, 4]),
        (4, &[1, 4, 5, 5]),
    ] {
        let map = VarMap::new();
        let vars = || VarBuilder::from_varmap(&map, DType::F64, &Device::Cpu);
        GroupNorm::new(groups, shape[1], 1e-5, vars()).unwrap();
        let all = map.data().lock().unwrap().clone();
        for name in ["weight", "bias"] {
            all[name]
                .set(&source.tensor(&[shape[1]], DType::F64))
                .unwrap();
        }
        let layer = GroupNorm::new(groups, shape[1], 1e-5, vars()).unwrap();
        let (weight, bias) = (all["weight"].as_tensor(), all["bias"].as_tensor());
        let candles =
            candle_nn::GroupNorm::new(weight.clone(), bias.clone(), shape[1], groups, 1e-5);
        let x = source.var(shape, DType::F64);
        if shape.len() > 2 {
            let candles = candle_nn::Module::forward(&candles.unwrap(), &x).unwrap();
            assert!(difference(&layer.forward(&x).unwrap(), &candles) < 1e-12);
        }
        let part = source.tensor(shape, DType::F64);
        check(
            &format!("{shape:?}"),
            &[&x, &all["weight"], &all["bias"]],
            || (layer.forward(&x)? * &part)?.sum_all(),
        );
    }
}

#[test]
fn what_does_not_fit_is_an_error() {
    let mut source = Source::new();
    let map = VarMap::new();
    let layer = layer(&map, 2, BatchNormConfig::default());
    assert!(layer.train(&source.tensor(&[3, 3], DType::F64)).is_err());
    assert!(layer.evaluate(&source.tensor(&[2], DType::F64)).is_err());
    let error = layer
        .train(&source.tensor(&[1, 2], DType::F64))
        .unwrap_err();
    assert!(error.to_string().contains("no variance"), "{error}");
    let vars = || VarBuilder::zeros(DType::F64, &Device::Cpu);
    assert!(GroupNorm::new(3, 4, 1e-5, vars()).is_err());
    let layer = GroupNorm::new(2, 4, 1e-5, vars()).unwrap();
    assert!(
        layer
            .forward(&source.tensor(&[1, 3, 2], DType::F64))
            .is_err()
    );
    let layer = LayerNorm::new(4, 1e-5, vars()).unwrap();
    assert!(layer.forward(&source.tensor(&[1, 3], DType::F64)).is_err());
}

#[test]
fn normalised_integers_are_an_error() {
    let vars = || VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
    let x = Tensor::zeros((2, 4, 9), DType::U8, &Device::Cpu).unwrap();
    let batch = BatchNorm::new(4, BatchNormConfig::default(), vars()).unwrap();
    let results = [
        batch.train(&x).map(|(y, _)| y),
        batch.evaluate(&x),
        LayerNorm::new(9, 1e-5, vars()).unwrap().forward(&x),
        GroupNorm::new(2, 4, 1e-5, vars()).unwrap().forward(&x),
    ];
    for result in results {
        let error = result.unwrap_err().to_string();
        assert!(error.contains("no floating-point numbers"), "{error}");
    }
}
