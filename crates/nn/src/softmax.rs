//! Softmax.

use candle_core::{D, Result, Tensor};
use pulp::{Arch, Simd};

use crate::operation::{Function, apply};
use crate::simd::{BLOCK, Element};
use crate::storage::{check_float, computed_here};

/// Returns the softmax over the last dimension: `exp(x)`, divided by the sum of `exp(x)` over that dimension. Unlike
/// `candle_nn::ops::softmax_last_dim` it has a gradient.
///
/// # Errors
/// If `x` is a scalar or has integers, or candle's.
pub fn softmax(x: &Tensor) -> Result<Tensor> {
    check_float(x)?;
    let size = x.dim(D::Minus1)?;
    if x.elem_count() == 0 {
        return Ok(x.clone());
    }
    match computed_here(&[x]) {
        true => apply(Softmax { size }, x),
        false => candle_nn::ops::softmax(x, D::Minus1),
    }
}

/// The softmax of each row of `size` elements.
struct Softmax {
    size: usize,
}

impl Function for Softmax {
    const NAME: &'static str = "softmax";

    fn forward<T: Element>(&self, x: &[T]) -> Vec<T> {
        let mut values = x.to_vec();
        forward(&mut values, self.size, T::one());
        values
    }

    fn backward<T: Element>(&self, _: &[T], result: &[T], gradient: &[T]) -> Vec<T> {
        let mut before = gradient.to_vec();
        backward(&mut before, result, self.size, T::one());
        before
    }
}

/// Replaces each row of `size` elements by the softmax of `scale` times the row.
#[pulp::with_simd(forward = Arch::new())]
#[inline(always)]
pub(crate) fn forward_simd<S: Simd, T: Element>(_: S, rows: &mut [T], size: usize, scale: T) {
    for row in rows.chunks_exact_mut(size) {
        row.iter_mut().for_each(|x| *x *= scale);
        let largest = row
            .iter()
            .fold(row[0], |most, x| if *x > most { *x } else { most });
        row.iter_mut()
            .for_each(|x| *x = (*x - largest).exponential());
        let share = T::one() / sum(row, |x, _| x, row);
        row.iter_mut().for_each(|x| *x *= share);
    }
}

/// Replaces the gradient of the rows that [`forward`] returned by the gradient of the rows that it was given. `result`
/// is what it returned.
#[pulp::with_simd(backward = Arch::new())]
#[inline(always)]
pub(crate) fn backward_simd<S: Simd, T: Element>(
    _: S,
    gradient: &mut [T],
    result: &[T],
    size: usize,
    scale: T,
) {
    let rows = gradient
        .chunks_exact_mut(size)
        .zip(result.chunks_exact(size));
    for (gradient, result) in rows {
        let mean = sum(gradient, |g, y| g * y, result);
        for (g, y) in gradient.iter_mut().zip(result) {
            *g = (*g - mean) * *y * scale;
        }
    }
}

/// Returns the sum of `of` over pairs of elements.
#[inline(always)]
fn sum<T: Element>(left: &[T], of: impl Fn(T, T) -> T, right: &[T]) -> T {
    let ((lefts, left), (rights, right)) = (left.as_chunks::<BLOCK>(), right.as_chunks::<BLOCK>());
    let mut sums = [T::zero(); BLOCK];
    for (left, right) in lefts.iter().zip(rights) {
        for i in 0..BLOCK {
            sums[i] += of(left[i], right[i]);
        }
    }
    let rest = left
        .iter()
        .zip(right)
        .map(|(left, right)| of(*left, *right));
    sums.into_iter()
        .chain(rest)
        .fold(T::zero(), |sum, x| sum + x)
}
