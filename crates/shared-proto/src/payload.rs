//! Tensors as bytes. Elements travel in little-endian order, unaligned, and are read where they
//! arrived: no copy is made to align them.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use bytes::Bytes;

use crate::kernel::Kernel;
use crate::refusal::{Reason, Refusal};
use crate::wire;

/// An `f32` as it travels: four bytes, little-endian, without alignment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub struct LeF32([u8; 4]);

impl LeF32 {
    /// The number.
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

/// Copies numbers into bytes that can travel.
pub fn to_bytes(values: &[f32]) -> Bytes {
    if cfg!(target_endian = "little") {
        Bytes::copy_from_slice(bytemuck::cast_slice(values))
    } else {
        values.iter().flat_map(|v| v.to_le_bytes()).collect()
    }
}

/// Numbers as they travel, in the memory that they are in where that has the right order.
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

/// Numbers in memory as they would travel, in the same place; they are not to be used as numbers
/// any more.
pub fn in_place(values: &mut [f32]) -> &[LeF32] {
    if cfg!(target_endian = "big") {
        for value in values.iter_mut() {
            *value = f32::from_bits(value.to_bits().swap_bytes());
        }
    }
    bytemuck::cast_slice(values)
}

/// A dense payload of `f32`.
pub fn dense(values: Bytes) -> wire::Payload {
    wire::Payload {
        dtype: wire::Dtype::F32.into(),
        values: Some(wire::payload::Values::Dense(values)),
    }
}

/// The elements of a dense payload that has `expected` elements.
///
/// # Errors
/// [`Reason::WrongDtype`], [`Reason::WrongShape`] or [`Reason::Malformed`]; the message begins
/// with what was found and leaves it to the caller to say where.
pub fn read_dense(payload: Option<&wire::Payload>, expected: usize) -> Result<Bytes, Refusal> {
    let payload = payload.ok_or_else(|| Refusal::new(Reason::Malformed, "has no payload"))?;
    if payload.dtype != i32::from(wire::Dtype::F32) {
        let name = wire::Dtype::try_from(payload.dtype).map_or_else(
            |_| payload.dtype.to_string(),
            |d| d.as_str_name().to_owned(),
        );
        return Err(Refusal::new(
            Reason::WrongDtype,
            format!("has dtype {name}; this server takes DTYPE_F32"),
        ));
    }
    match &payload.values {
        Some(wire::payload::Values::Dense(bytes)) if bytes.len() == expected * size_of::<f32>() => {
            Ok(bytes.clone())
        }
        Some(wire::payload::Values::Dense(bytes)) => Err(Refusal::new(
            Reason::WrongShape,
            format!(
                "has {} bytes; the block's {expected} f32 elements take {}",
                bytes.len(),
                expected * size_of::<f32>()
            ),
        )),
        Some(wire::payload::Values::Rows(_)) => Err(Refusal::new(
            Reason::WrongDtype,
            "holds rows, but the variable is dense; send all elements as `dense`",
        )),
        None => Err(Refusal::new(
            Reason::Malformed,
            "has a payload without values",
        )),
    }
}

/// The elements of a payload that [`read_dense`] accepted.
pub fn elements(bytes: &Bytes) -> &[LeF32] {
    bytemuck::cast_slice(bytes)
}

/// Whether no element is NaN or infinite.
pub fn all_finite(values: &[LeF32]) -> bool {
    // A number is finite unless all bits of its exponent are set. Parts of a fixed size without
    // an early exit let the compiler use wide registers.
    const EXPONENT: u32 = 0x7f80_0000;
    let finite = |v: &LeF32| u32::from_le_bytes(v.0) & EXPONENT != EXPONENT;
    Kernel::best().run(|| {
        let mut parts = values.chunks(1024);
        parts.all(|part| part.iter().fold(true, |ok, v| ok & finite(v)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn numbers_survive_the_wire(values: Vec<f32>, shift in 0usize..4) {
            let mut shifted = vec![0u8; shift];
            shifted.extend_from_slice(&to_bytes(&values));
            let bytes = Bytes::from(shifted).slice(shift..);
            let payload = dense(bytes);
            let read = read_dense(Some(&payload), values.len()).unwrap();
            let back: Vec<u32> = elements(&read).iter().map(|v| v.get().to_bits()).collect();
            let sent: Vec<u32> = values.iter().map(|v| v.to_bits()).collect();
            prop_assert_eq!(back, sent);
        }

        #[test]
        fn finite_means_finite(values: Vec<f32>) {
            let wire: Vec<LeF32> = values.iter().copied().map(LeF32::from).collect();
            prop_assert_eq!(all_finite(&wire), values.iter().all(|v| v.is_finite()));
        }
    }

    #[test]
    fn what_does_not_fit_is_refused_by_name() {
        let three = dense(to_bytes(&[1.0, 2.0, 3.0]));
        let wrong = read_dense(Some(&three), 4).unwrap_err();
        assert_eq!(wrong.reason, Reason::WrongShape);
        assert!(wrong.message.contains("12 bytes") && wrong.message.contains("16"));

        let rows = wire::Payload {
            dtype: wire::Dtype::F32.into(),
            values: Some(wire::payload::Values::Rows(wire::Rows::default())),
        };
        assert_eq!(
            read_dense(Some(&rows), 0).unwrap_err().reason,
            Reason::WrongDtype
        );
        let odd = wire::Payload { dtype: 77, ..three };
        assert!(
            read_dense(Some(&odd), 3)
                .unwrap_err()
                .message
                .contains("77")
        );
    }
}
