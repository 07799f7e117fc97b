//! Sums of vectors, and of the products of pairs of vectors, for models of categorical data.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, WithDType};
use pulp::{Arch, Simd};

use crate::backward::keep_values;
use crate::simd::Element;
use crate::storage::{computed_here, elements, slice, with_type};

/// Returns the sum of each sample's vectors: `[samples, vectors, size]` makes `[samples, size]`.
///
/// # Errors
/// If `x` has another rank, or candle's.
pub fn sum_of_vectors(x: &Tensor) -> Result<Tensor> {
    let (samples, vectors, size) = x.dims3()?;
    match x.elem_count() > 0 && computed_here(&[x]) {
        true => x.contiguous()?.apply_op1(Sum {
            samples,
            vectors,
            size,
        }),
        false => x.sum(1),
    }
}

/// Returns the sum of the dot products of all pairs of each sample's vectors: `[samples, vectors, size]` makes
/// `[samples, 1]`. It is half the difference between the square of the vectors' sum and the sum of their squares
/// (Rendle, "Factorization Machines", ICDM 2010, lemma 3.1).
///
/// # Errors
/// If `x` has another rank, or candle's.
pub fn sum_of_pairs(x: &Tensor) -> Result<Tensor> {
    let (samples, vectors, size) = x.dims3()?;
    match x.elem_count() > 0 && computed_here(&[x]) {
        true => x.contiguous()?.apply_op1(Pairs {
            samples,
            vectors,
            size,
        }),
        false => (x.sum(1)?.sqr()? - x.sqr()?.sum(1)?)?.sum_keepdim(1)? * 0.5,
    }
}

struct Sum {
    samples: usize,
    vectors: usize,
    size: usize,
}

impl CustomOp1 for Sum {
    fn name(&self) -> &'static str {
        "sum-of-vectors"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let shape = (self.samples, self.size).into();
        with_type!(storage.dtype(), T => {
            let x = slice::<T>(storage, layout)?;
            let mut sums = vec![0.0 as T; self.samples * self.size];
            let each = x.chunks_exact(self.vectors * self.size);
            for (vectors, sum) in each.zip(sums.chunks_exact_mut(self.size)) {
                add_all(vectors, sum);
            }
            Ok((T::to_cpu_storage_owned(sums), shape))
        })
    }

    fn bwd(&self, x: &Tensor, result: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let gradient = gradient.contiguous()?;
        with_type!(x.dtype(), T => {
            keep_values(result, x, || {
                let gradient = elements(&gradient);
                let mut of_x = Vec::with_capacity(x.elem_count());
                for row in gradient.slice::<T>()?.chunks_exact(self.size) {
                    for _ in 0..self.vectors {
                        of_x.extend_from_slice(row);
                    }
                }
                Ok(of_x)
            })
        })
    }
}

struct Pairs {
    samples: usize,
    vectors: usize,
    size: usize,
}

impl CustomOp1 for Pairs {
    fn name(&self) -> &'static str {
        "sum-of-pairs"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let shape = (self.samples, 1).into();
        with_type!(storage.dtype(), T => {
            let x = slice::<T>(storage, layout)?;
            let mut sums = vec![0.0 as T; 2 * self.size];
            let each = x.chunks_exact(self.vectors * self.size);
            let pairs: Vec<T> = each.map(|vectors| pairs(vectors, &mut sums)).collect();
            Ok((T::to_cpu_storage_owned(pairs), shape))
        })
    }

    fn bwd(&self, x: &Tensor, result: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let gradient = gradient.contiguous()?;
        with_type!(x.dtype(), T => {
            keep_values(result, x, || {
                let (values, gradient) = (elements(x), elements(&gradient));
                let values = values.slice::<T>()?;
                let mut of_x = vec![0.0 as T; values.len()];
                let mut sum = vec![0.0 as T; self.size];
                let width = self.vectors * self.size;
                let each = values.chunks_exact(width).zip(of_x.chunks_exact_mut(width));
                for ((vectors, of_vectors), g) in each.zip(gradient.slice::<T>()?) {
                    sum.fill(0.0);
                    add_all(vectors, &mut sum);
                    others(vectors, &sum, *g, of_vectors);
                }
                Ok(of_x)
            })
        })
    }
}

/// Adds all vectors to `sum`. Each vector has the length of `sum`.
#[pulp::with_simd(add_all = Arch::new())]
#[inline(always)]
fn add_all_simd<S: Simd, T: Element>(_: S, vectors: &[T], sum: &mut [T]) {
    for vector in vectors.chunks_exact(sum.len()) {
        for (sum, x) in sum.iter_mut().zip(vector) {
            *sum += *x;
        }
    }
}

/// Returns the sum of the dot products of all pairs of vectors. `sums` is scratch memory of twice a vector's length.
#[pulp::with_simd(pairs = Arch::new())]
#[inline(always)]
fn pairs_simd<S: Simd, T: Element>(_: S, vectors: &[T], sums: &mut [T]) -> T {
    sums.fill(T::zero());
    let (sum, squares) = sums.split_at_mut(sums.len() / 2);
    for vector in vectors.chunks_exact(sum.len()) {
        for ((sum, square), x) in sum.iter_mut().zip(&mut *squares).zip(vector) {
            *sum += *x;
            *square += *x * *x;
        }
    }
    let beyond = sum
        .iter()
        .zip(squares)
        .map(|(sum, square)| *sum * *sum - *square);
    beyond.fold(T::zero(), |all, x| all + x) / (T::one() + T::one())
}

/// Sets the gradient of each vector: `g` times the sum of the other vectors.
#[pulp::with_simd(others = Arch::new())]
#[inline(always)]
fn others_simd<S: Simd, T: Element>(_: S, vectors: &[T], sum: &[T], g: T, gradient: &mut [T]) {
    let pairs = vectors
        .chunks_exact(sum.len())
        .zip(gradient.chunks_exact_mut(sum.len()));
    for (vector, gradient) in pairs {
        for ((gradient, x), sum) in gradient.iter_mut().zip(vector).zip(sum) {
            *gradient = g * (*sum - *x);
        }
    }
}
