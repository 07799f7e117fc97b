//! Checks that all numbers are finite.

use bytes::Bytes;

use super::{Dtype, LeF32, PART};
use crate::kernel::Kernel;

/// Returns whether all elements are finite.
pub fn all_finite(values: &[LeF32]) -> bool {
    all_below(
        values,
        |v| u32::from_le_bytes(v.0) & 0x7fff_ffff,
        0x7f80_0000,
    )
}

/// Returns whether each element is still finite after its conversion to `dtype`.
pub(super) fn all_fit(values: &[LeF32], dtype: Dtype) -> bool {
    // From this number on, the nearest one of the type is infinite.
    let too_large = match dtype {
        Dtype::F32 | Dtype::Unspecified => f32::INFINITY.to_bits(),
        Dtype::Bf16 => 0x7f7f_8000,
        Dtype::F16 => 65520f32.to_bits(),
    };
    all_below(values, |v| u32::from_le_bytes(v.0) & 0x7fff_ffff, too_large)
}

/// Returns whether all 16-bit numbers are finite. A number with all bits of its exponent set is NaN or infinite.
pub(super) fn finite_halves(bytes: &Bytes, exponent: u16) -> bool {
    let halves = bytemuck::cast_slice::<u8, [u8; 2]>(bytes);
    all_below(halves, |v| u16::from_le_bytes(*v) & 0x7fff, exponent)
}

/// Returns whether all magnitudes are below a limit. The bits of a magnitude, as an integer, have the order of the
/// numbers.
fn all_below<T, B: Ord + Default + Copy>(
    values: &[T],
    magnitude: impl Fn(&T) -> B,
    limit: B,
) -> bool {
    // Parts of a fixed size without an early exit let the compiler use wide registers.
    let largest = |part: &[T]| part.iter().map(&magnitude).fold(B::default(), B::max);
    Kernel::best().run(|| values.chunks(PART).all(|part| largest(part) < limit))
}
