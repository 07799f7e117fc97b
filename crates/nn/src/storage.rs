//! Access to the elements of tensors on the CPU.

use std::ops::Deref;

use candle_core::{CpuStorage, DType, Layout, Result, Storage, Tensor, WithDType, bail};

/// Returns true if all tensors are on the CPU and of one type, `f32` or `f64`. The operations of this crate can then
/// compute them.
pub(crate) fn computed_here(tensors: &[&Tensor]) -> bool {
    let dtype = tensors[0].dtype();
    matches!(dtype, DType::F32 | DType::F64)
        && tensors
            .iter()
            .all(|t| t.device().is_cpu() && t.dtype() == dtype)
}

/// Refuses tensors of integers. candle panics when it computes some functions of them.
pub(crate) fn check_float(x: &Tensor) -> Result<()> {
    if !x.dtype().is_float() {
        bail!(
            "a tensor of type {:?} has no floating-point numbers; convert it by `to_dtype`",
            x.dtype()
        );
    }
    Ok(())
}

/// Returns the elements of a tensor, given its storage and its layout.
///
/// # Errors
/// If the tensor is not contiguous, or has another type.
pub(crate) fn slice<'a, T: WithDType>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [T]> {
    let all = T::cpu_storage_as_slice(storage)?;
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(&all[start..end]),
        None => bail!("a tensor of shape {:?} is not contiguous", layout.shape()),
    }
}

/// A lock on the elements of a tensor: while it exists, nothing changes them.
pub(crate) struct Elements<'a, S> {
    storage: S,
    layout: &'a Layout,
}

/// Locks the elements of a tensor for reading.
pub(crate) fn elements(tensor: &Tensor) -> Elements<'_, impl Deref<Target = Storage>> {
    let (storage, layout) = tensor.storage_and_layout();
    Elements { storage, layout }
}

impl<S: Deref<Target = Storage>> Elements<'_, S> {
    /// Returns the elements.
    ///
    /// # Errors
    /// If the tensor is not on the CPU, is not contiguous, or has another type.
    pub(crate) fn slice<T: WithDType>(&self) -> Result<&[T]> {
        match &*self.storage {
            Storage::Cpu(storage) => slice(storage, self.layout),
            _ => bail!(
                "a tensor of shape {:?} is not on the CPU",
                self.layout.shape()
            ),
        }
    }
}

/// Calls `f` with the elements of two tensors, which are contiguous and on the CPU.
pub(crate) fn with_slices<A: WithDType, B: WithDType, R>(
    a: &Tensor,
    b: &Tensor,
    f: impl FnOnce(&[A], &[B]) -> R,
) -> Result<R> {
    Ok(f(elements(a).slice()?, elements(b).slice()?))
}

/// Evaluates an expression in which `T` is `f32` for `DType::F32`, and `f64` for every other type.
macro_rules! with_type {
    ($dtype:expr, $T:ident => $work:expr) => {
        match $dtype {
            candle_core::DType::F32 => {
                type $T = f32;
                $work
            }
            _ => {
                type $T = f64;
                $work
            }
        }
    };
}
pub(crate) use with_type;
