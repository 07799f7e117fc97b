//! The coordinator of a long-lived cluster: works on one job after the other, and waits for the next one.
//!
//! Each job has a `Cluster`, a run and a run directory of its own, as if a coordinator had been started for it alone.
//! Only the queue outlives a job. A job is persisted as begun before its run directory is touched, and as ended once
//! its own state says so. So wherever this process dies, the next process finds at most one job that has begun and not
//! ended, and resumes it.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use cluster::Turn;
use daemon::process::Process;
use network::transport::Listen;
use shared_proto::job::{Job, run_dir};
use tokio_util::sync::CancellationToken;

use super::begin::{Resume, is_same};
use super::error::CoordinatorError;
use super::job::{PERSIST_AGAIN, QueuedJob, persist_end};
use super::place::Place;
use super::settings::Settings;
use super::wiring::{DRAIN, spawn_server};
use super::work::Beginning;
use crate::calls::current_job::CurrentJob;
use crate::calls::jobs::JobCalls;
use crate::calls::service::Service;
use crate::calls::slot::Slot;
use crate::calls::waiting::WaitingMembers;
use crate::keeping::log::StateError;
use crate::keeping::state::State;
use crate::page::Page;
use crate::queue::{End, Entry, JobQueue, QueueError, Submission};

/// A coordinator of a long-lived cluster.
struct LongLived<'a> {
    settings: &'a Settings,
    process: &'a Process,
    /// The job that the process was started with, if there is one.
    given: Option<Job>,
    queue: Arc<JobQueue>,
    slot: Slot,
    address: SocketAddr,
    page: Page,
}

/// Works on jobs until the process is told to shut down.
///
/// # Errors
/// See the variants of [`CoordinatorError`]. A failed job is an error only if the next start of the process is to
/// resume it.
pub(super) async fn run(
    settings: &Settings,
    process: &Process,
    job: Job,
    dir: PathBuf,
    place: Place,
) -> Result<(), CoordinatorError> {
    let Place {
        listener,
        address,
        browsers,
        page_address,
    } = place;
    let queue_error = |error: StateError| CoordinatorError::Queue {
        dir: dir.clone(),
        error,
    };
    let queue = JobQueue::open(&dir, job.checkpoint.location.clone());
    let queue = queue.map_err(queue_error)?;
    let calls = JobCalls {
        queue: Arc::clone(&queue),
        sizes: (job.cluster.ps, job.cluster.workers),
        waiting: WaitingMembers::default(),
        allowed: settings.allowed_locations(&dir, &job)?,
    };
    let coordinator = LongLived {
        settings,
        process,
        given: (!settings.begins_without_job(process.after_job)).then_some(job),
        queue,
        slot: Slot::new(None),
        address,
        page: Page::serve(&process.security, browsers),
    };
    let prepared = coordinator.prepare().await;
    prepared.map_err(|error| match error {
        Unprepared::Other(error) => error,
        Unprepared::Queue(QueueError::Store(error)) => queue_error(error),
        Unprepared::Queue(QueueError::Refused(why)) => {
            queue_error(StateError::Content(why.to_string()))
        }
    })?;
    let mut shown = coordinator.last_job().await;
    let mut first = None;
    if shown.is_none()
        && let Some(entry) = coordinator.queue.first()
    {
        // Calls are served once the job is there, because its members may be at work.
        let begun = process
            .shutdown
            .run_until_cancelled(coordinator.begin(entry));
        match begun.await {
            Some(begun) => first = begun?,
            None => return Ok(()),
        }
    }
    let service = Service {
        current_job: CurrentJob {
            slot: coordinator.slot.clone(),
            security: process.security.clone(),
        },
        queue: Some(calls),
    };
    let stop = CancellationToken::new();
    let server = spawn_server(service, settings, process, listener, stop.clone());
    process.announce_page(Some(Listen::Tcp(address)), page_address);
    process.readiness.set(true);
    tracing::info!(%address, folder = %dir.display(), "coordinating a long-lived cluster");
    let outcome = coordinator.work(first, &mut shown).await;
    if let Some(ended) = shown {
        coordinator.close(ended).await;
    }
    stop.cancel();
    // Connections that clients do not close are dropped.
    if let Ok(Ok(served)) = tokio::time::timeout(DRAIN, server).await {
        served?;
    }
    outcome
}

/// The reason why the coordinator cannot begin.
enum Unprepared {
    Queue(QueueError),
    Other(CoordinatorError),
}

impl From<QueueError> for Unprepared {
    fn from(error: QueueError) -> Self {
        Self::Queue(error)
    }
}

