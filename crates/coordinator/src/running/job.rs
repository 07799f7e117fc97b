//! One job of a long-lived cluster: from its place in the queue to its end.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use cluster::{Cluster, Summary, Turn};
use daemon::Offload;
use daemon::process::Process;
use shared_proto::job::{Job, run_dir};
use shared_proto::receipt::ReceiptKey;
use shared_proto::task;
use tokio::task::JoinHandle;

use super::begin::{Begun, Restore, Resume, Wish, begin, here, open_store};
use super::error::CoordinatorError;
use super::wiring::{DRAIN, Parts, Running};
use crate::calls::slot::Active;
use crate::keeping::run_dir::{LAST_RECORDS, Recorder};
use crate::keeping::state::State;
use crate::page::ShownJob;
use crate::queue::{End, Entry, JobQueue, Outcome};

/// The pause before another attempt to persist the beginning or the end of a job.
pub(super) const PERSIST_AGAIN: Duration = Duration::from_secs(1);

/// A job of the queue that is at work, or has ended and is still shown.
pub(super) struct Work {
    entry: Entry,
    running: Running,
    work: JoinHandle<()>,
    recorder: Recorder,
}

/// How a job is begun.
pub(super) struct Beginning<'a> {
    pub(super) entry: Entry,
    /// The settings of the job; those in the queue, or those that the coordinator was started with.
    pub(super) job: Job,
    /// Whether to resume it if it has failed.
    pub(super) resume: Resume,
    pub(super) address: SocketAddr,
    pub(super) process: &'a Process,
}

impl Beginning<'_> {
    /// Begins the job, or resumes it from the state in its folder.
    ///
    /// # Errors
    /// See [`begin`].
    pub(super) async fn begin(self, queue: &JobQueue) -> Result<Work, CoordinatorError> {
        let Self { entry, mut job, .. } = self;
        let dir = queue.run_dir(&entry);
        let unwritable = |error| CoordinatorError::RunDir {
            dir: dir.clone(),
            error,
        };
        tokio::fs::create_dir_all(&dir).await.map_err(unwritable)?;
        job.run_dir = Some(dir.clone());
        let path = dir.join(run_dir::STATE);
        let state = State::open(&path).map_err(|error| CoordinatorError::State { path, error })?;
        let restore = (!entry.restore.is_empty()).then_some(Restore::At(&entry.restore));
        let wish = Wish {
            checkpoints: open_store(&job, &dir)?,
            restore,
            resume: self.resume,
            run: entry.run.clone(),
            receipt_key: ReceiptKey(rand::random()),
            turn: match entry.folder.is_empty() {
                true => Turn::First,
                false => Turn::Submitted,
            },
            here: here(self.address),
        };
        let begun: Begun = begin(job, &dir, &state, wish).await?;
        let store = begun.keeping.as_ref().map(|keeping| keeping.store.clone());
        let recorder = Recorder::open(&dir, begun.cluster.job(), begun.again, store).await;
        let recorder = recorder.map_err(unwritable)?;
        tracing::info!(id = entry.id, name = entry.name, run_dir = %dir.display(), again = begun.again, "coordinating a job");
        let parts = Parts {
            begun,
            state,
            records: recorder.lines(),
            offload: Offload::Threads,
            security: self.process.security.clone(),
        };
        let (running, work) = parts.start();
        Ok(Work {
            entry,
            running,
            work: task::spawn(work),
            recorder,
        })
    }
}

impl Work {
    /// Returns the job as calls see it.
    pub(super) fn active(&self) -> Active {
        self.running.active(self.entry.id, &self.entry.folder)
    }

    /// Returns the job as the page shows it.
    pub(super) fn shown(&self, queue: &JobQueue) -> ShownJob {
        ShownJob {
            shared: Arc::clone(&self.running.shared),
            history: self.recorder.history(),
            run_dir: queue.run_dir(&self.entry),
        }
    }

    /// Cancels the job if it is to be cancelled: the call that said so may have come before the job was at work.
    pub(super) async fn heed_cancelling(&self, queue: &JobQueue) {
        if let Ok(entry) = queue.entry(self.entry.id)
            && entry.cancelling
        {
            let cancel = |cluster: &mut Cluster, now| cluster.cancel(now, entry.at_once);
            self.running.shared.ask(cancel).await;
        }
    }

    /// Waits for the end of the job, and writes its summary. While that fails, as on a full disk, it tries again.
    ///
    /// # Errors
    /// [`CoordinatorError::StateLost`].
    pub(super) async fn ended(&self, queue: &JobQueue) -> Result<Summary, CoordinatorError> {
        let summary = self.running.ended().await?;
        let dir = queue.run_dir(&self.entry);
        // If the job had ended before this process started, the existing summary knows more.
        if !(self.running.had_ended && dir.join(run_dir::SUMMARY).exists()) {
            while let Err(error) = self.recorder.summarise(&summary).await {
                let id = self.entry.id;
                tracing::error!(
                    "the summary of job {id} cannot be written to {dir:?}; retrying: {error}"
                );
                tokio::time::sleep(PERSIST_AGAIN).await;
            }
        }
        Ok(summary)
    }

    /// Returns when the state of the job cannot be written any more.
    pub(super) async fn broken(&self) {
        self.running.shared.broken().await;
    }

    /// Returns whether the next start of the coordinator is to resume the job: the one that it was started with, which has failed
    /// because members were missing or could not work, while no other job waits.
    pub(super) fn is_to_be_resumed(&self, queue: &JobQueue) -> bool {
        let unable = |cluster: &Cluster, _| cluster.failed_without_members();
        self.entry.folder.is_empty()
            && self.running.shared.look(unable)
            && !queue.others_wait(self.entry.id)
    }

    /// Persists the end of the job in the queue.
    pub(super) async fn persist_end(&self, queue: &std::sync::Arc<JobQueue>, summary: &Summary) {
        let total = self
            .running
            .shared
            .look(|cluster, _| cluster.total_samples());
        let end = End {
            error: summary.error.clone(),
            stopped: summary.stopped,
            outcome: Some(Outcome::of(summary, total)),
        };
        persist_end(queue, &self.entry, end).await;
    }

    /// Ends the work on the job, because the next one begins or the coordinator ends.
    pub(super) async fn close(self) {
        self.running.stop();
        let _ = tokio::time::timeout(DRAIN, self.work).await;
        self.running.release().await;
        let kept = self.running.shared.keep_all();
        let _ = tokio::time::timeout(DRAIN, kept).await;
        // The queue of records ends once no call holds the job any more, which may take as long as a call may wait.
        drop(self.running);
        let _ = tokio::time::timeout(LAST_RECORDS, self.recorder.close()).await;
    }
}

/// Persists the end of a job. The next one is not begun before that, or this one could be begun again.
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
