//! The errors of a worker.

use std::path::PathBuf;

use daemon::membership::MembershipError;
use ps_client::ClientError;
use shared_proto::job::JobError;
use shared_proto::refusal::Refusal;

use crate::device::DeviceError;
use crate::replica::ReplicaError;

/// Why a worker failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WorkerError {
    /// The coordinator refuses it, or cannot be reached.
    #[error(transparent)]
    Membership(#[from] MembershipError),
    /// A server does not answer, or refuses a message.
    #[error(transparent)]
    Ps(#[from] ClientError),
    /// The data cannot be read, or the model cannot be built.
    #[error(transparent)]
    Build(ReplicaError),
    /// The model failed while it computed.
    #[error(transparent)]
    Replica(#[from] ReplicaError),
    /// The device cannot be used.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The run directory cannot be created.
    #[error("cannot make the run directory {dir:?}: {error}; give another --run-dir")]
    RunDir {
        /// Its path.
        dir: PathBuf,
        /// The system's error.
        error: std::io::Error,
    },
    /// The coordinator's shard map makes no sense.
    #[error("the shard map cannot be read: {0}")]
    ShardMap(#[from] Refusal),
    /// The coordinator's answer violates the protocol.
    #[error("the coordinator's answer to {0} lacks what it must have; is it of the same release?")]
    Protocol(&'static str),
    /// The job is invalid with this worker's settings.
    #[error(transparent)]
    Job(#[from] JobError),
    /// This worker cannot work, but others may.
    #[error(
        "this worker cannot work: {0}; the job goes on without it: remove the cause and start this worker again"
    )]
    CannotWork(Box<WorkerError>),
}

impl WorkerError {
    /// Returns whether registering again may help.
    pub(crate) fn is_retryable(&self) -> bool {
        match self {
            Self::Membership(error) => error.is_retryable(),
            Self::Ps(error) => error.is_retryable(),
            _ => false,
        }
    }
}
