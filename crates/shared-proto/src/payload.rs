//! Tensors as bytes. Elements travel in little-endian order, unaligned, and are read in the memory in which they
//! arrived: no copy is made to align them.
//!
//! Weights and gradients may travel as 16-bit numbers, rounded to the nearest, ties to even. Servers
//! keep and compute `f32` all the same.

mod finite;
mod halves;

use std::ops::Range;
use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use bytes::Bytes;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use finite::{all_fit, finite_halves};
use halves::{to_bf16, to_f16};

use crate::kernel::Kernel;
use crate::kind::VariableKind;
use crate::refusal::{Reason, Refusal};
use crate::wire;

pub use crate::wire::Dtype;
pub use finite::all_finite;

/// An `f32` as it travels: four bytes, little-endian, without alignment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub struct LeF32([u8; 4]);

impl LeF32 {
    /// Returns the number.
    #[inline]
    pub fn get(self) -> f32 {
        f32::from_le_bytes(self.0)
    }
}

impl From<f32> for LeF32 {
    #[inline]
    fn from(value: f32) -> Self {
        Self(value.to_le_bytes())
    }
}

/// Copies numbers into bytes for the wire.
pub fn to_bytes(values: &[f32]) -> Bytes {
    if cfg!(target_endian = "little") {
        Bytes::copy_from_slice(bytemuck::cast_slice(values))
    } else {
        values.iter().flat_map(|v| v.to_le_bytes()).collect()
    }
}

/// Returns numbers as bytes for the wire. On little-endian machines, the bytes share the memory of the numbers.
pub fn share(values: &Arc<Vec<f32>>) -> Bytes {
    struct Shared(Arc<Vec<f32>>);
    impl AsRef<[u8]> for Shared {
        fn as_ref(&self) -> &[u8] {
            bytemuck::cast_slice(&self.0)
        }
    }
    if cfg!(target_endian = "little") {
        Bytes::from_owner(Shared(Arc::clone(values)))
    } else {
        to_bytes(values)
    }
}

/// Converts numbers to the wire's byte order in place. Afterwards `values` must not be used as numbers.
pub fn in_place(values: &mut [f32]) -> &[LeF32] {
    if cfg!(target_endian = "big") {
        for value in values.iter_mut() {
            *value = f32::from_bits(value.to_bits().swap_bytes());
        }
    }
    bytemuck::cast_slice(values)
}

/// Returns bytes that have travelled as `f32` as numbers.
pub fn elements(bytes: &Bytes) -> &[LeF32] {
    bytemuck::cast_slice(bytes)
}

/// Returns a dense payload of `f32`.
pub fn dense(values: Bytes) -> wire::Payload {
    Elements {
        dtype: Dtype::F32,
        bytes: values,
    }
    .into()
}

/// The elements of a block as they travel: their type, and little-endian bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Elements {
    dtype: Dtype,
    bytes: Bytes,
}

/// The number of elements that are converted or checked at a time.
const PART: usize = 1024;

impl Elements {
    /// Converts `f32` to `dtype`. The memory is shared if `dtype` is `f32`.
    pub fn new(values: Bytes, dtype: Dtype) -> Self {
        let bytes = match dtype {
            Dtype::Bf16 => to_bf16(&values),
            Dtype::F16 => to_f16(&values),
            Dtype::F32 | Dtype::Unspecified => values,
        };
        let dtype = match dtype {
            Dtype::Unspecified => Dtype::F32,
            dtype => dtype,
        };
        Self { dtype, bytes }
    }

    /// Returns a range of the elements, which shares their memory.
    ///
    /// # Panics
    /// If the range ends after the last element.
    #[must_use]
    pub fn slice(&self, range: Range<usize>) -> Self {
        let size = self.dtype.size();
        Self {
            dtype: self.dtype,
            bytes: self.bytes.slice(range.start * size..range.end * size),
        }
    }

