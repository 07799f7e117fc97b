//! The work on a job: from its beginning in a run directory to its end.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cluster::{Summary, Turn};
use daemon::Offload;
use daemon::process::Process;
use network::security::Security;
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

/// A job that is at work, or has ended and is still shown.
pub(super) struct Work {
    pub(super) running: Running,
    work: JoinHandle<()>,
    recorder: Recorder,
    /// The run directory.
    pub(super) dir: PathBuf,
    /// True if an earlier process has worked on the job.
    pub(super) again: bool,
}

/// How a job is begun.
pub(super) struct Beginning<'a> {
    /// The run directory.
    pub(super) dir: PathBuf,
    pub(super) job: Job,
    /// The checkpoint to begin with, if the run directory has no run yet.
    pub(super) restore: Option<&'a str>,
    /// Which failed jobs are resumed.
    pub(super) resume: Resume,
    /// The id of the run, if the run directory has none yet.
    pub(super) run: String,
    pub(super) turn: Turn,
    pub(super) address: SocketAddr,
    pub(super) process: &'a Process,
}

/// A job that is begun, and not at work yet.
pub(super) struct Ready {
    begun: Begun,
    state: State,
    dir: PathBuf,
    security: Security,
}

impl Beginning<'_> {
    /// Begins the job, or resumes it from the state in its run directory.
    ///
    /// # Errors
    /// See [`begin`].
    pub(super) async fn begin(self) -> Result<Ready, CoordinatorError> {
        let Self { dir, mut job, .. } = self;
        let created = tokio::fs::create_dir_all(&dir).await;
        created.map_err(|error| unwritable(&dir, error))?;
        job.run_dir = Some(dir.clone());
        let path = dir.join(run_dir::STATE);
        let state = State::open(&path).map_err(|error| CoordinatorError::State { path, error })?;
        let wish = Wish {
            checkpoints: open_store(&job, &dir)?,
            restore: self.restore.map(Restore::At),
            resume: self.resume,
            run: self.run,
            receipt_key: ReceiptKey(rand::random()),
            turn: self.turn,
            here: here(self.address),
        };
        Ok(Ready {
            begun: begin(job, &dir, &state, wish).await?,
            state,
            dir,
            security: self.process.security.clone(),
        })
    }
}

impl Ready {
    /// Starts the work. It must not be cancelled, because the run owns the location of its checkpoints now.
    ///
    /// # Errors
    /// [`CoordinatorError::RunDir`].
    pub(super) async fn start(self) -> Result<Work, CoordinatorError> {
        let Self {
            begun, state, dir, ..
        } = self;
        let again = begun.again;
        let store = begun.keeping.as_ref().map(|keeping| keeping.store.clone());
        let recorder = Recorder::open(&dir, begun.cluster.job(), again, store).await;
        let recorder = recorder.map_err(|error| unwritable(&dir, error))?;
        let parts = Parts {
            begun,
            state,
            records: recorder.lines(),
            offload: Offload::Threads,
            security: self.security,
        };
        let (running, work) = parts.start();
        Ok(Work {
            running,
            work: task::spawn(work),
            recorder,
            dir,
            again,
        })
    }
}

fn unwritable(dir: &Path, error: io::Error) -> CoordinatorError {
    CoordinatorError::RunDir {
        dir: dir.to_owned(),
        error,
    }
}

impl Work {
    /// Returns the job as calls see it. `id` and `folder` are those of its place in the queue.
    pub(super) fn active(&self, id: u64, folder: &str) -> Active {
        self.running.active(id, folder)
    }

    /// Returns the job as the page shows it.
    pub(super) fn shown(&self) -> ShownJob {
        ShownJob {
            shared: Arc::clone(&self.running.shared),
            history: self.recorder.history(),
            run_dir: self.dir.clone(),
        }
    }

    /// Writes the summary. If the job had ended before this process started, an existing summary stays, because it is
    /// more complete.
    ///
    /// # Errors
    /// [`CoordinatorError::RunDir`].
    pub(super) async fn summarise(&self, summary: &Summary) -> Result<(), CoordinatorError> {
        if self.running.had_ended && self.dir.join(run_dir::SUMMARY).exists() {
            return Ok(());
        }
        let written = self.recorder.summarise(summary).await;
        written.map_err(|error| unwritable(&self.dir, error))
    }

    /// Ends the work on the job. The slot and the page must have dropped the job before.
    pub(super) async fn close(self) {
        self.running.stop();
        // The store may not answer.
        let _ = tokio::time::timeout(DRAIN, self.work).await;
        self.running.release().await;
        let kept = self.running.shared.keep_all();
        let _ = tokio::time::timeout(DRAIN, kept).await;
        // The queue of records ends once no call holds the job any more, which may take as long as a call may wait.
        drop(self.running);
        let closed = tokio::time::timeout(LAST_RECORDS, self.recorder.close()).await;
        if closed.is_err() {
            tracing::warn!("the last records could not be written in time");
        }
    }
}
