//! Vectors of the CPU that the program runs on, of `f32` and of `f64`: by the `pulp` crate, which picks AVX-512,
//! AVX2 or NEON at run time.

use candle_core::WithDType;
use pulp::{Simd, WithSimd};

/// A type of numbers that the layers compute with.
pub(crate) trait Element: WithDType {
    /// Some of these numbers in one register.
    type Vector<S: Simd>: Copy;

    /// The number of them in a register.
    #[inline(always)]
    fn lanes<S: Simd>() -> usize {
        size_of::<Self::Vector<S>>() / size_of::<Self>()
    }

    fn splat<S: Simd>(simd: S, value: Self) -> Self::Vector<S>;

    /// Returns the whole vectors at the start of a slice.
    fn vectors<S: Simd>(slice: &[Self]) -> &[Self::Vector<S>];

    /// Returns the whole vectors at the start of a slice.
    fn vectors_mut<S: Simd>(slice: &mut [Self]) -> &mut [Self::Vector<S>];

    /// Returns a vector of at most as many numbers as it has lanes, the rest of them 0.
    fn load<S: Simd>(simd: S, slice: &[Self]) -> Self::Vector<S>;

    /// Writes as many numbers as the slice has, at most as many as the vector.
    fn store<S: Simd>(simd: S, slice: &mut [Self], vector: Self::Vector<S>);

    /// Returns `a · b + c`.
    fn mul_add<S: Simd>(
        simd: S,
        a: Self::Vector<S>,
        b: Self::Vector<S>,
        c: Self::Vector<S>,
    ) -> Self::Vector<S>;

    /// Returns the sum over the lanes.
    fn sum<S: Simd>(simd: S, vector: Self::Vector<S>) -> Self;

    /// Returns the exponential, in a way of which the compiler makes vectors, if there is one.
    fn exponential(self) -> Self;

    /// Returns the error function.
    fn error_function(self) -> Self;
}

macro_rules! element {
    ($type:ty, $vector:ident, $splat:ident, $vectors:ident, $vectors_mut:ident, $load:ident, $store:ident, $mul_add:ident, $sum:ident, $exp:path, $erf:path) => {
        impl Element for $type {
            type Vector<S: Simd> = S::$vector;

            #[inline(always)]
            fn splat<S: Simd>(simd: S, value: Self) -> Self::Vector<S> {
                simd.$splat(value)
            }

            #[inline(always)]
            fn vectors<S: Simd>(slice: &[Self]) -> &[Self::Vector<S>] {
                S::$vectors(slice).0
            }

            #[inline(always)]
            fn vectors_mut<S: Simd>(slice: &mut [Self]) -> &mut [Self::Vector<S>] {
                S::$vectors_mut(slice).0
            }

            #[inline(always)]
            fn load<S: Simd>(simd: S, slice: &[Self]) -> Self::Vector<S> {
                simd.$load(slice)
            }

            #[inline(always)]
            fn store<S: Simd>(simd: S, slice: &mut [Self], vector: Self::Vector<S>) {
                simd.$store(slice, vector);
            }

            #[inline(always)]
            fn mul_add<S: Simd>(
                simd: S,
                a: Self::Vector<S>,
                b: Self::Vector<S>,
                c: Self::Vector<S>,
            ) -> Self::Vector<S> {
                simd.$mul_add(a, b, c)
            }

            #[inline(always)]
            fn sum<S: Simd>(simd: S, vector: Self::Vector<S>) -> Self {
                simd.$sum(vector)
            }

            #[inline(always)]
            fn exponential(self) -> Self {
                $exp(self)
            }

            #[inline(always)]
            fn error_function(self) -> Self {
                $erf(self)
            }
        }
    };
}

element!(
    f32,
    f32s,
    splat_f32s,
    as_simd_f32s,
    as_mut_simd_f32s,
    partial_load_f32s,
    partial_store_f32s,
    mul_add_e_f32s,
    reduce_sum_f32s,
    exponential,
    error_function
);
element!(
    f64,
    f64s,
    splat_f64s,
    as_simd_f64s,
    as_mut_simd_f64s,
    partial_load_f64s,
    partial_store_f64s,
    mul_add_e_f64s,
    reduce_sum_f64s,
    f64::exp,
    candle_core::cpu::erf::erf_f64
);

