//! The memory pools of NVIDIA GPUs. A process allocates a GPU's memory from the GPU's current pool.
//!
//! This is the only crate with unsafe code: cudarc has no safe interface of memory pools. Without the feature `cuda`, all
//! functions return [`Error::NotBuilt`].

#[cfg(feature = "cuda")]
mod cuda;
#[cfg(not(feature = "cuda"))]
mod without;

#[cfg(feature = "cuda")]
pub use cuda::{limit, retain, usage};
#[cfg(not(feature = "cuda"))]
pub use without::{limit, retain, usage};

/// The error of an operation on a pool.
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
}

/// The memory of a GPU's current pool, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Usage {
    /// The memory in use.
    pub used: u64,
    /// The most that was ever in use.
    pub most_used: u64,
    /// The memory that the pool has from the GPU, in use or not.
    pub held: u64,
}
