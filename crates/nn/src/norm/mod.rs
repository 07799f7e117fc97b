//! Normalisation.
//!
//! - `batch`: of each channel over the batch; `normalize`: the operation, with its gradients
//! - `joint`: statistics over the batches of all replicas of a step
//! - `row`: of each row, or of groups of channels

mod batch;
mod joint;
mod normalize;
mod row;

use crate::simd::{BLOCK, Element};

pub use batch::{BatchNorm, BatchNormConfig, FROZEN_STATISTICS, RunningStatistics};
pub use row::{GroupNorm, LayerNorm};

/// Returns the mean, and the sum of the squared deviations from it.
#[inline(always)]
fn moments<T: Element>(values: &[T]) -> (f64, f64) {
    let mean = sum(values, |x| x).to_f64() / values.len() as f64;
    let middle = T::from_f64(mean);
    let squares = sum(values, |x| (x - middle) * (x - middle)).to_f64();
    // The deviations are from the rounded mean.
    let off = mean - middle.to_f64();
    let squares = squares - off * off * values.len() as f64;
    // Equal values may leave less than 0, by the rounding of their sum. NaN stays NaN.
    (mean, if squares < 0.0 { 0.0 } else { squares })
}

#[inline(always)]
fn sum<T: Element>(values: &[T], of: impl Fn(T) -> T) -> T {
    let (chunks, rest) = values.as_chunks::<BLOCK>();
    let mut sums = [T::zero(); BLOCK];
    for chunk in chunks {
        for i in 0..BLOCK {
            sums[i] += of(chunk[i]);
        }
    }
    let rest = rest.iter().fold(T::zero(), |sum, x| sum + of(*x));
    sums.iter().fold(rest, |sum, x| sum + *x)
}
