//! Weights of trained models.

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{Device, Tensor};

/// Reads the variables of a safetensors file.
pub(crate) fn weights(path: &Path) -> BTreeMap<String, Tensor> {
    let tensors = candle_core::safetensors::load(path, &Device::Cpu).unwrap();
    tensors.into_iter().collect()
}

/// Returns the largest absolute value.
pub(crate) fn largest(tensor: &Tensor) -> f32 {
    let values = tensor.abs().unwrap().flatten_all().unwrap();
    values.max(0).unwrap().to_scalar().unwrap()
}

/// Returns the largest difference between values of the same variables.
pub(crate) fn difference(
    found: &BTreeMap<String, Tensor>,
    expected: &BTreeMap<String, Tensor>,
) -> f32 {
    assert!(found.keys().eq(expected.keys()));
    let pairs = found.values().zip(expected.values());
    let differences = pairs.map(|(found, expected)| largest(&(found - expected).unwrap()));
    differences.fold(0.0, f32::max)
}
