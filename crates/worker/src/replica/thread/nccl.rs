//! Sums of gradients among the GPUs of a process, by NVIDIA's NCCL. Each GPU has a thread of its own, which takes part with its own stream.

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::nccl::result::NcclError;
use candle_core::cuda_backend::cudarc::nccl::{Comm, Id, ReduceOp};
use candle_core::{
    CpuStorage, CudaStorage, Device, Error, InplaceOp1, Layout, Result, Tensor, bail,
};

/// NCCL's id of a group of GPUs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NcclId(Id);

impl NcclId {
    /// Returns the id of a new group.
    ///
    /// # Errors
    /// NCCL's.
    pub(crate) fn new() -> Result<Self> {
        Id::new().map(Self).map_err(refused)
    }
}

/// A GPU's membership in a group.
#[derive(Debug)]
pub(crate) struct Communicator(Comm);

impl Communicator {
    /// Joins the group as one of `ranks` GPUs. Returns once all have joined.
    ///
    /// # Errors
    /// NCCL's, or if the device is no GPU.
    pub(crate) fn join(device: &Device, id: NcclId, rank: usize, ranks: usize) -> Result<Self> {
        let stream = device.as_cuda_device()?.cuda_stream();
        // NCCL looks for the GPU of the thread.
        let bound = stream.context().bind_to_thread();
        bound.map_err(|error| Error::msg(format!("the GPU does not answer: {error}")))?;
        let joined = Comm::from_rank(stream, rank, ranks, id.0);
        joined.map(Self).map_err(refused)
    }

    /// Replaces a contiguous tensor by the sum of all ranks' tensors. All ranks make the same calls; the result is there once the stream
    /// has come to it.
    ///
    /// # Errors
    /// NCCL's.
    pub(crate) fn add_up(&self, tensor: &Tensor) -> Result<()> {
        tensor.inplace_op1(&AddUp(&self.0))
    }
}

struct AddUp<'a>(&'a Comm);

impl InplaceOp1 for AddUp<'_> {
    fn name(&self) -> &'static str {
        "add-up"
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> Result<()> {
        bail!("NCCL adds up tensors on GPUs alone")
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, layout: &Layout) -> Result<()> {
        let Some((start, end)) = layout.contiguous_offsets() else {
            bail!("NCCL adds up contiguous tensors alone")
        };
        let device = storage.device().clone();
        if device.cuda_stream().context().ordinal() != self.0.ordinal() {
            bail!("the tensor is on another GPU than the communicator")
        }
        let memory = storage.as_cuda_slice_mut::<f32>()?;
        let summed = self
            .0
            .all_reduce_in_place(&mut memory.slice_mut(start..end), &ReduceOp::Sum);
        summed.map(drop).map_err(refused)
    }
}

fn refused(error: NcclError) -> Error {
    Error::msg(format!(
        "NCCL failed ({:?}); set NCCL_DEBUG=INFO to see why",
        error.0
    ))
    .bt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_rank_adds_up_its_own_tensor() {
        let device = Device::new_cuda(0).unwrap();
        let alone = Communicator::join(&device, NcclId::new().unwrap(), 0, 1).unwrap();
        let numbers: Vec<f32> = (0..1 << 20).map(|n| n as f32 * 0.5).collect();
        let tensor = Tensor::from_slice(&numbers, numbers.len(), &device).unwrap();
        alone.add_up(&tensor).unwrap();
        assert_eq!(tensor.to_vec1::<f32>().unwrap(), numbers);
    }
}
