//! The errors of pushes and pulls, split by what the worker does next.

use std::time::Duration;

use shared_proto::refusal::{Reason, Refusal};
use tonic::Status;

/// The error of a push or pull.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// The cluster has moved on without this worker: register again.
    #[error("no longer part of the cluster: {0}")]
    Fenced(Refusal),
    /// Another process has taken this worker's identity: end.
    #[error("superseded: {0}")]
    Superseded(Refusal),
    /// Blocks have moved to other servers: fetch the shard map and connect again.
    #[error("the shard map has changed; the server goes by epoch {epoch}")]
    Moved {
        /// The epoch of the new map.
        epoch: u64,
    },
    /// The server refused: the worker, or the job, is at fault.
    #[error("refused: {0}")]
    Refused(Refusal),
    /// A gradient or an initial value is NaN or infinite. Nothing was sent.
    #[error(
        "the gradient of variable {variable:?} at clock {clock} holds NaN or infinity; lower the learning rate, set clip_norm, or look at the data"
    )]
    NonFinite {
        /// The variable's name.
        variable: String,
        /// The step.
        clock: u64,
    },
    /// A gradient has values that are too large for the wire's number type. Nothing of the push was sent.
    #[error(
        "the gradient of variable {variable:?} holds values too large for {wire}; set strategy.wire to f32 (f16 ends at 65504, bf16 where f32 does), or lower the learning rate; clip_norm helps outside sync mode only, because in sync mode the servers clip"
    )]
    TooLarge {
        /// The variable's name.
        variable: String,
        /// The number type.
        wire: &'static str,
    },
    /// Values do not fit the shard map.
    #[error("variable {variable:?} has {found} elements; the shard map says {expected}")]
    WrongSize {
        /// The variable's name.
        variable: String,
        /// The number of elements given.
        found: usize,
        /// The number of elements expected.
        expected: usize,
    },
    /// A step has more rows in one bucket of a table than fit into a message. Nothing of the push was sent.
    #[error(
        "a step has gradients of {rows} rows in one of the {buckets} buckets of table {table:?}; a message holds {most}, so give the table more buckets or the job smaller batches"
    )]
    TooManyRows {
        /// The table's name.
        table: String,
        /// The number of rows in the largest bucket.
        rows: usize,
        /// The most rows that a message can have.
        most: usize,
        /// The number of buckets of the table.
        buckets: u32,
    },
    /// A server could not be reached for longer than the worker's patience.
    #[error("shard {shard} at {address} could not be reached for {patience:?}: {reason}")]
    Unreachable {
        /// The shard's number.
        shard: u32,
        /// The address of its server.
        address: String,
        /// The time for which the worker has tried.
        patience: Duration,
        /// The error of the last attempt.
        reason: String,
    },
    /// A server's answer does not fit the request.
    #[error("shard {shard} has answered {what}; use the same release of Flambeau everywhere")]
    WrongAnswer {
        /// The shard's number.
        shard: u32,
        /// The fault of the answer.
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
    /// Returns whether registering again may help.
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
            // If a server holds a clock to be impossible, a restarted coordinator has not told the server of it.
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

/// Returns the refusal that ended a stream, if there is one. Otherwise the stream may be opened again.
pub(crate) fn refusal_of(status: &Status) -> Option<Refusal> {
    Refusal::from_status(status)
}
