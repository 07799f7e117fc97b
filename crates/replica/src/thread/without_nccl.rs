//! Stands in for `nccl` in a program without it; each call fails.

use bytes::Bytes;
use candle_core::{Device, Result, Tensor, bail};

use crate::error::ReplicaError;
use crate::mirror::GroupError;

/// NCCL's id of a group of GPUs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NcclId(());

impl NcclId {
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

/// A GPU's membership in a group.
#[derive(Debug)]
pub(crate) struct LocalCommunicator(std::convert::Infallible);

impl LocalCommunicator {
    /// Refuses.
    ///
    /// # Errors
    /// Always.
    pub(crate) fn join(_: &Device, _: NcclId, _: usize, _: usize) -> Result<Self> {
        bail!("this program was built without NCCL")
    }

    /// Is never called: without NCCL no communicator exists.
    ///
    /// # Errors
    /// None.
    pub(crate) fn add_up(&self, _: &Tensor) -> Result<()> {
        match self.0 {}
    }
}

/// A GPU's communicator with the GPUs of other workers.
#[derive(Debug)]
pub(crate) struct GroupCommunicator(std::convert::Infallible);

impl GroupCommunicator {
    /// Refuses.
    ///
    /// # Errors
    /// Always.
    pub(crate) fn new_id() -> std::result::Result<Bytes, GroupError> {
        Err(refused())
    }

    /// Refuses.
    ///
    /// # Errors
    /// Always.
    pub(crate) fn join(
        _: &Device,
        _: &[u8],
        _: (usize, usize),
        _: &dyn Fn() -> bool,
    ) -> std::result::Result<Self, GroupError> {
        Err(refused())
    }

    /// Is never called: without NCCL no communicator exists.
    ///
    /// # Errors
    /// None.
    pub(crate) fn add_up(
        &mut self,
        _: &Tensor,
        _: &dyn Fn() -> bool,
    ) -> std::result::Result<(), GroupError> {
        match self.0 {}
    }
}

fn refused() -> GroupError {
    ReplicaError::Devices("this program was built without NCCL".to_owned()).into()
}

/// Returns `None`: without NCCL, the device can be in no group.
pub(crate) fn unique_name(_: &Device) -> Option<String> {
    None
}