    /// Converts the elements to `dtype`. The memory is shared if they have that type already. A conversion from another
    /// type than `f32` goes by way of `f32`, with a copy.
    #[must_use]
    pub fn to(&self, dtype: Dtype) -> Self {
        match (self.dtype, dtype) {
            (Dtype::F32, dtype) => Self::new(self.bytes.clone(), dtype),
            (from, to) if from == to => self.clone(),
            _ => Self::from(self.to_vec()).to(dtype),
        }
    }

    /// Returns whether each element is still finite after its conversion to `dtype`.
    pub fn all_fit(&self, dtype: Dtype) -> bool {
        let mut fit = true;
        self.for_parts(|_, part| fit &= all_fit(part, dtype));
        fit
    }

    /// Returns elements of type `dtype` from their little-endian bytes.
    pub fn of_bytes(bytes: Bytes, dtype: Dtype) -> Self {
        Self { dtype, bytes }
    }

    /// Reads the payload of a block of `expected` elements of a variable of this kind.
    ///
    /// # Errors
    /// [`Reason::WrongDtype`], [`Reason::WrongShape`] or [`Reason::Malformed`]. The message lacks its subject; the
    /// caller puts the name of the block before it.
    pub fn read(
        payload: Option<&wire::Payload>,
        kind: VariableKind,
        expected: usize,
    ) -> Result<Self, Refusal> {
        let payload = payload.ok_or_else(|| Refusal::new(Reason::Malformed, "has no payload"))?;
        match &payload.values {
            Some(wire::payload::Values::Dense(bytes)) => {
                Self::read_bytes(payload.dtype, bytes, expected)
            }
            Some(wire::payload::Values::Rows(_)) => Err(Refusal::new(
                Reason::WrongDtype,
                format!("holds rows, but {kind} variables are dense; send all elements as `dense`"),
            )),
            None => Err(Refusal::new(
                Reason::Malformed,
                "has a payload without values",
            )),
        }
    }

    /// Reads `expected` elements. `dtype` is the number of their type on the wire.
    ///
    /// # Errors
    /// [`Reason::WrongDtype`] or [`Reason::WrongShape`].
    pub(crate) fn read_bytes(dtype: i32, bytes: &Bytes, expected: usize) -> Result<Self, Refusal> {
        let dtype = match Dtype::try_from(dtype) {
            Ok(Dtype::Unspecified) | Err(_) => {
                return Err(Refusal::new(
                    Reason::WrongDtype,
                    format!("has dtype {dtype}; there are DTYPE_F32, DTYPE_BF16 and DTYPE_F16"),
                ));
            }
            Ok(dtype) => dtype,
        };
        let size = dtype.size();
        match bytes.len() == expected * size {
            true => Ok(Self {
                dtype,
                bytes: bytes.clone(),
            }),
            false => Err(Refusal::new(
                Reason::WrongShape,
                format!(
                    "has {} bytes; the block's {expected} elements of {size} bytes take {}",
                    bytes.len(),
                    expected * size
                ),
            )),
        }
    }

