//! The memory pools of GPUs. A process allocates a GPU's memory from the GPU's current pool. Without the feature `cuda`, all
//! functions return [`Error::NotBuilt`](crate::Error::NotBuilt).

#[cfg(feature = "cuda")]
mod driver;
#[cfg(not(feature = "cuda"))]
mod without;

#[cfg(feature = "cuda")]
pub use driver::{limit, retain, usage};
#[cfg(not(feature = "cuda"))]
pub use without::{limit, retain, usage};

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
