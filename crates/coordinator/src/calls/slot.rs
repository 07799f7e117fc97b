//! The current job. A long-lived cluster works on one job after the other. While its queue is empty, the job that ended
//! last stays the current one.

use std::sync::Arc;

use shared_proto::refusal::{Reason, Refusal};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::keeping::shared::Shared;

/// The job at work, or the job that ended last.
#[derive(Clone)]
pub(crate) struct Active {
    pub(crate) shared: Arc<Shared>,
    /// Cancelled when the job is replaced, or the coordinator ends.
    pub(crate) over: CancellationToken,
    /// The job's id in the queue; 0 without a queue.
    pub(crate) id: u64,
    /// The job's run directory, relative to the coordinator's folder. Empty for the job that the coordinator was
    /// started with.
    pub(crate) folder: String,
}

/// Holds the current job, if there is one.
#[derive(Clone, Debug)]
pub(crate) struct Slot(watch::Sender<Option<Active>>);

impl std::fmt::Debug for Active {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Active")
            .field("id", &self.id)
            .finish_non_exhaustive()
    }
}

impl Slot {
    pub(crate) fn new(active: Option<Active>) -> Self {
        Self(watch::Sender::new(active))
    }

    /// Sets the current job; `None` empties the slot.
    pub(crate) fn set(&self, active: Option<Active>) {
        self.0.send_replace(active);
    }

    /// Returns the job.
    ///
    /// # Errors
    /// [`Reason::NoJob`].
    pub(crate) fn active(&self) -> Result<Active, Refusal> {
        self.0.borrow().clone().ok_or_else(|| {
            Refusal::new(
                Reason::NoJob,
                "the coordinator has no job at present; `flambeau submit` adds one",
            )
        })
    }

    /// Waits until there is a job that has not ended.
    pub(crate) async fn at_work(&self) {
        let mut changes = self.0.subscribe();
        loop {
            let active = changes.borrow_and_update().clone();
            let ended = |active: &Active| active.shared.look(|cluster, _| cluster.ended());
            if active.is_some_and(|active| !ended(&active)) {
                return;
            }
            if changes.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }
}
