//! The conversion to 16-bit numbers.

use bytes::Bytes;
use half::f16;
use half::slice::HalfFloatSliceExt;

use super::{LeF32, PART, elements};
use crate::kernel::Kernel;

/// Rounds to `bf16`.
pub(super) fn to_bf16(values: &Bytes) -> Bytes {
    // The same as `bf16::from_f32`, in a form for which compilers use wide registers.
    let half = |v: &LeF32| {
        let bits = u32::from_le_bytes(v.0);
        let nearest_even = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        let half = match v.get().is_nan() {
            true => bits >> 16 | 0x40,
            false => nearest_even,
        };
        (half as u16).to_le()
    };
    let values = elements(values).iter();
    Kernel::best().run(|| owned(values.map(half).collect()))
}

/// Rounds to `f16`.
pub(super) fn to_f16(values: &Bytes) -> Bytes {
    let mut numbers = [0.0; PART];
    let mut halves = [f16::ZERO; PART];
    let mut all = Vec::with_capacity(values.len() / size_of::<f32>());
    for part in elements(values).chunks(PART) {
        for (number, element) in numbers.iter_mut().zip(part) {
            *number = element.get();
        }
        halves[..part.len()].convert_from_f32_slice(&numbers[..part.len()]);
        all.extend(
            halves[..part.len()]
                .iter()
                .map(|half| half.to_bits().to_le()),
        );
    }
    owned(all)
}

fn owned(halves: Vec<u16>) -> Bytes {
    struct Owned(Vec<u16>);
    impl AsRef<[u8]> for Owned {
        fn as_ref(&self) -> &[u8] {
            bytemuck::cast_slice(&self.0)
        }
    }
    Bytes::from_owner(Owned(halves))
}