/// How many numbers the loops below take at a time, so that the compiler makes vectors of them.
pub(crate) const BLOCK: usize = 16;

/// Appends a function of each element. Call it within [`pulp::Arch::dispatch`], like [`extend_with_pairs`]: `Vec::extend`
/// does not become vectors there.
#[inline(always)]
pub(crate) fn extend_with<T: Element>(result: &mut Vec<T>, values: &[T], of: impl Fn(T) -> T) {
    let (blocks, rest) = values.as_chunks::<BLOCK>();
    for block in blocks {
        let mut new = [T::zero(); BLOCK];
        for i in 0..BLOCK {
            new[i] = of(block[i]);
        }
        result.extend_from_slice(&new);
    }
    for x in rest {
        result.push(of(*x));
    }
}

/// Appends a function of each pair of elements.
#[inline(always)]
pub(crate) fn extend_with_pairs<T: Element>(
    result: &mut Vec<T>,
    left: &[T],
    right: &[T],
    of: impl Fn(T, T) -> T,
) {
    let (lefts, left_rest) = left.as_chunks::<BLOCK>();
    let (rights, right_rest) = right.as_chunks::<BLOCK>();
    for (left, right) in lefts.iter().zip(rights) {
        let mut new = [T::zero(); BLOCK];
        for i in 0..BLOCK {
            new[i] = of(left[i], right[i]);
        }
        result.extend_from_slice(&new);
    }
    for (left, right) in left_rest.iter().zip(right_rest) {
        result.push(of(*left, *right));
    }
}

/// The sum of a slice, of which a vector's worth of partial sums is kept.
pub(crate) struct Sum<'a, T>(pub(crate) &'a [T]);

impl<T: Element> WithSimd for Sum<'_, T> {
    type Output = T;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> T {
        let one = T::splat(simd, T::one());
        let mut sum = T::splat(simd, T::zero());
        let vectors = T::vectors::<S>(self.0);
        for vector in vectors {
            sum = T::mul_add(simd, *vector, one, sum);
        }
        let rest = &self.0[vectors.len() * T::lanes::<S>()..];
        T::sum(simd, T::mul_add(simd, T::load(simd, rest), one, sum))
    }
}

/// The exponential of an `f32`, within two units in the last place; 0 below -87, and the largest at 88.
#[inline(always)]
fn exponential(x: f32) -> f32 {
    // A comparison written this way keeps NaN.
    let small = x < -87.0;
    let x = if x > 88.0 { 88.0 } else { x };
    let x = if small { 0.0 } else { x };
    // x = n ln 2 + r; ln 2 in two parts, the first of which has few bits, so that its product is exact.
    let n = (x * std::f32::consts::LOG2_E + 12_582_912.0) - 12_582_912.0;
    let r = x - n * 0.693_359_4;
    let r = r + n * 2.121_944_4e-4;
    let p = 1.987_569_1e-4;
    let p = p * r + 1.398_2e-3;
    let p = p * r + 8.333_452e-3;
    let p = p * r + 4.166_579_6e-2;
    let p = p * r + 1.666_666_6e-1;
    let p = p * r + 0.5;
    let p = p * r * r + r + 1.0;
    let power = f32::from_bits(((n as i32 + 127) << 23) as u32);
    if small { 0.0 } else { p * power }
}

/// The error function of an `f32`, within 2e-7 (Abramowitz and Stegun, 7.1.26).
#[inline(always)]
fn error_function(x: f32) -> f32 {
    let size = x.abs();
    let t = 1.0 / (1.0 + 0.327_591_1 * size);
    let p = 1.061_405_4;
    let p = p * t - 1.453_152;
    let p = p * t + 1.421_413_7;
    let p = p * t - 0.284_496_74;
    let p = p * t + 0.254_829_6;
    (1.0 - p * t * exponential(-size * size)).copysign(x)
}
