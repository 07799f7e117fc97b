//! The errors between a process and its coordinator.

use std::time::Duration;

use network::security::Mismatch;
use shared_proto::job::JobError;

/// An error between a process and its coordinator. The variants differ in what the process does next.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MembershipError {
    /// The coordinator did not answer for longer than the process's patience: give up.
    #[error(
        "the coordinator at {address} could not be reached for {patience:?}: {reason}; is it running, is the address right, and do both or neither use --tls-ca?"
    )]
    Unreachable {
        /// The coordinator's address.
        address: String,
        /// The time for which the process tried.
        patience: Duration,
        /// The error of the last try.
        reason: String,
    },
    /// One of the two does not accept the other's certificate: give up.
    #[error(
        "this process and the coordinator at {address} do not trust each other: {reason}; look at --tls-ca, --tls-cert and --tls-key on both sides"
    )]
    Untrusted {
        /// The coordinator's address.
        address: String,
        /// The error in the certificates.
        reason: String,
    },
    /// Only one of the two speaks TLS: give up.
    #[error("the coordinator at {address}: {mismatch}")]
    Mismatched {
        /// The coordinator's address.
        address: String,
        /// The side that speaks TLS.
        mismatch: Mismatch,
    },
    /// The coordinator considers this process dead, or another process has its identity: register again.
    #[error("no longer a member of the cluster: {0}")]
    Fenced(String),
    /// The shard map is newer than the caller's: move to the newer one, and call again.
    #[error("the shard map is newer: {0}")]
    Outdated(String),
    /// The call is older than one that was accepted: give the call a new number.
    #[error("out of order: {0}")]
    OutOfOrder(String),
    /// Another process has taken this one's identity: give up.
    #[error("superseded: {0}")]
    Superseded(String),
    /// The coordinator refused: give up.
    #[error("the coordinator refused: {0}")]
    Refused(String),
    /// The coordinator has no job at present: wait for one.
    #[error("there is no job: {0}")]
    NoJob(String),
    /// The job has failed: give up, or wait for the next one.
    #[error("the job failed: {0}")]
    JobFailed(String),
    /// The job that the coordinator sent cannot be read.
    #[error("the coordinator's job cannot be read: {0}")]
    Job(#[from] JobError),
}

impl MembershipError {
    /// Returns whether registering again may help.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Fenced(_) | Self::NoJob(_))
    }
}