    /// Returns the type of the elements, and their bytes.
    pub fn into_parts(self) -> (Dtype, Bytes) {
        (self.dtype, self.bytes)
    }

    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.bytes.len() / self.dtype.size()
    }

    /// Returns whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Returns the number of bytes of the elements.
    pub fn bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Returns the same elements in memory of their own.
    #[must_use]
    pub fn copied(&self) -> Self {
        Self {
            dtype: self.dtype,
            bytes: Bytes::copy_from_slice(&self.bytes),
        }
    }

    /// Returns whether all elements are finite.
    pub fn all_finite(&self) -> bool {
        match self.dtype {
            Dtype::Bf16 => finite_halves(&self.bytes, 0x7f80),
            Dtype::F16 => finite_halves(&self.bytes, 0x7c00),
            Dtype::F32 | Dtype::Unspecified => all_finite(elements(&self.bytes)),
        }
    }

    /// Calls `f` with ranges of elements and these elements as `f32`, from the first to the last: with all at once if
    /// they travelled as `f32`, otherwise with parts that fit into the first-level cache.
    pub fn for_parts(&self, mut f: impl FnMut(Range<usize>, &[LeF32])) {
        if matches!(self.dtype, Dtype::F32 | Dtype::Unspecified) {
            return f(0..self.len(), elements(&self.bytes));
        }
        let mut numbers = [0.0; PART];
        for start in (0..self.len()).step_by(PART) {
            let range = start..self.len().min(start + PART);
            let numbers = &mut numbers[..range.len()];
            self.copy_part(range.start, numbers);
            f(range, in_place(numbers));
        }
    }

    /// Returns the elements without a copy; `None` if their type is not `f32`.
    pub fn as_f32(&self) -> Option<&[LeF32]> {
        let is_f32 = matches!(self.dtype, Dtype::F32 | Dtype::Unspecified);
        is_f32.then(|| elements(&self.bytes))
    }

    /// Returns all elements as numbers.
    pub fn to_vec(&self) -> Vec<f32> {
        let mut numbers = vec![0.0; self.len()];
        self.copy_to(&mut numbers);
        numbers
    }

    /// Writes as many elements as fit to `numbers`.
    pub fn copy_to(&self, numbers: &mut [f32]) {
        self.copy_part(0, numbers);
    }

    fn copy_part(&self, start: usize, numbers: &mut [f32]) {
        let bytes = &self.bytes[start * self.dtype.size()..];
        match self.dtype {
            Dtype::F32 | Dtype::Unspecified => Kernel::best().run(|| {
                let elements: &[LeF32] = bytemuck::cast_slice(bytes);
                for (number, element) in numbers.iter_mut().zip(elements) {
                    *number = element.get();
                }
            }),
            Dtype::Bf16 => Kernel::best().run(|| {
                let halves = bytemuck::cast_slice::<u8, [u8; 2]>(bytes);
                for (number, half) in numbers.iter_mut().zip(halves) {
                    *number = f32::from_bits(u32::from(u16::from_le_bytes(*half)) << 16);
                }
            }),
            Dtype::F16 => {
                let mut aligned = [f16::ZERO; PART];
                let halves = bytemuck::cast_slice::<u8, [u8; 2]>(bytes);
                for (numbers, halves) in numbers.chunks_mut(PART).zip(halves.chunks(PART)) {
                    for (to, from) in aligned.iter_mut().zip(halves) {
                        *to = f16::from_le_bytes(*from);
                    }
                    let count = numbers.len().min(halves.len());
                    aligned[..count].convert_to_f32_slice(&mut numbers[..count]);
                }
            }
        }
    }
}

impl From<Vec<f32>> for Elements {
    /// On little-endian machines, the elements share the memory of the numbers.
    fn from(values: Vec<f32>) -> Self {
        Self::new(share(&Arc::new(values)), Dtype::F32)
    }
}

impl From<Elements> for wire::Payload {
    fn from(elements: Elements) -> Self {
        Self {
            dtype: elements.dtype.into(),
            values: Some(wire::payload::Values::Dense(elements.bytes)),
        }
    }
}

impl Dtype {
    /// Returns the largest finite number of the type.
    pub fn largest(self) -> f32 {
        match self {
            Self::F32 | Self::Unspecified => f32::MAX,
            Self::Bf16 => bf16::MAX.to_f32(),
            Self::F16 => f16::MAX.to_f32(),
        }
    }

