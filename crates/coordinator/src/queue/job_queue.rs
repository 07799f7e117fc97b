//! The jobs under their lock. A change is persisted before anyone sees it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use metrics::{counter, gauge};
use parking_lot::Mutex;
use shared_proto::refusal::Refusal;
use shared_proto::task;
use shared_proto::wire;
use tokio::sync::Notify;
use tokio::task::JoinError;

use super::entry::{Entry, JobState};
use super::jobs::{Cancelled, End, Jobs, Submission, unknown};
use super::store::Store;
use crate::keeping::log::StateError;

/// The queue's file in the coordinator's folder.
const FILE: &str = "jobs.state";

/// The error of a change.
#[derive(Debug, thiserror::Error)]
pub(crate) enum QueueError {
    /// The change is refused.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The change cannot be persisted, so it is not made.
    #[error("the queue of jobs cannot be written: {0}")]
    Store(#[from] StateError),
}

/// The queue of a coordinator.
pub(crate) struct JobQueue {
    /// The coordinator's folder. The run directories of submitted jobs are below it.
    folder: PathBuf,
    /// The location below which jobs have their checkpoints. `None`: jobs have them in their run directories.
    locations: Option<String>,
    jobs: Mutex<Jobs>,
    /// Locked while a change is made.
    store: Arc<tokio::sync::Mutex<Store>>,
    /// Wakes the coordinator after a change.
    changed: Notify,
}

impl JobQueue {
    /// Opens the queue in the coordinator's folder.
    ///
    /// # Errors
    /// If it cannot be read or written, or another process has it open.
    pub(crate) fn open(folder: &Path, locations: Option<String>) -> Result<Arc<Self>, StateError> {
        let store = Store::open(&folder.join(FILE))?;
        let jobs = store.read()?;
        show(&jobs, &jobs);
        Ok(Arc::new(Self {
            folder: folder.to_owned(),
            locations,
            jobs: Mutex::new(jobs),
            store: Arc::new(tokio::sync::Mutex::new(store)),
            changed: Notify::new(),
        }))
    }

    /// Returns the run directory of a job.
    pub(crate) fn run_dir(&self, entry: &Entry) -> PathBuf {
        entry.run_dir(&self.folder)
    }

    /// Adds a job. Returns it once it is persisted.
    pub(crate) async fn submit(
        self: &Arc<Self>,
        submission: Submission,
    ) -> Result<Entry, QueueError> {
        let (folder, locations) = (self.folder.clone(), self.locations.clone());
        self.change(move |jobs, now| {
            let is_free = |name: &str| !folder.join(name).exists();
            let id = jobs.submit(submission, locations.as_deref(), is_free, now)?;
            jobs.entries.get(&id).cloned().ok_or_else(|| unknown(id))
        })
        .await
    }

    /// Adds the job that the coordinator is started with, unless it has been added before.
    pub(crate) async fn begin_with(self: &Arc<Self>, given: Submission) -> Result<(), QueueError> {
        self.change(move |jobs, now| {
            jobs.begin_with(given, now);
            Ok(())
        })
        .await
    }

    /// Replaces the settings of the job that the coordinator is started with. The job's run must not have begun.
    pub(crate) async fn replace(self: &Arc<Self>, given: Submission) -> Result<(), QueueError> {
        self.change(move |jobs, now| {
            jobs.replace(given, now);
            Ok(())
        })
        .await
    }

    /// Queues the job in the coordinator's folder again, if it has failed.
    pub(crate) async fn resume(self: &Arc<Self>) -> Result<(), QueueError> {
        self.change(|jobs, _| {
            jobs.resume();
            Ok(())
        })
        .await
    }

    /// Cancels a job.
    pub(crate) async fn cancel(
        self: &Arc<Self>,
        id: u64,
        at_once: bool,
    ) -> Result<Cancelled, QueueError> {
        self.change(move |jobs, now| jobs.cancel(id, at_once, now))
            .await
    }

    /// Notes that a job is at work. Returns false if it was cancelled meanwhile.
    pub(crate) async fn begin(self: &Arc<Self>, id: u64) -> Result<bool, QueueError> {
        self.change(move |jobs, now| Ok(jobs.begin(id, now))).await
    }

    /// Notes that a job has ended.
    pub(crate) async fn end(self: &Arc<Self>, id: u64, end: End) -> Result<(), QueueError> {
        self.change(move |jobs, now| {
            jobs.end(id, end, now);
            Ok(())
        })
        .await
    }

    /// Returns the job to work on, if there is one.
    pub(crate) fn first(&self) -> Option<Entry> {
        self.jobs.lock().first().cloned()
    }

