//! The format of numbers on the wire, and their sums, in `f32`, or in `f64` for short vectors.

use bytes::Bytes;
use shared_proto::kernel::Kernel;
use shared_proto::payload::{Dtype, Elements, LeF32};

use crate::pieces::PIECE_ELEMENTS;
use crate::schedule::Combine;

/// Returns numbers as bytes in the format `wire`. With a 16-bit format, also rounds `numbers` in place, so that this
/// rank continues with the same numbers as its peers.
pub(crate) fn to_wire(numbers: &mut [f32], wire: Dtype) -> Bytes {
    let bytes = shared_proto::payload::to_bytes(numbers);
    if matches!(wire, Dtype::F32 | Dtype::Unspecified) {
        return bytes;
    }
    let rounded = Elements::new(bytes, wire);
    rounded.copy_to(numbers);
    rounded.into_parts().1
}

/// Rounds numbers to values that the format `wire` can represent.
pub(crate) fn round(numbers: &mut [f32], wire: Dtype) {
    if !matches!(wire, Dtype::F32 | Dtype::Unspecified) {
        for part in numbers.chunks_mut(PIECE_ELEMENTS) {
            to_wire(part, wire);
        }
    }
}

/// Adds received numbers to `numbers`, or replaces `numbers` with them. Both must have the same length.
pub(crate) fn combine(numbers: &mut [f32], received: Bytes, wire: Dtype, combine: Combine) {
    let received = Elements::of_bytes(received, wire);
    received.for_parts(|range, part| match combine {
        Combine::Add => add(&mut numbers[range], part),
        Combine::Replace => replace(&mut numbers[range], part),
    });
}

fn add(numbers: &mut [f32], others: &[LeF32]) {
    Kernel::best().run(|| {
        for (number, other) in numbers.iter_mut().zip(others) {
            *number += other.get();
        }
    });
}

fn replace(numbers: &mut [f32], others: &[LeF32]) {
    Kernel::best().run(|| {
        for (number, other) in numbers.iter_mut().zip(others) {
            *number = other.get();
        }
    });
}

/// Returns a short vector as bytes for the wire: little-endian `f64`.
pub(crate) fn short_to_wire(numbers: &[f64]) -> Bytes {
    numbers
        .iter()
        .flat_map(|number| number.to_le_bytes())
        .collect()
}

/// Adds a received short vector to `numbers`, or replaces `numbers` with it. In a sum, an empty vector stands for
/// zeros. Returns `None` if the lengths differ, or if `received` is not a whole number of `f64`s.
pub(crate) fn combine_short(
    numbers: &mut Vec<f64>,
    received: &[u8],
    combine: Combine,
) -> Option<()> {
    let (received, rest) = received.as_chunks();
    let received = received.iter().map(|bytes| f64::from_le_bytes(*bytes));
    if !rest.is_empty() {
        return None;
    }
    match combine {
        Combine::Add if received.len() == 0 => {}
        Combine::Add if !numbers.is_empty() => {
            if received.len() != numbers.len() {
                return None;
            }
            let pairs = numbers.iter_mut().zip(received);
            pairs.for_each(|(number, other)| *number += other);
        }
        Combine::Add | Combine::Replace => *numbers = received.collect(),
    }
    Some(())
}