    /// Returns the number of bytes of an element.
    pub fn size(self) -> usize {
        match self {
            Self::F32 | Self::Unspecified => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const KIND: VariableKind = VariableKind::Trained;

    /// Returns every kind of number, and those at the limits of conversions.
    fn anything() -> impl Strategy<Value = f32> {
        prop_oneof![
            20 => prop::num::f32::NORMAL,
            1 => prop::num::f32::ANY,
            1 => prop::sample::select(vec![
                f32::NAN, -f32::NAN, f32::from_bits(0x7f80_0001), f32::INFINITY, f32::NEG_INFINITY,
                0.0, -0.0, f32::MIN_POSITIVE, 1e-40, f32::MAX, f32::from_bits(0x7f7f_7fff),
                f32::from_bits(0x7f7f_8000), 65504.0, 65519.99, 65520.0, -65520.0,
            ]),
        ]
    }

    /// Returns the same elements at another address, which may be odd.
    fn shifted(elements: Elements, shift: usize) -> Elements {
        let mut bytes = vec![0u8; shift];
        bytes.extend_from_slice(&elements.bytes);
        Elements {
            bytes: Bytes::from(bytes).slice(shift..),
            ..elements
        }
    }

    fn numbers(elements: &Elements) -> Vec<f32> {
        let mut numbers = Vec::new();
        elements.for_parts(|range, part| {
            assert_eq!(range.start, numbers.len());
            numbers.extend(part.iter().map(|v| v.get()));
        });
        numbers
    }

    proptest! {
        #[test]
        fn numbers_survive_the_wire(values in prop::collection::vec(anything(), 0..100), shift in 0usize..4) {
            let sent = shifted(Elements::new(to_bytes(&values), Dtype::F32), shift);
            let read = Elements::read(Some(&sent.into()), KIND, values.len()).unwrap();
            let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            prop_assert_eq!(bits(&numbers(&read)), bits(&values));
        }

        #[test]
        fn halves_are_rounded_to_the_nearest_even(
            values in prop::collection::vec(anything(), 0..2500),
            shift in 0usize..2,
        ) {
            for (dtype, rounded) in [
                (Dtype::Bf16, (|v| bf16::from_f32(v).to_f32()) as fn(f32) -> f32),
                (Dtype::F16, |v| f16::from_f32(v).to_f32()),
            ] {
                let sent = shifted(Elements::new(to_bytes(&values), dtype), shift);
                prop_assert_eq!(sent.bytes(), 2 * values.len());
                let read = Elements::read(Some(&sent.into()), KIND, values.len()).unwrap();
                let expected: Vec<f32> = values.iter().copied().map(rounded).collect();
                for (read, expected) in numbers(&read).iter().zip(&expected) {
                    let same = read.to_bits() == expected.to_bits();
                    prop_assert!(same || (read.is_nan() && expected.is_nan()), "{read} {expected}");
                }
                let finite = expected.iter().all(|v| v.is_finite());
                prop_assert_eq!(read.all_finite(), finite);
                prop_assert_eq!(Elements::from(values.clone()).all_fit(dtype), finite);
                prop_assert_eq!(&Elements::from(values.clone()).to(dtype), &Elements::new(to_bytes(&values), dtype));
            }
        }

        #[test]
        fn finite_means_finite(values in prop::collection::vec(anything(), 0..20)) {
            let wire: Vec<LeF32> = values.iter().copied().map(LeF32::from).collect();
            prop_assert_eq!(all_finite(&wire), values.iter().all(|v| v.is_finite()));
        }
    }

    #[test]
    fn ties_go_to_the_even_neighbour() {
        // Halfway between 1 and the next bf16, and between that and the one after.
        let ties = [1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0];
        let sent = Elements::new(to_bytes(&ties), Dtype::Bf16);
        assert_eq!(numbers(&sent), [1.0, 1.0 + 4.0 / 256.0]);
    }

    #[test]
    fn what_does_not_fit_is_refused_by_name() {
        let three = dense(to_bytes(&[1.0, 2.0, 3.0]));
        let wrong = Elements::read(Some(&three), KIND, 4).unwrap_err();
        assert_eq!(wrong.reason, Reason::WrongShape);
        assert!(wrong.message.contains("12 bytes") && wrong.message.contains("16"));

        let rows = wire::Payload {
            dtype: Dtype::F32.into(),
            values: Some(wire::payload::Values::Rows(wire::Rows::default())),
        };
        let refused = Elements::read(Some(&rows), KIND, 0).unwrap_err();
        assert_eq!(refused.reason, Reason::WrongDtype);
        let odd = wire::Payload { dtype: 77, ..three };
        let refused = Elements::read(Some(&odd), KIND, 3).unwrap_err();
        assert!(refused.message.contains("77"));
    }
}
