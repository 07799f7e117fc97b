//! One job of a long-lived cluster: from its place in the queue to its end.

use std::time::Duration;

use cluster::{Cluster, Summary};

use super::error::CoordinatorError;
use super::work::Work;
use crate::queue::{End, Entry, JobQueue, Outcome};

/// The pause before another attempt to persist the beginning or the end of a job.
pub(super) const PERSIST_AGAIN: Duration = Duration::from_secs(1);

/// A job of the queue that is at work, or has ended and is still shown.
pub(super) struct QueuedJob {
    pub(super) entry: Entry,
    pub(super) work: Work,
}

impl QueuedJob {
    /// Cancels the job if the queue has cancelled it: that call may have come before the job was at work.
    pub(super) async fn heed_cancelling(&self, queue: &JobQueue) {
        if let Ok(entry) = queue.entry(self.entry.id)
            && entry.cancelling
        {
            let cancel = |cluster: &mut Cluster, now| cluster.cancel(now, entry.at_once);
            self.work.running.shared.ask(cancel).await;
        }
    }

    /// Waits for the end of the job, and writes its summary. Retries while the write fails, for example on a full disk.
    ///
    /// # Errors
    /// [`CoordinatorError::StateLost`].
    pub(super) async fn ended(&self) -> Result<Summary, CoordinatorError> {
        let summary = self.work.running.ended().await?;
        while let Err(error) = self.work.summarise(&summary).await {
            let id = self.entry.id;
            tracing::error!("the summary of job {id} cannot be written; retrying: {error}");
            tokio::time::sleep(PERSIST_AGAIN).await;
        }
        Ok(summary)
    }

    /// Returns when the state of the job cannot be written any more.
    pub(super) async fn broken(&self) {
        self.work.running.shared.broken().await;
    }

    /// Returns whether the next start of the coordinator is to resume the job. This holds if the coordinator was
    /// started with the job, if the job failed because members were missing or could not work, and if no other job
    /// waits.
    pub(super) fn is_to_be_resumed(&self, queue: &JobQueue) -> bool {
        let unable = |cluster: &Cluster, _| cluster.failed_without_members();
        self.entry.folder.is_empty()
            && self.work.running.shared.look(unable)
            && !queue.others_wait(self.entry.id)
    }

    /// Persists the end of the job in the queue.
    pub(super) async fn persist_end(&self, queue: &std::sync::Arc<JobQueue>, summary: &Summary) {
        let total = self
            .work
            .running
            .shared
            .look(|cluster, _| cluster.total_samples());
        let end = End {
            error: summary.error.clone(),
            stopped: summary.stopped,
            outcome: Some(Outcome::new(summary, total)),
        };
        persist_end(queue, &self.entry, end).await;
    }
}

/// Persists the end of a job. Returns only once this has succeeded: if the next job began before, this one could be
/// begun again.
pub(super) async fn persist_end(queue: &std::sync::Arc<JobQueue>, entry: &Entry, end: End) {
    match (end.error.as_str(), end.stopped) {
        ("", false) => tracing::info!(id = entry.id, name = entry.name, "the job is done"),
        ("", true) => tracing::info!(id = entry.id, name = entry.name, "the job was ended early"),
        (error, _) => tracing::error!(id = entry.id, name = entry.name, "the job failed: {error}"),
    }
    while let Err(error) = queue.end(entry.id, end.clone()).await {
        tracing::error!(
            "the end of job {} cannot be persisted; retrying: {error}",
            entry.id
        );
        tokio::time::sleep(PERSIST_AGAIN).await;
    }
}