impl LongLived<'_> {
    /// Adds the job that the process was started with to the queue, or updates it there. With `--resume-failed`, queues
    /// it again if it has failed.
    async fn prepare(&self) -> Result<(), Unprepared> {
        let Some(job) = &self.given else {
            return Ok(());
        };
        let mut job = job.clone();
        job.run_dir = None;
        let given = Submission {
            number: 0,
            job,
            restore: self.settings.restore.clone().unwrap_or_default(),
            run: format!("{:016x}", rand::random::<u64>()),
        };
        match self.queue.given() {
            None => self.queue.begin_with(given).await?,
            Some(known) => {
                let same_job = is_same(&given.job, &known.job_toml);
                let same = same_job && known.restore == given.restore;
                if !same && !self.has_run(&known).map_err(Unprepared::Other)? {
                    self.queue.replace(given).await?;
                } else if !same_job {
                    return Err(Unprepared::Other(CoordinatorError::OtherRun {
                        dir: self.queue.run_dir(&known),
                        what: "is that of a job with other settings; give another --run-dir, the settings that it has in its job.toml, or --no-job, and submit the job".to_owned(),
                    }));
                }
            }
        }
        if self.settings.resume_failed {
            self.queue.resume().await?;
        }
        Ok(())
    }

    /// Returns whether the run of a job has begun, that is, whether the job's folder has the state of a run.
    fn has_run(&self, entry: &Entry) -> Result<bool, CoordinatorError> {
        let path = self.queue.run_dir(entry).join(run_dir::STATE);
        let saved = State::saved(&path);
        let saved = saved.map_err(|error| CoordinatorError::State { path, error })?;
        Ok(saved.is_some())
    }

    /// Works on one job after the other, until the shutdown. `first` is a job that is at work already. `shown` is the
    /// ended job that is still shown.
    async fn work(
        &self,
        mut first: Option<QueuedJob>,
        shown: &mut Option<QueuedJob>,
    ) -> Result<(), CoordinatorError> {
        loop {
            let job = match first.take() {
                Some(job) => job,
                None => match self.next_job(shown).await? {
                    Some(job) => job,
                    None => return Ok(()),
                },
            };
            match self.see_to_its_end(job).await? {
                Some(ended) => *shown = Some(ended),
                None => return Ok(()),
            }
        }
    }

    /// Waits for a job, and begins it. Returns `None` if the process is to shut down.
    async fn next_job(
        &self,
        shown: &mut Option<QueuedJob>,
    ) -> Result<Option<QueuedJob>, CoordinatorError> {
        let shutdown = &self.process.shutdown;
        let mut said = false;
        loop {
            let Some(entry) = self.queue.first() else {
                if !std::mem::replace(&mut said, true) {
                    tracing::info!("the queue is empty; waiting for jobs");
                }
                let waits = self.changed_or_broken(shown.as_ref());
                match shutdown.run_until_cancelled(waits).await {
                    Some(true) => {}
                    Some(false) => {
                        tracing::error!("the ended job is no longer shown to its members");
                        if let Some(ended) = shown.take() {
                            self.close(ended).await;
                        }
                    }
                    None => return Ok(None),
                }
                continue;
            };
            if let Some(ended) = shown.take() {
                self.close(ended).await;
            }
            match shutdown.run_until_cancelled(self.begin(entry)).await {
                Some(Ok(None)) => {}
                Some(begun) => return begun,
                None => return Ok(None),
            }
        }
    }

    /// Waits until the queue changes. Returns false if, before that, the state of the ended job that is still shown can
    /// no longer be written, so that calls about this job get no answers.
    async fn changed_or_broken(&self, shown: Option<&QueuedJob>) -> bool {
        let broken = async {
            match shown {
                Some(ended) => ended.broken().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = broken => false,
            () = self.queue.changed() => true,
        }
    }

    /// Waits for the end of a job, persists the end, and returns the job. Returns `None` if the process is to shut
    /// down.
    async fn see_to_its_end(&self, job: QueuedJob) -> Result<Option<QueuedJob>, CoordinatorError> {
        let shutdown = &self.process.shutdown;
        let ended = shutdown.run_until_cancelled(job.ended()).await;
        let error = match ended {
            Some(Ok(summary)) if job.is_to_be_resumed(&self.queue) => {
                Some(CoordinatorError::JobFailed(summary.error))
            }
            Some(Ok(summary)) => {
                // While it cannot be persisted, a shutdown ends the wait. The next start persists it.
                let persisted = job.persist_end(&self.queue, &summary);
                if shutdown.run_until_cancelled(persisted).await.is_some() {
                    return Ok(Some(job));
                }
                None
            }
            Some(Err(error)) => Some(error),
            None => None,
        };
        self.close(job).await;
        error.map_or(Ok(None), Err)
    }

    /// Begins a job, and makes it the current one. Returns `None` if the job cannot be begun, or was cancelled
    /// meanwhile.
    ///
    /// # Errors
    /// If the job that the process was started with cannot be begun, while no other job waits.
    async fn begin(&self, entry: Entry) -> Result<Option<QueuedJob>, CoordinatorError> {
        match self.queue.begin(entry.id).await {
            Ok(true) => {}
            Ok(false) => return Ok(None),
            Err(error) => {
                tracing::error!(
                    "the beginning of job {} cannot be persisted; retrying: {error}",
                    entry.id
                );
                tokio::time::sleep(PERSIST_AGAIN).await;
                return Ok(None);
            }
        }
        // A run that is resumed ends in good order, with a last checkpoint.
        let new = matches!(self.has_run(&entry), Ok(false));
        let begun = tokio::select! {
            begun = self.beginning(entry.clone()) => begun,
            // The store of its checkpoints may not answer.
            () = self.queue.cancelling(entry.id), if new => {
                let end = End {
                    error: "it was cancelled while the coordinator began it".to_owned(),
                    ..End::default()
                };
                persist_end(&self.queue, &entry, end).await;
                return Ok(None);
            }
        };
        match begun {
            Ok(job) => {
                self.show(&job);
                job.heed_cancelling(&self.queue).await;
                Ok(Some(job))
            }
            Err(error) if self.ends_with(&entry) => Err(error),
            Err(error) if error.is_of_full_disk() => {
                tracing::error!("job {} cannot be begun; retrying: {error}", entry.id);
                tokio::time::sleep(PERSIST_AGAIN).await;
                Ok(None)
            }
            Err(error) => {
                let end = End {
                    error: format!("it cannot be begun: {error}"),
                    ..End::default()
                };
                persist_end(&self.queue, &entry, end).await;
                Ok(None)
            }
        }
    }

    /// Returns whether the process ends if a job cannot be begun. This holds for the job that the process was started
    /// with, which the next start tries again, unless other jobs wait.
    fn ends_with(&self, entry: &Entry) -> bool {
        let given = self.given.is_some() && entry.folder.is_empty();
        given && !self.queue.others_wait(entry.id)
    }

    async fn beginning(&self, entry: Entry) -> Result<QueuedJob, CoordinatorError> {
        let first = entry.folder.is_empty();
        let job = match &self.given {
            Some(given) if first => given.clone(),
            _ => Job::from_toml(&entry.job_toml)?,
        };
        let resume = match (first && !entry.has_ended(), self.settings.resume_failed) {
            (false, _) => Resume::Nothing,
            (true, false) => Resume::Unable,
            (true, true) => Resume::Failed,
        };
        let beginning = Beginning {
            dir: self.queue.run_dir(&entry),
            job,
            restore: (!entry.restore.is_empty()).then_some(&entry.restore),
            resume,
            run: entry.run.clone(),
            turn: match first {
                true => Turn::First,
                false => Turn::Submitted,
            },
            address: self.address,
            process: self.process,
        };
        let work = beginning.begin().await?.start().await?;
        let (run_dir, again) = (work.dir.display(), work.again);
        tracing::info!(id = entry.id, name = entry.name, %run_dir, again, "coordinating a job");
        Ok(QueuedJob { entry, work })
    }

    /// If the queue has no job to work on, shows the job that ended last, so that its members and users see how it
    /// ended. Returns `None` if no job is shown.
    async fn last_job(&self) -> Option<QueuedJob> {
        let last = self.queue.last().filter(|_| self.queue.first().is_none());
        let entry = last?;
        let path = self.queue.run_dir(&entry).join(run_dir::STATE);
        // Its folder may be gone. A run that has not ended, of a job that could not be begun or resumed, would go on.
        let ended = match State::saved(&path) {
            Ok(saved) => saved.is_some_and(|saved| saved.has_ended()),
            Err(error) => {
                tracing::warn!("the last job cannot be shown: {error}");
                false
            }
        };
        if !ended {
            return None;
        }
        match self.beginning(entry).await {
            Ok(job) => {
                self.show(&job);
                Some(job)
            }
            Err(error) => {
                tracing::warn!("the last job cannot be shown: {error}");
                None
            }
        }
    }

    /// Makes a job the current one, for calls and for the page.
    fn show(&self, job: &QueuedJob) {
        let QueuedJob { entry, work } = job;
        self.slot.set(Some(work.active(entry.id, &entry.folder)));
        self.page.show(Some(work.shown()));
    }

    async fn close(&self, job: QueuedJob) {
        self.slot.set(None);
        self.page.show(None);
        job.work.close().await;
    }
}
