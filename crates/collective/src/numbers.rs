//! Numbers of a piece as they travel, and their sums, which are made in `f32`.

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
    let rounded = Elements::of(bytes, wire);
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
