//! The inner loops of convolutions. Their operands are rows of numbers, and a row may begin anywhere in a slice. All
//! taps of a convolution's kernel read the same plane, each from its own offset, so no data is rearranged for a tap.

use std::array::from_fn;

use pulp::Simd;

use crate::simd::Element;

/// Computes `M` rows of `length` elements: `result[i · length + p]` is the sum of `weights[k · M + i] ·
/// source[offsets[k] + p]` over all `k`. It computes up to `V` vectors of each row at a time.
///
/// It is faster if the source continues behind the last position that is needed, because it then reads whole vectors to
/// the end.
#[inline(always)]
pub(super) fn combine<S: Simd, T: Element, const M: usize, const V: usize>(
    simd: S,
    weights: &[T],
    source: &[T],
    offsets: &[usize],
    length: usize,
    result: &mut [T],
) {
    let lanes = T::lanes::<S>();
    let reach = offsets.iter().max().copied().unwrap_or(0);
    let mut at = 0;
    while at < length {
        let left = (length - at).div_ceil(lanes);
        let readable = source.len().saturating_sub(at + reach) / lanes;
        let vectors = left.min(readable);
        at += lanes
            * if vectors >= V {
                let rows = combine_whole::<S, T, M, V>(simd, weights, source, offsets, at);
                store(simd, &rows, length, at, result)
            } else if V > 4 && vectors >= 4 {
                let rows = combine_whole::<S, T, M, 4>(simd, weights, source, offsets, at);
                store(simd, &rows, length, at, result)
            } else if vectors >= 2 {
                let rows = combine_whole::<S, T, M, 2>(simd, weights, source, offsets, at);
                store(simd, &rows, length, at, result)
            } else if vectors == 1 {
                let rows = combine_whole::<S, T, M, 1>(simd, weights, source, offsets, at);
                store(simd, &rows, length, at, result)
            } else {
                let width = lanes.min(length - at);
                let rows = combine_part::<S, T, M>(simd, weights, source, offsets, at, width);
                store(simd, &rows, length, at, result)
            };
    }
}

/// Writes `V` vectors to each row, from position `at` to at most the end of the row, and returns `V`.
#[inline(always)]
fn store<S: Simd, T: Element, const M: usize, const V: usize>(
    simd: S,
    rows: &[[T::Vector<S>; V]; M],
    length: usize,
    at: usize,
    result: &mut [T],
) -> usize {
    let lanes = T::lanes::<S>();
    for i in 0..M {
        let row = &mut result[i * length..(i + 1) * length][at..];
        if row.len() >= V * lanes {
            T::vectors_mut::<S>(row)[..V].copy_from_slice(&rows[i]);
        } else {
            for (part, vector) in row.chunks_mut(lanes).zip(&rows[i]) {
                T::store(simd, part, *vector);
            }
        }
    }
    V
}

/// Computes `V` vectors of each row, from position `at` on. The source must have `V` whole vectors at each offset.
#[inline(always)]
fn combine_whole<S: Simd, T: Element, const M: usize, const V: usize>(
    simd: S,
    weights: &[T],
    source: &[T],
    offsets: &[usize],
    at: usize,
) -> [[T::Vector<S>; V]; M] {
    let width = V * T::lanes::<S>();
    let mut sums = [[T::splat(simd, T::zero()); V]; M];
    for (weights, offset) in weights.as_chunks::<M>().0.iter().zip(offsets) {
        let source = &source[at + offset..][..width];
        let source = &T::vectors::<S>(source)[..V];
        let source: [T::Vector<S>; V] = from_fn(|j| source[j]);
        for i in 0..M {
            let weight = T::splat(simd, weights[i]);
            for j in 0..V {
                sums[i][j] = T::mul_add(simd, weight, source[j], sums[i][j]);
            }
        }
    }
    sums
}

/// Computes a vector of each row, from position `at` on. It reads only `width` elements at each offset of the source;
/// the other lanes are 0.
#[inline(always)]
fn combine_part<S: Simd, T: Element, const M: usize>(
    simd: S,
    weights: &[T],
    source: &[T],
    offsets: &[usize],
    at: usize,
    width: usize,
) -> [[T::Vector<S>; 1]; M] {
    let mut sums = [[T::splat(simd, T::zero()); 1]; M];
    for (weights, offset) in weights.as_chunks::<M>().0.iter().zip(offsets) {
        let source = T::load(simd, &source[at + offset..][..width]);
        for i in 0..M {
            sums[i][0] = T::mul_add(simd, T::splat(simd, weights[i]), source, sums[i][0]);
        }
    }
    sums
}

/// Adds `left[lefts[i] + p] · right[rights[j] + p]` to `sums[i][j]`, for all positions `p` below `length`. The lanes of
/// `sums[i][j]` are partial sums.
#[inline(always)]
pub(super) fn correlate<S: Simd, T: Element, const M: usize, const N: usize>(
    simd: S,
    (left, lefts): (&[T], [usize; M]),
    (right, rights): (&[T], [usize; N]),
    length: usize,
    mut sums: [[T::Vector<S>; N]; M],
) -> [[T::Vector<S>; N]; M] {
    let lanes = T::lanes::<S>();
    let count = length / lanes;
    let lefts = lefts.map(|at| &left[at..][..length]);
    let rights = rights.map(|at| &right[at..][..length]);
    let left_vectors = lefts.map(|row| &T::vectors::<S>(row)[..count]);
    let right_vectors = rights.map(|row| &T::vectors::<S>(row)[..count]);
    for p in 0..count {
        let left: [T::Vector<S>; M] = from_fn(|i| left_vectors[i][p]);
        for j in 0..N {
            let right = right_vectors[j][p];
            for i in 0..M {
                sums[i][j] = T::mul_add(simd, left[i], right, sums[i][j]);
            }
        }
    }
    let rest = count * lanes;
    if rest < length {
        let left: [T::Vector<S>; M] = from_fn(|i| T::load(simd, &lefts[i][rest..]));
        for j in 0..N {
            let right = T::load(simd, &rights[j][rest..]);
            for i in 0..M {
                sums[i][j] = T::mul_add(simd, left[i], right, sums[i][j]);
            }
        }
    }
    sums
}
