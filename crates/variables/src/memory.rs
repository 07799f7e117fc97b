//! Reads and writes of candle's memory.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, InplaceOp1, Layout, Storage, Tensor, Var, bail};
use shared_proto::payload::Elements;

/// Returns all elements of a tensor in order. This takes one copy, or two for a tensor that is not contiguous.
pub(super) fn elements(tensor: &Tensor) -> candle_core::Result<Vec<f32>> {
    match tensor.device().is_cpu() {
        true => with_elements(tensor, <[f32]>::to_vec),
        false => copied(tensor),
    }
}

/// Calls `act` with all elements of a tensor, in order. On the CPU this takes no copy, or one for a tensor that is not contiguous.
pub fn with_elements<T>(tensor: &Tensor, act: impl FnOnce(&[f32]) -> T) -> candle_core::Result<T> {
    if !tensor.device().is_cpu() {
        return Ok(act(&copied(tensor)?));
    }
    let tensor = tensor.contiguous()?;
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cpu(memory) = &*storage else {
        bail!("a tensor is not on the CPU, as its device says");
    };
    let start = layout.start_offset();
    let range = start..start + layout.shape().elem_count();
    Ok(act(&memory.as_slice::<f32>()?[range]))
}

/// Returns a copy of all elements of a tensor in order.
fn copied(tensor: &Tensor) -> candle_core::Result<Vec<f32>> {
    let tensor = tensor.contiguous()?;
    let (storage, layout) = tensor.storage_and_layout();
    let start = layout.start_offset();
    let range = start..start + layout.shape().elem_count();
    let copied = match &*storage {
        Storage::Cpu(memory) => memory.clone(),
        #[cfg(feature = "cuda")]
        Storage::Cuda(memory) => return super::gpu_copies::read(memory, range),
        #[cfg(not(feature = "cuda"))]
        Storage::Cuda(memory) => memory.to_cpu_storage()?,
        Storage::Metal(memory) => memory.to_cpu_storage()?,
    };
    match copied {
        CpuStorage::F32(mut values) => {
            values.truncate(range.end);
            values.drain(..range.start);
            Ok(values)
        }
        other => bail!("a tensor has dtype {:?}; F32 was expected", other.dtype()),
    }
}

/// Returns the numbers of a variable on the CPU.
pub(super) fn numbers(storage: &mut CpuStorage) -> candle_core::Result<&mut [f32]> {
    match storage {
        CpuStorage::F32(memory) => Ok(memory),
        other => bail!("a variable has dtype {:?}; F32 was expected", other.dtype()),
    }
}

/// Overwrites a variable in place.
pub(super) fn overwrite(var: &Var, values: Vec<f32>) -> candle_core::Result<()> {
    let values = &Elements::from(values);
    var.inplace_op1(&Overwrite { start: 0, values })
}

/// Overwrites elements of a variable in place, from `start` on. The caller has checked that the variable has these
/// elements.
pub(super) struct Overwrite<'a> {
    pub(super) start: usize,
    pub(super) values: &'a Elements,
}

impl InplaceOp1 for Overwrite<'_> {
    fn name(&self) -> &'static str {
        "overwrite"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        let start = layout.start_offset() + self.start;
        self.values.copy_to(&mut numbers(storage)?[start..]);
        Ok(())
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        storage: &mut candle_core::CudaStorage,
        layout: &Layout,
    ) -> candle_core::Result<()> {
        super::gpu_copies::write(storage, layout.start_offset() + self.start, self.values)
    }
}
