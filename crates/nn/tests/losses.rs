//! Losses: against finite differences, and against candle's own operations.

#![allow(clippy::unwrap_used)]

mod gradients;

use candle_core::{DType, Device, Tensor, Var};
use flambeau_nn::{
    backward, binary_cross_entropy, cross_entropy, cross_entropy_smooth, mean_absolute_error,
    mean_squared_error,
};
use gradients::{Source, check, difference, values};

#[test]
fn label_smoothing_agrees_with_finite_differences() {
    let mut source = Source::new();
    for smoothing in [0.0, 0.1, 1.0] {
        let logits = source.var(&[5, 4], DType::F64);
        let targets = source.targets(5, 4);
        check(&format!("smoothing {smoothing}"), &[&logits], || {
            (cross_entropy_smooth(&logits, &targets, smoothing)? * 3.0)?.sqr()
        });
        let log = candle_nn::ops::log_softmax(&logits, 1).unwrap();
        let spread = (log.mean_all().unwrap() * smoothing).unwrap();
        let plain = cross_entropy(&logits, &targets).unwrap();
        let expected = ((plain * (1.0 - smoothing)).unwrap() - spread).unwrap();
        let smooth = cross_entropy_smooth(&logits, &targets, smoothing).unwrap();
        assert!(difference(&smooth, &expected) < 1e-12);
    }
}

#[test]
fn losses_of_each_element_agree_with_finite_differences() {
    let mut source = Source::new();
    for shape in [&[1][..], &[4, 3], &[2, 3, 5]] {
        let (x, t) = (source.var(shape, DType::F64), source.var(shape, DType::F64));
        for loss in [
            binary_cross_entropy,
            mean_squared_error,
            mean_absolute_error,
        ] {
            check(&format!("{shape:?}"), &[&x, &t], || {
                (loss(&x, &t)? * 3.0)?.sqr()
            });
        }
    }
}

#[test]
fn values_are_those_of_the_definitions() {
    let mut source = Source::new();
    let x = source.tensor(&[6, 5], DType::F64);
    let t = source.tensor(&[6, 5], DType::F64);
    let apart = (&x - &t).unwrap();
    let mean = |tensor: Tensor| tensor.mean_all().unwrap();
    let squared = mean_squared_error(&x, &t).unwrap();
    assert!(difference(&squared, &mean(apart.sqr().unwrap())) < 1e-12);
    let absolute = mean_absolute_error(&x, &t).unwrap();
    assert!(difference(&absolute, &mean(apart.abs().unwrap())) < 1e-12);
    let p = candle_nn::ops::sigmoid(&x).unwrap();
    let yes = (&t * p.log().unwrap()).unwrap();
    let no = ((1.0 - &t).unwrap() * (1.0 - &p).unwrap().log().unwrap()).unwrap();
    let expected = mean((yes + no).unwrap().neg().unwrap());
    let loss = binary_cross_entropy(&x, &t).unwrap();
    assert!(difference(&loss, &expected) < 1e-12);
}

#[test]
fn large_logits_do_not_overflow() {
    let x = Var::new(&[1000f32, -1000.0, 1000.0], &Device::Cpu).unwrap();
    let t = Tensor::new(&[1f32, 0.0, 0.0], &Device::Cpu).unwrap();
    let loss = binary_cross_entropy(&x, &t).unwrap();
    assert_eq!(loss.to_scalar::<f32>().unwrap(), 1000.0 / 3.0);
    let gradients = backward(&loss).unwrap();
    let gradient: Vec<f32> = gradients.get(&x).unwrap().to_vec1().unwrap();
    assert_eq!(gradient, [0.0, 0.0, 1.0 / 3.0]);
}

#[test]
fn the_absolute_error_has_no_gradient_at_0_in_other_types() {
    let of = |numbers: &[f32]| {
        let tensor = Tensor::new(numbers, &Device::Cpu).unwrap();
        Var::from_tensor(&tensor.to_dtype(DType::BF16).unwrap()).unwrap()
    };
    let (x, t) = (of(&[1.0, 3.0, -2.0, 0.5]), of(&[1.0, 1.0, 2.0, 0.5]));
    let loss = mean_absolute_error(&x, &t).unwrap();
    assert_eq!(values(&loss), [1.5]);
    let gradients = backward(&loss).unwrap();
    assert_eq!(values(gradients.get(&x).unwrap()), [0.0, 0.25, -0.25, 0.0]);
    assert_eq!(values(gradients.get(&t).unwrap()), [0.0, -0.25, 0.25, 0.0]);
}

#[test]
fn what_does_not_fit_is_an_error() {
    let mut source = Source::new();
    let x = source.tensor(&[2, 3], DType::F32);
    assert!(mean_squared_error(&x, &source.tensor(&[3, 2], DType::F32)).is_err());
    assert!(mean_squared_error(&x, &source.tensor(&[2, 3], DType::F64)).is_err());
    let targets = source.targets(2, 3);
    assert!(cross_entropy_smooth(&x, &targets, 1.1).is_err());
    assert!(cross_entropy_smooth(&x, &targets, -0.1).is_err());
}
