//! The errors with which a coordinator ends.

use std::net::SocketAddr;
use std::path::PathBuf;

use checkpoint::CheckpointError;
use network::security::SecurityError;
use shared_proto::job::JobError;

use crate::keeping::log::StateError;

/// What to do if a run's state is of no use any more.
const RESTORE: &str = "Go on from the checkpoints in a new folder: start with --restore and this run directory, and give another --run-dir";

/// What to do if a queue is of no use any more.
const SUBMIT_AGAIN: &str = "Give another --run-dir, and submit the jobs that have not ended again. Those that had begun go on from their checkpoints with --restore and the folder of their run";

/// The error with which the coordinator ended.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CoordinatorError {
    /// The job file cannot be read.
    #[error("cannot read the job file {path:?}: {error}")]
    JobFile {
        /// The path of the file.
        path: PathBuf,
        /// The system's error.
        error: std::io::Error,
    },
    /// A location of --allow-location is not valid.
    #[error("--allow-location: {0}")]
    AllowLocation(storage::StorageError),
    /// The job is not valid.
    #[error(transparent)]
    Job(#[from] JobError),
    /// The coordinator cannot listen on the address.
    #[error("cannot listen on {address}: {error}; give another {setting}")]
    Listen {
        /// The address to listen on.
        address: SocketAddr,
        /// The setting that gives the address.
        setting: &'static str,
        /// The system's error.
        error: std::io::Error,
    },
    /// The certificates or the token cannot be used.
    #[error(transparent)]
    Security(#[from] SecurityError),
    /// The run directory cannot be written.
    #[error("cannot write the run directory {dir:?}: {error}; give another --run-dir")]
    RunDir {
        /// The run directory.
        dir: PathBuf,
        /// The system's error.
        error: std::io::Error,
    },
    /// The state of an earlier process cannot be used.
    #[error(
        "the coordinator's state {path:?} cannot be used: {error}. {}",
        error.advice(RESTORE)
    )]
    State {
        /// The state's file.
        path: PathBuf,
        /// The error of the state.
        error: StateError,
    },
    /// The queue of jobs cannot be used.
    #[error(
        "the queue of jobs in {dir:?} cannot be used: {error}. {}",
        error.advice(SUBMIT_AGAIN)
    )]
    Queue {
        /// The coordinator's folder.
        dir: PathBuf,
        /// The error of the queue.
        error: StateError,
    },
    /// The state cannot be written any more.
    #[error("the coordinator's state cannot be written; the log has the reason")]
    StateLost,
    /// The run directory belongs to another run.
    #[error("the run directory {dir:?} {what}")]
    OtherRun {
        /// The run directory.
        dir: PathBuf,
        /// The content of the run directory, and the remedy.
        what: String,
    },
    /// The checkpoints cannot be used.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The checkpoint to begin with does not fit the job.
    #[error("cannot begin with {location}: {what}")]
    Restore {
        /// The location of the checkpoint.
        location: String,
        /// The reason why it does not fit.
        what: String,
    },
    /// The job failed.
    #[error("the job failed: {0}")]
    JobFailed(String),
    /// The gRPC server failed.
    #[error("the server has ended: {0}")]
    Transport(#[from] tonic::transport::Error),
}

impl CoordinatorError {
    /// Returns whether the error is that of a full disk or an exceeded quota.
    pub(super) fn is_of_full_disk(&self) -> bool {
        use std::io::ErrorKind::{QuotaExceeded, StorageFull};
        let (Self::RunDir { error, .. }
        | Self::State {
            error: StateError::Io(error),
            ..
        }) = self
        else {
            return false;
        };
        matches!(error.kind(), StorageFull | QuotaExceeded)
    }
}

impl daemon::process::Failure for CoordinatorError {}
