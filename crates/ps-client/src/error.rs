//! What can go wrong with a push or pull; split by what the worker does next.

use std::time::Duration;

use shared_proto::refusal::{Reason, Refusal};
use tonic::Status;

/// What can go wrong with a push or pull.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// The cluster has moved on without this worker: register again.
    #[error("no longer part of the cluster: {0}")]
    Fenced(Refusal),
    /// Another process has taken this worker's identity: end.
    #[error("superseded: {0}")]
    Superseded(Refusal),
    /// Blocks live elsewhere by now: fetch the shard map and connect again.
    #[error("the shard map has changed; the server goes by epoch {epoch}")]
    Moved {
        /// The epoch of the new map.
        epoch: u64,
    },
    /// The server refused: the worker, or the job, is at fault.
    #[error("refused: {0}")]
    Refused(Refusal),
    /// A gradient is not a number; nothing of the push was sent.
    #[error(
        "the gradient of variable {variable:?} at clock {clock} holds NaN or infinity; lower the learning rate, set clip_norm, or look at the data"
    )]
    NonFinite {
        /// Its name.
        variable: String,
        /// The step.
        clock: u64,
    },
    /// A gradient does not fit the numbers that it is to travel in; nothing of the push was sent.
    #[error(
        "the gradient of variable {variable:?} holds values too large for {wire}; set strategy.wire to f32 (f16 ends at 65504, bf16 where f32 does), or clip_norm"
    )]
    TooLarge {
        /// Its name.
        variable: String,
        /// The numbers.
        wire: &'static str,
    },
    /// Values do not fit the shard map.
    #[error("variable {variable:?} has {found} bytes; the shard map says {expected}")]
    WrongSize {
        /// Its name.
        variable: String,
        /// Bytes given.
        found: usize,
        /// Bytes expected.
        expected: usize,
    },
    /// A server could not be reached for longer than the worker's patience.
    #[error("shard {shard} at {address} could not be reached for {patience:?}: {reason}")]
    Unreachable {
        /// Which shard.
        shard: u32,
        /// Where it should be.
        address: String,
        /// How long it was tried.
        patience: Duration,
        /// What the last try came to.
        reason: String,
    },
    /// A server answered what it was not asked.
    #[error("shard {shard} has answered {what}; use the same release of Flambeau everywhere")]
    WrongAnswer {
        /// Which shard.
        shard: u32,
        /// What is wrong with the answer.
        what: &'static str,
    },
    /// The coordinator has not taken the report of updates that were lost with a server.
    #[error("the coordinator has not taken the report of updates that shard {0} has lost")]
    Unreported(u32),
    /// The session was closed while the answer was awaited.
    #[error("the session with shard {0} is closed")]
    Closed(u32),
}

impl ClientError {
    /// Whether registering again may help.
    pub fn is_retryable(&self) -> bool {
        matches!(
            self,
            Self::Fenced(_) | Self::Moved { .. } | Self::Unreachable { .. } | Self::Unreported(_)
        )
    }
}

impl From<Refusal> for ClientError {
    fn from(refusal: Refusal) -> Self {
        match refusal.reason {
            // A clock that the server cannot believe is one that a coordinator which has started again
            // did not tell it of.
            Reason::Fenced
            | Reason::NotLeased
            | Reason::StaleEpoch
            | Reason::StaleClock
            | Reason::FutureClock => Self::Fenced(refusal),
            Reason::Superseded => Self::Superseded(refusal),
            _ => Self::Refused(refusal),
        }
    }
}

/// The refusal that ended a stream, if one did; otherwise the stream may be opened again.
pub(crate) fn refusal_of(status: &Status) -> Option<Refusal> {
    Refusal::from_status(status)
}
