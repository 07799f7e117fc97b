//! The errors of a worker.

use std::path::PathBuf;

use daemon::membership::MembershipError;
use network::transport::Listen;
use replica::ReplicaError;
use replica::device::DeviceError;
use shared_proto::job::JobError;
use variables::VariablesError;

use crate::strategy::StrategyError;

/// The error with which a worker ended.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WorkerError {
    /// The coordinator refuses the worker, or cannot be reached.
    #[error(transparent)]
    Membership(#[from] MembershipError),
    /// The strategy fails, for example because a server does not answer.
    #[error(transparent)]
    Strategy(StrategyError),
    /// The data cannot be read, or the model cannot be built.
    #[error(transparent)]
    Build(ReplicaError),
    /// The model failed while it computed.
    #[error(transparent)]
    Replica(#[from] ReplicaError),
    /// The device cannot be used.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The worker cannot take links from other workers.
    #[error("cannot listen on {address}: {error}; give another --listen")]
    Listen {
        /// The address.
        address: Listen,
        /// The system's error.
        error: std::io::Error,
    },
    /// The run directory cannot be created.
    #[error("cannot make the run directory {dir:?}: {error}; give another --run-dir")]
    RunDir {
        /// The run directory.
        dir: PathBuf,
        /// The system's error.
        error: std::io::Error,
    },
    /// The coordinator's answer violates the protocol.
    #[error("the coordinator's answer to {0} lacks what it must have; is it of the same release?")]
    Protocol(&'static str),
    /// A submitted job names a place that this worker does not allow.
    #[error("{0}")]
    Location(String),
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
            Self::Strategy(StrategyError::Outdated(_)) => true,
            _ => false,
        }
    }

    /// Returns whether there is no room for a file.
    pub(crate) fn is_of_full_disk(&self) -> bool {
        use std::io::ErrorKind::{QuotaExceeded, StorageFull};
        match self {
            Self::Replica(ReplicaError::Variables(VariablesError::File { source, .. })) => {
                matches!(source.kind(), StorageFull | QuotaExceeded)
            }
            _ => false,
        }
    }
}

impl From<StrategyError> for WorkerError {
    fn from(error: StrategyError) -> Self {
        match error {
            StrategyError::Membership(error) => Self::Membership(error),
            StrategyError::Replica(error) => Self::Replica(error),
            error => Self::Strategy(error),
        }
    }
}
