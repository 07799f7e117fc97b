//! A shard of the variables: steps 5 to 7 of the data path.
//!
//! - `messages`: pushes and pulls; `checks`: a message is checked as a whole before anything changes
//! - `gate`: admission of messages by clock: proceed, wait or reject
//! - `views`: catching up with the coordinator's views, and the steps that they commit
//! - `store`: the blocks of an epoch
//! - `block`: values under one lock, with version, watermarks and staged gradients
//! - `snapshot`: the blocks of a checkpoint that is being written

mod block;
mod checks;
pub(crate) mod gate;
mod messages;
pub(crate) mod snapshot;
pub(crate) mod store;
mod views;

use std::sync::OnceLock;

use shared_proto::job::{Job, Mode, NonFinite};
use shared_proto::refusal::{Reason, Refusal};
use tokio::sync::{Notify, watch};

use crate::counters::Counters;
use crate::row_settings::RowStorage;
use gate::Gate;

#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use block::BucketStorage;
#[cfg(test)]
pub(crate) use block::Limit;
pub(crate) use block::{Block, NotCommitted, RowsLost, SharedBlock};
pub(crate) use messages::PullAnswer;
pub(crate) use views::Followed;

/// A shard of the variables.
pub(crate) struct Shard {
    pub(crate) job: Job,
    pub(crate) gate: Gate,
    pub(crate) counters: Counters,
    /// The most bytes that copies for a checkpoint may take.
    snapshot_bytes: usize,
    followed: watch::Sender<Followed>,
    /// The address at which lookups are answered, if any are.
    pub(crate) lookup_address: OnceLock<String>,
    pub(crate) rows: RowStorage,
    /// Set once rows on disk could not be read.
    lost: OnceLock<RowsLost>,
    has_lost: Notify,
}

impl Shard {
    pub(crate) fn new(job: &Job, rows: RowStorage) -> Self {
        Self {
            job: job.clone(),
            gate: Gate {
                job: job.name.clone(),
                strategy: job.strategy.clone(),
            },
            counters: Counters::new(),
            snapshot_bytes: (job.checkpoint.snapshot_mebibytes as usize).saturating_mul(1 << 20),
            followed: watch::channel(Followed::default()).0,
            lookup_address: OnceLock::new(),
            rows,
            lost: OnceLock::new(),
            has_lost: Notify::new(),
        }
    }

    /// Stops taking messages, because rows of a block on disk cannot be read. Returns the refusal of the message that
    /// needed the rows. Its sender sends the message again, after the shard is restored.
    pub(crate) fn lose(&self, block: &str, lost: RowsLost) -> Refusal {
        let refusal = Refusal::new(
            Reason::NotInitialized,
            format!("{block}: {lost}; this server stops, and the shard is restored"),
        );
        if self.lost.set(lost).is_ok() {
            self.close();
            self.has_lost.notify_one();
        }
        refusal
    }

    /// Waits until rows on disk cannot be read. Returns the reason.
    pub(crate) async fn has_lost_rows(&self) -> RowsLost {
        loop {
            if let Some(lost) = self.lost.get() {
                return lost.clone();
            }
            self.has_lost.notified().await;
        }
    }

    /// Returns whether the job is in sync mode.
    pub(crate) fn is_sync(&self) -> bool {
        self.job.strategy.mode == Mode::Sync
    }

    /// Returns whether weights that are NaN or infinite end the job, so that no checkpoint may have them.
    pub(crate) fn refuses_non_finite(&self) -> bool {
        self.job.non_finite == NonFinite::Fail
    }
}
