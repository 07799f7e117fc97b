//! Sums of gradients among GPUs, through NVIDIA's NCCL. Each GPU has its own thread and stream. Replicas of one process
//! use cudarc's communicator. Replicas of several processes use one with operations that can be cancelled.

use std::cell::{Cell, RefCell};

use bytes::Bytes;
use candle_core::cuda_backend::cudarc::driver::CudaViewMut;
use candle_core::cuda_backend::cudarc::nccl::result::NcclError;
use candle_core::cuda_backend::cudarc::nccl::{Comm, Id, ReduceOp};
use candle_core::{
    CpuStorage, CudaStorage, Device, DeviceLocation, Error, InplaceOp1, Layout, Result, Tensor,
    bail,
};
use gpu::nccl;

use crate::error::ReplicaError;
use crate::mirror::GroupError;

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

/// A GPU's membership in a group of GPUs of this process.
#[derive(Debug)]
pub(crate) struct LocalCommunicator(Comm);

impl LocalCommunicator {
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

    /// Replaces a contiguous tensor by the sum of all ranks' tensors. All ranks must make the same calls. This only
    /// queues the operation on the stream.
    ///
    /// # Errors
    /// NCCL's.
    pub(crate) fn add_up(&self, tensor: &Tensor) -> Result<()> {
        if tensor.device().location() != self.location() {
            bail!("the tensor is on another GPU than the communicator");
        }
        tensor.inplace_op1(&AddUp(|memory: &mut CudaViewMut<'_, f32>| {
            let summed = self.0.all_reduce_in_place(memory, &ReduceOp::Sum);
            summed.map(drop).map_err(refused)
        }))
    }

    fn location(&self) -> DeviceLocation {
        let gpu_id = self.0.ordinal();
        DeviceLocation::Cuda { gpu_id }
    }
}

/// A GPU's communicator with the GPUs of other workers; `None` after an error.
#[derive(Debug)]
pub(crate) struct GroupCommunicator(Option<nccl::Communicator>);

impl GroupCommunicator {
    /// Returns the id of a new communicator.
    ///
    /// # Errors
    /// NCCL's.
    pub(crate) fn new_id() -> std::result::Result<Bytes, GroupError> {
        let id = nccl::new_id().map_err(failed)?;
        Ok(Bytes::copy_from_slice(&id))
    }

    /// Forms a communicator of `ranks` GPUs. Returns once all have called this.
    ///
    /// # Errors
    /// NCCL's, or if the device is no GPU, the id has the wrong length, or `cancelled` returns true.
    pub(crate) fn join(
        device: &Device,
        id: &[u8],
        (rank, ranks): (usize, usize),
        cancelled: &dyn Fn() -> bool,
    ) -> std::result::Result<Self, GroupError> {
        let Ok(id) = id.try_into() else {
            let problem = format!("{} bytes are not the id of a communicator", id.len());
            return Err(ReplicaError::Devices(problem).into());
        };
        let device = device.as_cuda_device().map_err(ReplicaError::from)?;
        let joined = nccl::Communicator::join(&device.cuda_stream(), id, rank, ranks, cancelled);
        joined.map(|comm| Self(Some(comm))).map_err(failed)
    }

    /// Replaces a contiguous tensor by the sum of all ranks' tensors. All ranks must make the same calls. Returns once
    /// the sum is complete.
    ///
    /// # Errors
    /// NCCL's, or if `cancelled` returns true. The communicator is then aborted.
    pub(crate) fn add_up(
        &mut self,
        tensor: &Tensor,
        cancelled: &dyn Fn() -> bool,
    ) -> std::result::Result<(), GroupError> {
        let (comm, failure) = (RefCell::new(&mut self.0), Cell::new(None));
        let added = tensor.inplace_op1(&AddUp(|memory: &mut CudaViewMut<'_, f32>| {
            let mut comm = comm.borrow_mut();
            let Some(joined) = comm.take() else {
                bail!("the communicator is aborted");
            };
            match joined.add_up(memory, cancelled) {
                Ok(joined) => **comm = Some(joined),
                Err(error) => failure.set(Some(error)),
            }
            Ok(())
        }));
        match failure.take() {
            Some(error) => Err(failed(error)),
            None => Ok(added.map_err(ReplicaError::from)?),
        }
    }
}

fn failed(error: gpu::Error) -> GroupError {
    let what = ReplicaError::Devices(error.to_string());
    match error {
        gpu::Error::Remote { .. } => GroupError::Peer(what),
        _ => GroupError::Own(what),
    }
}

/// Returns the UUID of a GPU, a name that no other device has; `None` if the device is no GPU.
pub(crate) fn unique_name(device: &Device) -> Option<String> {
    let stream = device.as_cuda_device().ok()?.cuda_stream();
    let id = stream.context().uuid().ok()?;
    let digits = id.bytes.iter().map(|byte| format!("{:02x}", *byte as u8));
    Some(digits.collect())
}

/// An operation that changes the memory of a contiguous tensor on a GPU.
struct AddUp<F>(F);

impl<F: Fn(&mut CudaViewMut<'_, f32>) -> Result<()>> InplaceOp1 for AddUp<F> {
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
        let memory = storage.as_cuda_slice_mut::<f32>()?;
        (self.0)(&mut memory.slice_mut(start..end))
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
        let device = Device::new_cuda_with_stream(0).unwrap();
        let alone = LocalCommunicator::join(&device, NcclId::new().unwrap(), 0, 1).unwrap();
        let numbers: Vec<f32> = (0..1 << 20).map(|n| n as f32 * 0.5).collect();
        let tensor = Tensor::from_slice(&numbers, numbers.len(), &device).unwrap();
        alone.add_up(&tensor).unwrap();
        assert_eq!(tensor.to_vec1::<f32>().unwrap(), numbers);
        let id = GroupCommunicator::new_id().unwrap();
        let mut alone = GroupCommunicator::join(&device, &id, (0, 1), &|| false).unwrap();
        alone.add_up(&tensor, &|| false).unwrap();
        assert_eq!(tensor.to_vec1::<f32>().unwrap(), numbers);
    }
}
