//! Gradients against finite differences.

#![allow(
    dead_code,
    missing_docs,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::new_without_default
)]

use candle_core::{DType, Device, Result, Tensor, Var};
use flambeau_nn::backward;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// A source of tensors, the same in each run.
pub struct Source(ChaCha8Rng);

impl Source {
    pub fn new() -> Self {
        Self(ChaCha8Rng::seed_from_u64(11))
    }

    pub fn tensor(&mut self, shape: &[usize], dtype: DType) -> Tensor {
        let count = shape.iter().product();
        let values: Vec<f64> = (0..count).map(|_| self.0.random_range(-1.0..1.0)).collect();
        let tensor = Tensor::from_vec(values, shape, &Device::Cpu).unwrap();
        tensor.to_dtype(dtype).unwrap()
    }

    pub fn var(&mut self, shape: &[usize], dtype: DType) -> Var {
        Var::from_tensor(&self.tensor(shape, dtype)).unwrap()
    }

    pub fn targets(&mut self, samples: usize, classes: usize) -> Tensor {
        let targets: Vec<u32> = (0..samples)
            .map(|_| self.0.random_range(0..classes as u32))
            .collect();
        Tensor::new(targets, &Device::Cpu).unwrap()
    }
}

/// Returns the elements of a tensor of f64 or f32.
pub fn values(tensor: &Tensor) -> Vec<f64> {
    let tensor = tensor.to_dtype(DType::F64).unwrap();
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

/// The largest difference, relative to the largest value.
pub fn difference(a: &Tensor, b: &Tensor) -> f64 {
    assert_eq!(a.dims(), b.dims());
    let (a, b) = (values(a), values(b));
    assert!(a.iter().chain(&b).all(|v| v.is_finite()));
    let largest = b.iter().fold(1e-3, |most: f64, b| most.max(b.abs()));
    let pairs = a.iter().zip(&b);
    pairs.fold(0f64, |most, (a, b)| most.max((a - b).abs())) / largest
}

/// Compares each element of each gradient with (f(x + e) - f(x - e)) / 2e, and both ways to get
/// gradients.
pub fn check(what: &str, vars: &[&Var], loss: impl Fn() -> Result<Tensor>) {
    const STEP: f64 = 1e-5;
    let number = || loss().unwrap().to_scalar::<f64>().unwrap();
    let (kept, own) = (
        backward(&loss().unwrap()).unwrap(),
        loss().unwrap().backward().unwrap(),
    );
    for (argument, var) in vars.iter().enumerate() {
        let gradient = kept.get(var).unwrap();
        // Only the order of sums may differ.
        assert!(difference(gradient, own.get(var).unwrap()) < 1e-14);
        assert!(gradient.is_contiguous());
        let at = values(var);
        let set = |values: Vec<f64>| {
            var.set(&Tensor::from_vec(values, var.shape(), &Device::Cpu).unwrap())
                .unwrap();
        };
        let measured = (0..at.len()).map(|i| {
            let moved = |by: f64| {
                let mut values = at.clone();
                values[i] += by;
                set(values);
                number()
            };
            let slope = (moved(STEP) - moved(-STEP)) / (2.0 * STEP);
            set(at.clone());
            slope
        });
        let measured = Tensor::from_vec(measured.collect(), var.shape(), &Device::Cpu).unwrap();
        let error = difference(gradient, &measured);
        assert!(error < 1e-6, "{what}, argument {argument}: {error:.1e}");
    }
}