    /// Returns whether other jobs than this one wait.
    pub(crate) fn others_wait(&self, id: u64) -> bool {
        let jobs = self.jobs.lock();
        let mut entries = jobs.entries.values();
        entries.any(|entry| entry.id != id && !entry.has_ended())
    }

    /// Returns the job that ended last, among those that had begun.
    pub(crate) fn last(&self) -> Option<Entry> {
        let jobs = self.jobs.lock();
        let ended = jobs.entries.values();
        let ended = ended.filter(|entry| entry.has_ended() && entry.began > 0);
        ended.max_by_key(|entry| (entry.ended, entry.id)).cloned()
    }

    /// Returns the job that the coordinator was started with.
    pub(crate) fn given(&self) -> Option<Entry> {
        let jobs = self.jobs.lock();
        let mut entries = jobs.entries.values();
        entries.find(|entry| entry.folder.is_empty()).cloned()
    }

    /// Returns a job.
    ///
    /// # Errors
    /// [`Reason::UnknownJob`](shared_proto::refusal::Reason::UnknownJob).
    pub(crate) fn entry(&self, id: u64) -> Result<Entry, Refusal> {
        let jobs = self.jobs.lock();
        jobs.entries.get(&id).cloned().ok_or_else(|| unknown(id))
    }

    /// Returns a job as users see it.
    ///
    /// # Errors
    /// As [`Self::entry`].
    pub(crate) fn shown(&self, id: u64) -> Result<wire::QueuedJob, Refusal> {
        Ok(self.entry(id)?.shown(&self.folder))
    }

    /// Returns at most `most` jobs with a higher id than `after`, as users see them.
    pub(crate) fn page(&self, after: u64, most: usize) -> Vec<wire::QueuedJob> {
        let jobs = self.jobs.lock();
        let entries = jobs.entries.range(after.saturating_add(1)..);
        let entries = entries.take(most);
        entries
            .map(|(_, entry)| entry.shown(&self.folder))
            .collect()
    }

    /// Waits until a job is to be cancelled.
    pub(crate) async fn cancelling(&self, id: u64) {
        let cancelling = |entry: Entry| entry.cancelling;
        while !self.entry(id).is_ok_and(cancelling) {
            self.changed().await;
        }
    }

    /// Waits for the next change.
    pub(crate) async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Makes a change: persists it, and then publishes it.
    async fn change<T: Send + 'static>(
        self: &Arc<Self>,
        change: impl FnOnce(&mut Jobs, u64) -> Result<T, Refusal> + Send + 'static,
    ) -> Result<T, QueueError> {
        let queue = Arc::clone(self);
        // A task of its own, so that a persisted change is published even if the caller is cancelled.
        let changed = task::spawn_with_result(async move {
            let mut store = Arc::clone(&queue.store).lock_owned().await;
            let before = queue.jobs.lock().clone();
            let mut after = before.clone();
            let answer = change(&mut after, unix_seconds())?;
            if after != before {
                let written = tokio::task::spawn_blocking(move || {
                    let written = store.write(&before, &after);
                    // The store stays locked until the change is published.
                    (store, after, written)
                });
                let (_store, after, written) = done(written.await).await;
                written?;
                show(&queue.jobs.lock(), &after);
                *queue.jobs.lock() = after;
                queue.changed.notify_one();
            }
            Ok(answer)
        });
        done(changed.await).await
    }
}

/// Shows a change in the metrics.
fn show(before: &Jobs, after: &Jobs) {
    let entries = after.entries.values();
    let waiting = entries.filter(|entry| entry.state == JobState::Queued);
    gauge!("flambeau_coordinator_jobs_waiting").set(waiting.count() as f64);
    for outcome in [JobState::Done, JobState::Failed, JobState::Cancelled] {
        let ended = |entry: &&Entry| {
            let known = before.entries.get(&entry.id);
            entry.state == outcome && known.is_none_or(|known| known.state != outcome)
        };
        let ended = after.entries.values().filter(ended).count() as u64;
        counter!("flambeau_coordinator_jobs_ended_total", "outcome" => outcome.label())
            .increment(ended);
    }
}

/// Returns the result of a task, or resumes its panic. Never returns for a cancelled task, because tasks are cancelled
/// only when the process ends.
async fn done<T>(ended: Result<T, JoinError>) -> T {
    match ended.map_err(JoinError::try_into_panic) {
        Ok(result) => result,
        Err(Ok(panic)) => std::panic::resume_unwind(panic),
        Err(Err(_)) => std::future::pending().await,
    }
}

fn unix_seconds() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}
