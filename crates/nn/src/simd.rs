//! SIMD vectors of `f32` and `f64`. The `pulp` crate chooses the instructions of the CPU at run time: AVX-512, AVX2 or
//! NEON.
//!
//! A loop that should use these instructions is a function with the attribute [`pulp::with_simd`], or an implementation
//! of [`WithSimd`], and is `#[inline(always)]`. Do not pass such a loop to `Arch::dispatch` as a closure. The compiler
//! inlines only a small closure into the function with the instructions, and compiles a larger closure for the oldest
//! CPU.

use candle_core::WithDType;
use pulp::{Simd, WithSimd};

/// The type of a tensor's elements: `f32` or `f64`.
pub(crate) trait Element: WithDType {
    /// A register full of elements; each element is in a lane.
    type Vector<S: Simd>: Copy;

    /// Returns the number of lanes of a vector.
    #[inline(always)]
    fn lanes<S: Simd>() -> usize {
        size_of::<Self::Vector<S>>() / size_of::<Self>()
    }

    /// Returns a vector with `value` in each lane.
    fn splat<S: Simd>(simd: S, value: Self) -> Self::Vector<S>;

    /// Returns a slice as vectors. Elements at the end that do not fill a vector are left out.
    fn vectors<S: Simd>(slice: &[Self]) -> &[Self::Vector<S>];

    /// Returns a slice as vectors. Elements at the end that do not fill a vector are left out.
    fn vectors_mut<S: Simd>(slice: &mut [Self]) -> &mut [Self::Vector<S>];

    /// Returns a vector with the first elements of a slice. If the slice is shorter, the other lanes are 0.
    fn load<S: Simd>(simd: S, slice: &[Self]) -> Self::Vector<S>;

    /// Writes a vector to the start of a slice. If the slice is shorter, the other lanes are not written.
    fn store<S: Simd>(simd: S, slice: &mut [Self], vector: Self::Vector<S>);

    /// Returns `a · b + c`, lane by lane.
    fn mul_add<S: Simd>(
        simd: S,
        a: Self::Vector<S>,
        b: Self::Vector<S>,
        c: Self::Vector<S>,
    ) -> Self::Vector<S>;

    /// Returns the sum of the lanes.
    fn sum<S: Simd>(simd: S, vector: Self::Vector<S>) -> Self;

    /// Returns the exponential. The compiler can vectorise a loop over it for `f32`, and not for `f64`.
    fn exponential(self) -> Self;

    /// Returns the error function and `exp(-x²)`, an intermediate value. The derivative of GELU needs both.
    fn error_function_and_exponential(self) -> (Self, Self);
}

macro_rules! element {
    (
        $type:ty, $vector:ident, $splat:ident, $vectors:ident, $vectors_mut:ident, $load:ident, $store:ident,
        $mul_add:ident, $sum:ident, $exp:path, $erf:path
    ) => {
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
            fn error_function_and_exponential(self) -> (Self, Self) {
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
    error_function_f64
);

/// The number of elements that a loop takes at a time. With a fixed number the compiler vectorises the inner loop.
pub(crate) const BLOCK: usize = 16;

/// Appends `of(x)` for each element `x`. Call it only inside a function with [`pulp::with_simd`]. The compiler vectorises
/// this loop, but not `Vec::extend`.
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

/// Appends `of(left, right)` for each pair of elements. Call it only inside a function with [`pulp::with_simd`].
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

/// Computes the sum of a slice. It keeps one partial sum in each lane of a vector, and adds these at the end.
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

/// Returns the exponential of an `f32`, with an error of at most two units in the last place (Cephes, `expf`). Below
/// -87 it returns 0, and above 88 the exponential of 88.
#[inline(always)]
fn exponential(x: f32) -> f32 {
    // These comparisons keep NaN.
    let small = x < -87.0;
    let x = if x > 88.0 { 88.0 } else { x };
    let x = if small { 0.0 } else { x };
    // x = n ln 2 + r. The constant ln 2 is split in two; the first part has few bits, so its product with n is exact.
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

/// Returns the error function of an `f32`, with an error of at most 2e-7 (Abramowitz and Stegun, 7.1.26), and `exp(-x²)`.
#[inline(always)]
fn error_function(x: f32) -> (f32, f32) {
    let size = x.abs();
    let t = 1.0 / (1.0 + 0.327_591_1 * size);
    let p = 1.061_405_4;
    let p = p * t - 1.453_152;
    let p = p * t + 1.421_413_7;
    let p = p * t - 0.284_496_74;
    let p = p * t + 0.254_829_6;
    let exponential = exponential(-size * size);
    ((1.0 - p * t * exponential).copysign(x), exponential)
}

fn error_function_f64(x: f64) -> (f64, f64) {
    (candle_core::cpu::erf::erf_f64(x), (-x * x).exp())
}
