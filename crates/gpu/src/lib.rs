//! The parts of NVIDIA's interfaces for which cudarc has no safe or suitable functions.
//!
//! - [`pool`]: the memory that a process takes from a GPU
//! - `pinned`: copies through pinned memory of the host; with the feature `cuda`
//! - `nccl`: sums among GPUs of several processes; with the feature `nccl`
//!
//! This is the only crate with unsafe code.

#[cfg(feature = "nccl")]
pub mod nccl;
#[cfg(feature = "cuda")]
pub mod pinned;
pub mod pool;

/// The error of an operation on a GPU.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// This program was built without the feature `cuda`.
    #[error("this program was built without support for GPUs")]
    NotBuilt,
    /// The driver refuses the operation.
    #[error("the GPU's driver cannot {action}: {reason}")]
    Driver {
        /// The operation.
        action: &'static str,
        /// The driver's error.
        reason: String,
    },
    /// NCCL refuses the operation, or it has failed on this GPU.
    #[error("NCCL cannot {action} ({code}); set NCCL_DEBUG=INFO to see why")]
    Nccl {
        /// The operation.
        action: &'static str,
        /// NCCL's name of the error.
        code: String,
    },
    /// The operation has failed, and the cause may be another process or the network.
    #[error("NCCL cannot {action} with the other GPUs ({code}); set NCCL_DEBUG=INFO to see why")]
    Remote {
        /// The operation.
        action: &'static str,
        /// NCCL's name of the error.
        code: String,
    },
    /// The stream is the driver's per-thread stream, which NCCL cannot use: NCCL launches from a thread of its own.
    #[error("NCCL needs a stream that is the same one in all threads")]
    PerThreadStream,
    /// The caller has cancelled the operation.
    #[error("the operation on the GPU was cancelled")]
    Cancelled,
}

#[cfg(feature = "cuda")]
fn driver_error(action: &'static str) -> impl Fn(cudarc::driver::DriverError) -> Error {
    move |error| Error::Driver {
        action,
        reason: error.to_string(),
    }
}
