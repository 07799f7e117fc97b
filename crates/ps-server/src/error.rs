//! The errors that end a parameter server.

use checkpoint::CheckpointError;
use daemon::membership::MembershipError;
use network::security::SecurityError;
use network::transport::Listen;
use shared_proto::ids::Task;
use shared_proto::refusal::Refusal;

/// An error that ends a parameter server.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PsError {
    /// The server cannot listen on its address.
    #[error("cannot listen on {address}: {error}; give another --listen")]
    Listen {
        /// The address.
        address: Listen,
        /// The system's error.
        error: std::io::Error,
    },
    /// The server cannot listen for lookups.
    #[error("cannot answer lookups on {address}: {error}; give another --lookup-listen")]
    LookupListen {
        /// The address.
        address: std::net::SocketAddr,
        /// The system's error.
        error: std::io::Error,
    },
    /// The files for TLS or the token cannot be used.
    #[error(transparent)]
    Security(#[from] SecurityError),
    /// The coordinator refuses the server, or cannot be reached.
    #[error(transparent)]
    Membership(#[from] MembershipError),
    /// The coordinator has begun another run, of this job or of another one. That run needs a new shard.
    #[error("the coordinator has another run now")]
    OtherRun,
    /// The coordinator's shard map makes no sense.
    #[error("the shard map cannot be read: {0}")]
    ShardMap(#[from] Refusal),
    /// The store of checkpoints cannot be used.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A step was committed with a gradient that this shard does not have.
    #[error(
        "step {step} was committed with a gradient of {task} that this shard does not have; its weights are not the job's any more"
    )]
    Diverged {
        /// The step.
        step: u64,
        /// The worker that the missing gradient is from.
        task: Task,
    },
    /// The coordinator has restarted with an outdated copy of its state. The copy lacks changes that this server has
    /// already followed.
    #[error(
        "the coordinator has started with an older copy of its state: the copy has {known} changes, and this server has followed {held}. Put the newer files back, or start the coordinator with --restore RUN_DIR and another --run-dir, which goes on from the newest checkpoint (a submitted job: submit it again with --restore)"
    )]
    OlderState {
        /// The number of changes that the coordinator had persisted when it published the newest view that this server
        /// has followed.
        held: u64,
        /// The number of changes in the coordinator's copy of its state.
        known: u64,
    },
    /// The folder for rows beyond the limit on memory cannot be used.
    #[error("cannot write rows to {folder}: {error}; give another --table-folder")]
    TableFolder {
        /// The folder.
        folder: String,
        /// The system's error.
        error: std::io::Error,
    },
    /// Rows on disk are lost. The shard's next server restores them from a checkpoint.
    #[error("{0}; look at the disk of --table-folder")]
    RowsLost(String),
}

impl PsError {
    /// Returns whether the error concerns only this job: the server may still be able to serve another job, or this job
    /// from its newest checkpoint.
    pub(crate) fn is_of_this_job(&self) -> bool {
        matches!(
            self,
            Self::ShardMap(_)
                | Self::Checkpoint(_)
                | Self::Diverged { .. }
                | Self::RowsLost(_)
                | Self::OlderState { .. }
        )
    }
}

impl daemon::process::Failure for PsError {}
