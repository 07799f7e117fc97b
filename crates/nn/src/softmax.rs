//! Softmax.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, D, Layout, Result, Shape, Tensor, WithDType};
use pulp::Arch;

use crate::backward::keep;
use crate::simd::{BLOCK, Element};
use crate::storage::{computed_here, elements, slice, with_type};

/// Returns the softmax over the last dimension. (`candle_nn::ops::softmax_last_dim` has no gradient.)
///
/// # Errors
/// candle's.
pub fn softmax(x: &Tensor) -> Result<Tensor> {
    if x.elem_count() == 0 || !computed_here(&[x]) {
        return candle_nn::ops::softmax(x, D::Minus1);
    }
    let size = x.dim(D::Minus1)?;
    x.contiguous()?.apply_op1(Softmax { size })
}

struct Softmax {
    size: usize,
}

impl CustomOp1 for Softmax {
    fn name(&self) -> &'static str {
        "softmax"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        with_type!(x.dtype(), T => {
            let mut values = slice::<T>(x, layout)?.to_vec();
            for row in values.chunks_exact_mut(self.size) {
                Arch::new().dispatch(|| forward(row));
            }
            Ok((T::to_cpu_storage_owned(values), layout.shape().clone()))
        })
    }

    fn bwd(&self, x: &Tensor, result: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let gradient = gradient.contiguous()?;
        keep(x, || {
            with_type!(x.dtype(), T => {
                let (result, gradient) = (elements(result), elements(&gradient));
                let mut before = gradient.slice::<T>()?.to_vec();
                let rows = result.slice()?.chunks_exact(self.size);
                for (row, result) in before.chunks_exact_mut(self.size).zip(rows) {
                    Arch::new().dispatch(|| backward(row, result));
                }
                Tensor::from_vec(before, x.shape(), x.device())
            })
        })
    }
}

#[inline(always)]
fn forward<T: Element>(row: &mut [T]) {
    let largest = row
        .iter()
        .fold(row[0], |most, x| if *x > most { *x } else { most });
    row.iter_mut()
        .for_each(|x| *x = (*x - largest).exponential());
    let scale = T::one() / sum(row, |x, _| x, row);
    row.iter_mut().for_each(|x| *x *= scale);
}

/// Makes the gradient before softmax of that after it.
#[inline(always)]
fn backward<T: Element>(gradient: &mut [T], result: &[T]) {
    let mean = sum(gradient, |g, y| g * y, result);
    for (g, y) in gradient.iter_mut().zip(result) {
        *g = (*g - mean) * *y;
    }
}

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
