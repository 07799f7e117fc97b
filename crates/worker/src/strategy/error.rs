//! The errors of strategies, split by what the worker does next.

use std::error::Error;

use checkpoint::CheckpointError;
use daemon::membership::MembershipError;

use replica::ReplicaError;

/// The error of a strategy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StrategyError {
    /// A gradient holds NaN or infinity. No part of the step's gradients was applied, so the step may be left out.
    #[error("{0}")]
    NonFinite(String),
    /// The group of workers is over, and the step was not made. The worker joins the next group.
    #[error("the step is abandoned: {0}")]
    Abandoned(String),
    /// The cluster has moved on without this worker. The worker registers again.
    #[error(transparent)]
    Outdated(Box<dyn Error + Send + Sync>),
    /// The coordinator refuses a call, or cannot be reached.
    #[error(transparent)]
    Membership(#[from] MembershipError),
    /// The replica failed.
    #[error(transparent)]
    Replica(#[from] ReplicaError),
    /// The coordinator's answer to a call cannot be used.
    #[error("the coordinator's answer to {call} cannot be used: {problem}")]
    Answer {
        /// The call.
        call: &'static str,
        /// The fault of the answer.
        problem: String,
    },
    /// This worker cannot use the store of checkpoints, while others may.
    #[error(transparent)]
    Store(CheckpointError),
    /// The worker, or the job, cannot continue.
    #[error(transparent)]
    Failed(Box<dyn Error + Send + Sync>),
}
