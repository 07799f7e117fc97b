//! The replacement for NCCL in a program without it. It refuses.

use candle_core::{Device, Result, Tensor, bail};

/// The name under which GPUs find each other.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GroupId(());

impl GroupId {
    /// Refuses.
    ///
    /// # Errors
    /// Always.
    pub(crate) fn new() -> Result<Self> {
        bail!(
            "this program was built without NCCL; docs/cuda.md tells how to build with the feature `nccl`"
        )
    }
}

/// A place among the GPUs of a process.
#[derive(Debug)]
pub(crate) struct Communicator(std::convert::Infallible);

impl Communicator {
    /// Refuses.
    ///
    /// # Errors
    /// Always.
    pub(crate) fn join(_: &Device, _: GroupId, _: usize, _: usize) -> Result<Self> {
        bail!("this program was built without NCCL")
    }

    /// Adds up a tensor. There is no communicator that could.
    ///
    /// # Errors
    /// None.
    pub(crate) fn add_up(&self, _: &Tensor) -> Result<()> {
        match self.0 {}
    }
}
