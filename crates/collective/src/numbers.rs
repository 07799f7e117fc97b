//! Numbers of a piece as they travel, and their sums, which are made in `f32`, or in `f64` for short vectors.

use bytes::Bytes;
use shared_proto::kernel::Kernel;
use shared_proto::payload::{Dtype, Elements, LeF32};

use crate::pieces::PIECE_ELEMENTS;
use crate::schedule::Combine;

/// Returns the bytes of numbers on the wire. With a 16-bit `wire` the numbers themselves are rounded too: a rank then
/// continues with the numbers that its peers have.
pub(crate) fn to_wire(numbers: &mut [f32], wire: Dtype) -> Bytes {
    let bytes = shared_proto::payload::to_bytes(numbers);
    if matches!(wire, Dtype::F32 | Dtype::Unspecified) {
        return bytes;
    }
    let rounded = Elements::new(bytes, wire);
    rounded.copy_to(numbers);
    rounded.into_parts().1
}

/// Rounds numbers to those that the wire can carry.
pub(crate) fn round(numbers: &mut [f32], wire: Dtype) {
    if !matches!(wire, Dtype::F32 | Dtype::Unspecified) {
        for part in numbers.chunks_mut(PIECE_ELEMENTS) {
            to_wire(part, wire);
        }
    }
}

/// Combines numbers with those that have arrived, of which there must be as many.
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

/// Returns the bytes of a short vector on the wire.
pub(crate) fn short_to_wire(numbers: &[f64]) -> Bytes {
    numbers
        .iter()
        .flat_map(|number| number.to_le_bytes())
        .collect()
}

/// Combines a short vector with one that has arrived. An empty one stands for zeros. Returns nothing if the lengths differ.
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
