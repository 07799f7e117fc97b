//! What can end a command otherwise than well.

use std::path::PathBuf;

use checkpoint::CheckpointError;
use coordinator::CoordinatorError;
use daemon::membership::MembershipError;
use shared_proto::security::SecurityError;
use worker::device::DeviceError;
use worker::replica::ReplicaError;

/// What can end a command otherwise than well.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum CommandError {
    /// The job cannot be read.
    #[error(transparent)]
    Job(#[from] CoordinatorError),
    /// The coordinator does not answer.
    #[error(transparent)]
    Membership(#[from] MembershipError),
    /// Certificates or the token cannot be used.
    #[error(transparent)]
    Security(#[from] SecurityError),
    /// A checkpoint cannot be used.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// Some checkpoints are not as they were written.
    #[error("{} damaged:\n  {}", damages.len(), damages.join("\n  "))]
    Damaged {
        /// What is wrong with each.
        damages: Vec<String>,
    },
    /// The model or its data cannot be used.
    #[error(transparent)]
    Replica(#[from] ReplicaError),
    /// The device cannot be had.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A file cannot be read or written.
    #[error("{path:?}: {error}")]
    File {
        /// Which.
        path: PathBuf,
        /// What the system says.
        error: std::io::Error,
    },
    /// A file is not what it should be.
    #[error("{path:?} is not valid: {reason}")]
    Content {
        /// Which.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
    /// A process of the cluster could not be started.
    #[error("cannot start {name}: {reason}")]
    Start {
        /// Which.
        name: String,
        /// Why not.
        reason: String,
    },
    /// A process of the cluster died.
    #[error("{name} {status}; its last lines ({log}):\n{tail}", log = log.display())]
    Died {
        /// Which.
        name: String,
        /// How.
        status: String,
        /// Its log.
        log: PathBuf,
        /// The end of it.
        tail: String,
    },
    /// The job failed.
    #[error("the job failed: {0}")]
    JobFailed(String),
    /// The user has ended it.
    #[error("interrupted")]
    Interrupted,
    /// The user has ended it in good order.
    #[error(
        "stopped after {samples} samples; the model so far, a checkpoint and the curves are in {kept}; this goes on from there:\n  {command}"
    )]
    Stopped {
        /// Trained on.
        samples: u64,
        /// The run directory.
        kept: String,
        /// What to type.
        command: String,
    },
    /// A picture cannot be drawn.
    #[error("cannot draw {path:?}: {reason}")]
    Plot {
        /// Which.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
}

impl CommandError {
    /// For errors about a file.
    pub(crate) fn file(path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |error| Self::File { path, error }
    }
}
