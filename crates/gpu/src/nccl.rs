//! Sums among GPUs, also of several processes, by NVIDIA's NCCL.
//!
//! cudarc's `Comm` blocks within NCCL's functions: forever, if another process has died. This communicator uses NCCL's
//! non-blocking mode (NCCL user guide, "Fault Tolerance"): the caller can cancel an operation at any time.

use std::ffi::{c_char, c_int, c_uint};
use std::mem::{MaybeUninit, offset_of};
use std::ptr;
use std::sync::Arc;
use std::thread::sleep;
use std::time::Duration;

use cudarc::driver::{CudaEvent, CudaStream, CudaViewMut, DevicePtrMut};
use cudarc::nccl::result::{self, NcclError, NcclStatus};
use cudarc::nccl::sys;

use crate::{Error, driver_error};

/// The size of an id in bytes.
pub const ID_BYTES: usize = 128;

const POLL_INTERVAL: Duration = Duration::from_micros(20);

/// The number by which NCCL recognises a configuration.
const CONFIG_MAGIC: c_uint = 0xcafe_beef;

/// The first release with a non-blocking mode, 2.14.
const NON_BLOCKING_SINCE: c_uint = 21_400;

/// The handle of the driver's per-thread stream, `CU_STREAM_PER_THREAD`.
const PER_THREAD: usize = 2;

const JOIN: &str = "form a communicator";
const ADD_UP: &str = "add up vectors";

/// Returns an id, with which GPUs form one communicator.
///
/// # Errors
/// [`Error::Nccl`].
pub fn new_id() -> Result<[u8; ID_BYTES], Error> {
    let id = result::get_uniqueid().map_err(nccl_error("make the id of a communicator"))?;
    Ok(id.internal.map(|byte| byte as u8))
}

/// A rank of a communicator. Dropping it aborts the operation that is under way. The other ranks may then wait until
/// they abort too.
#[derive(Debug)]
pub struct Communicator {
    comm: sys::ncclComm_t,
    stream: Arc<CudaStream>,
}

