//! Copies between the host and a GPU's memory, through pinned memory.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

use candle_core::cuda_backend::cudarc::driver::CudaStream;
use candle_core::{CudaStorage, Error, Result};
use gpu::pinned::PinnedMemory;
use shared_proto::payload::Elements;

thread_local! {
    /// The pinned memory of this thread for each stream, or `None` if it could not be allocated.
    static MEMORY: RefCell<Vec<(Arc<CudaStream>, Option<PinnedMemory>)>> = const { RefCell::new(Vec::new()) };
}

/// Copies elements out of a GPU's memory.
///
/// # Errors
/// The driver's.
pub(super) fn read(storage: &CudaStorage, range: Range<usize>) -> Result<Vec<f32>> {
    let from = storage.as_cuda_slice::<f32>()?.slice(range);
    let mut values = Vec::new();
    with_memory(&storage.device.cuda_stream(), |memory| match memory {
        Some(memory) => memory.read(&from, &mut values).map_err(Error::wrap),
        None => {
            values = storage.device.clone_dtoh(&from)?;
            Ok(())
        }
    })?;
    Ok(values)
}

/// Copies elements into a GPU's memory, from element `start` on.
///
/// # Errors
/// The driver's.
pub(super) fn write(storage: &mut CudaStorage, start: usize, values: &Elements) -> Result<()> {
    let device = storage.device.clone();
    let memory = storage.as_cuda_slice_mut::<f32>()?;
    let mut to = memory.slice_mut(start..start + values.len());
    with_memory(&device.cuda_stream(), |memory| match memory {
        Some(memory) => {
            let fill = |range, part: &mut [f32]| values.slice(range).copy_to(part);
            memory.write(&mut to, fill).map_err(Error::wrap)
        }
        None => {
            let mut copied = vec![0f32; values.len()];
            values.copy_to(&mut copied);
            device.memcpy_htod(&copied, &mut to)
        }
    })
}

/// Calls `act` with this thread's pinned memory for a stream, or with `None` if it cannot be allocated.
fn with_memory<T>(
    stream: &Arc<CudaStream>,
    act: impl FnOnce(Option<&mut PinnedMemory>) -> Result<T>,
) -> Result<T> {
    MEMORY.with_borrow_mut(|all| {
        let known = all.iter().position(|(of, _)| Arc::ptr_eq(of, stream));
        let place = known.unwrap_or_else(|| {
            let memory = PinnedMemory::new(stream)
                .inspect_err(|error| {
                    tracing::warn!("copies to and from the GPU take longer: {error}");
                })
                .ok();
            all.push((Arc::clone(stream), memory));
            all.len() - 1
        });
        act(all[place].1.as_mut())
    })
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, Tensor, Var};

    use super::super::memory::{elements, overwrite};

    #[test]
    fn a_variable_is_overwritten_and_read() {
        let device = Device::new_cuda(0).unwrap();
        let length = (1 << 21) + 5;
        let var = Var::zeros(length, DType::F32, &device).unwrap();
        let values: Vec<f32> = (0..length).map(|n| (n % 1003) as f32).collect();
        overwrite(&var, values.clone()).unwrap();
        assert_eq!(elements(&var).unwrap(), values);
        let part = var.narrow(0, 7, length - 9).unwrap();
        assert_eq!(elements(&part).unwrap(), values[7..length - 2]);
        let turned = Tensor::from_vec(vec![1f32, 2.0, 3.0, 4.0], (2, 2), &device).unwrap();
        assert_eq!(
            elements(&turned.t().unwrap()).unwrap(),
            [1.0, 3.0, 2.0, 4.0]
        );
    }
}
