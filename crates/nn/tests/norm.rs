//! Normalisation: against finite differences, and what it does to statistics.

#![allow(clippy::unwrap_used)]

mod gradients;

use candle_core::{DType, Device, Tensor};
use candle_nn::{VarBuilder, VarMap};
use gradients::{Source, check, difference};
use nn::{Activation, BatchNorm, BatchNormConfig, GroupNorm, LayerNorm, backward};

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