impl Communicator {
    /// Forms a communicator of `ranks` ranks, numbered from 0, each on a GPU of its own. Returns once all ranks have
    /// called this with the same id. Sums run in `stream`, which must not be the driver's per-thread stream: NCCL
    /// launches from a thread of its own.
    ///
    /// # Errors
    /// [`Error::Nccl`], for example if two ranks are on one GPU; [`Error::Remote`]; [`Error::Cancelled`] once `cancelled` returns true;
    /// [`Error::PerThreadStream`]; [`Error::Driver`].
    pub fn join(
        stream: &Arc<CudaStream>,
        id: [u8; ID_BYTES],
        rank: usize,
        ranks: usize,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Self, Error> {
        if stream.cu_stream() as usize == PER_THREAD {
            return Err(Error::PerThreadStream);
        }
        // NCCL uses the GPU of the thread.
        bind(stream)?;
        let id = sys::ncclUniqueId {
            internal: id.map(|byte| byte as c_char),
        };
        let number = |number: usize| c_int::try_from(number).unwrap_or(c_int::MAX);
        let (rank, ranks) = (number(rank), number(ranks));
        let (mut comm, mut config) = (ptr::null_mut(), non_blocking());
        // SAFETY: both are valid, and NCCL reads the configuration before it returns.
        let begun =
            unsafe { result::comm_init_rank_config(&mut comm, ranks, id, rank, &mut config) };
        // NCCL may return an error and a communicator, which must be aborted.
        let joined = (!comm.is_null()).then(|| Self {
            comm,
            stream: Arc::clone(stream),
        });
        begun.map_err(nccl_error(JOIN))?;
        let Some(joined) = joined else {
            return Err(Error::Nccl {
                action: JOIN,
                code: "no communicator returned".to_owned(),
            });
        };
        while !joined.is_ready(JOIN)? {
            pause(cancelled)?;
        }
        Ok(joined)
    }

    /// Replaces a vector with the sum of all ranks' vectors. The sum has the same bits on all ranks. All ranks call
    /// this with vectors of the same length. Returns the communicator once the sum is in the vector.
    ///
    /// # Errors
    /// [`Error::Remote`], for example if another rank has died; [`Error::Nccl`]; [`Error::Cancelled`] once `cancelled`
    /// returns true; [`Error::Driver`]. The vector is then undefined, and the communicator is aborted.
    pub fn add_up(
        self,
        vector: &mut CudaViewMut<'_, f32>,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Self, Error> {
        bind(&self.stream)?;
        let stream = Arc::clone(&self.stream);
        let elements = vector.len();
        let (address, _used_until_dropped) = vector.device_ptr_mut(&stream);
        let address = address as *mut _;
        // SAFETY: the vector has so many elements, and it is borrowed until nothing uses it: this function returns when the sum is made, or after
        // the communicator is aborted.
        let begun = unsafe {
            result::all_reduce(
                address,
                address,
                elements,
                sys::ncclDataType_t::ncclFloat32,
                sys::ncclRedOp_t::ncclSum,
                self.comm,
                stream.cu_stream() as sys::cudaStream_t,
            )
        };
        let begun = begun.map_err(nccl_error(ADD_UP));
        match begun.and_then(|_| self.wait_for_sum(cancelled)) {
            Ok(()) => Ok(self),
            Err(error) => {
                drop(self);
                Err(error)
            }
        }
    }

    /// Waits until the sum that was begun last is complete.
    fn wait_for_sum(&self, cancelled: &dyn Fn() -> bool) -> Result<(), Error> {
        let failed = driver_error(ADD_UP);
        while !self.is_ready(ADD_UP)? {
            pause(cancelled)?;
        }
        let made: CudaEvent = self.stream.record_event(None).map_err(&failed)?;
        while !made.try_is_complete().map_err(&failed)? {
            // The GPU waits forever after an error of the network.
            self.is_ready(ADD_UP)?;
            pause(cancelled)?;
        }
        Ok(())
    }

    /// Returns whether NCCL's last call is no longer in progress: the communicator is formed, or the sum is launched on
    /// the GPU.
    fn is_ready(&self, action: &'static str) -> Result<bool, Error> {
        let mut state = sys::ncclResult_t::ncclSuccess;
        // SAFETY: the communicator exists until it is dropped.
        let asked = unsafe { sys::ncclCommGetAsyncError(self.comm, &mut state) };
        let state = asked.result().and_then(|_| state.result());
        let state = state.map_err(nccl_error(action))?;
        Ok(state != NcclStatus::InProgress)
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        // SAFETY: the communicator is not used afterwards. NCCL ends what is under way. An error would change nothing.
        let _ = unsafe { result::comm_abort(self.comm) };
    }
}

/// Waits for the poll interval. Fails if the operation is cancelled.
fn pause(cancelled: &dyn Fn() -> bool) -> Result<(), Error> {
    if cancelled() {
        return Err(Error::Cancelled);
    }
    sleep(POLL_INTERVAL);
    Ok(())
}

fn bind(stream: &CudaStream) -> Result<(), Error> {
    let bound = stream.context().bind_to_thread();
    bound.map_err(driver_error("use the GPU"))
}

/// Returns the configuration of the non-blocking mode. NCCL reads the fields that the first release with this mode had, and takes its defaults
/// for all others.
fn non_blocking() -> sys::ncclConfig_t {
    // SAFETY: the type is plain C data, for which zeros are valid.
    let mut config: sys::ncclConfig_t = unsafe { MaybeUninit::zeroed().assume_init() };
    config.size = offset_of!(sys::ncclConfig_t, cgaClusterSize);
    config.magic = CONFIG_MAGIC;
    config.version = NON_BLOCKING_SINCE;
    config.blocking = 0;
    config
}

fn nccl_error(action: &'static str) -> impl Fn(NcclError) -> Error {
    move |NcclError(error)| {
        let code = format!("{error:?}");
        match error {
            sys::ncclResult_t::ncclRemoteError
            | sys::ncclResult_t::ncclSystemError
            | sys::ncclResult_t::ncclInternalError => Error::Remote { action, code },
            _ => Error::Nccl { action, code },
        }
    }
}

#[cfg(test)]
mod tests {
    use cudarc::driver::CudaContext;

    use super::*;

    fn stream() -> Arc<CudaStream> {
        CudaContext::new(0).unwrap().new_stream().unwrap()
    }

    #[test]
    fn one_rank_adds_up_its_own_vector() {
        let stream = stream();
        let numbers: Vec<f32> = (0..1 << 20).map(|n| n as f32 * 0.5).collect();
        let mut memory = stream.clone_htod(&numbers).unwrap();
        let mut alone = Communicator::join(&stream, new_id().unwrap(), 0, 1, &|| false).unwrap();
        for _ in 0..3 {
            alone = alone.add_up(&mut memory.as_view_mut(), &|| false).unwrap();
        }
        assert_eq!(stream.clone_dtoh(&memory).unwrap(), numbers);
    }

    #[test]
    fn a_communicator_that_lacks_a_rank_is_cancelled() {
        let stream = stream();
        let asked = std::cell::Cell::new(0);
        let cancelled = || {
            asked.set(asked.get() + 1);
            asked.get() > 100
        };
        let joined = Communicator::join(&stream, new_id().unwrap(), 0, 2, &cancelled);
        assert!(matches!(joined, Err(Error::Cancelled)));
        // The GPU can still be used.
        one_rank_adds_up_its_own_vector();
    }

    #[test]
    fn a_stream_of_each_thread_is_refused() {
        let stream = CudaContext::new(0).unwrap().per_thread_stream();
        let joined = Communicator::join(&stream, new_id().unwrap(), 0, 1, &|| false);
        assert!(matches!(joined, Err(Error::PerThreadStream)));
    }
}
