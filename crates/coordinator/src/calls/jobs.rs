//! Calls about the jobs of a long-lived cluster.

use std::io::{ErrorKind, SeekFrom};
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use shared_proto::job::{Job, run_dir};
use shared_proto::refusal::{Reason, Refusal};
use shared_proto::wire;
use storage::{AllowedLocations, without_user};
use tokio::io::{AsyncReadExt, AsyncSeekExt};
use tonic::Status;

use super::slot::Slot;
use super::waiting::WaitingMembers;
use crate::queue::{Cancelled, JobQueue, QueueError, Submission};

/// The maximum size of a submitted job's TOML, in bytes.
const LONGEST_JOB: usize = 256 * 1024;

/// The maximum length of the location of the checkpoint that a job begins with, in bytes.
const LONGEST_LOCATION: usize = 4096;

/// The maximum length of a job's name, in bytes.
const LONGEST_NAME: usize = 256;

/// The maximum number of jobs in one page of the job list.
const PAGE: usize = 100;

/// The maximum number of bytes of records in one reply.
const MOST_RECORDS: u64 = 1 << 20;

/// What calls about jobs need: the queue, the defaults of jobs, the waiting members and the allowed locations.
#[derive(Clone)]
pub(crate) struct JobCalls {
    pub(crate) queue: Arc<JobQueue>,
    /// The numbers of parameter servers and of workers for jobs that set none. `None`: the coordinator has no default
    /// either.
    pub(crate) sizes: (Option<u32>, Option<u32>),
    /// The members that wait for the next job.
    pub(crate) waiting: WaitingMembers,
    /// The locations that jobs may use for checkpoints.
    pub(crate) allowed: AllowedLocations,
}

impl JobCalls {
    /// Checks a job, and adds it to the queue.
    pub(super) async fn submit(
        &self,
        request: wire::SubmitJobRequest,
    ) -> Result<wire::SubmitJobReply, QueueError> {
        let job = self.read(&request)?;
        let entry = self.queue.submit(Submission {
            number: request.submission,
            job,
            restore: request.restore,
            run: format!("{:016x}", rand::random::<u64>()),
        });
        let entry = entry.await?;
        tracing::info!(id = entry.id, name = entry.name, "a job was submitted");
        Ok(wire::SubmitJobReply {
            id: entry.id,
            run_dir: self.queue.run_dir(&entry).display().to_string(),
        })
    }

    fn read(&self, request: &wire::SubmitJobRequest) -> Result<Job, Refusal> {
        let malformed = |what: String| Refusal::new(Reason::Malformed, what);
        for (field, bytes, most) in [
            ("job_toml", request.job_toml.len(), LONGEST_JOB),
            ("restore", request.restore.len(), LONGEST_LOCATION),
        ] {
            if bytes > most {
                return Err(Refusal::new(
                    Reason::Oversized,
                    format!(
                        "SubmitJob has {field} of {bytes} bytes; the coordinator takes {most} at the most"
                    ),
                ));
            }
        }
        if request.submission == 0 {
            return Err(malformed(
                "SubmitJob has submission 0; draw a number at random for each job".to_owned(),
            ));
        }
        let job = Job::from_toml(&request.job_toml);
        let mut job = job.map_err(|error| malformed(format!("the job is not valid: {error}")))?;
        if let Some(dir) = &job.run_dir {
            return Err(malformed(format!(
                "the job has `run_dir` {dir:?}, but the coordinator gives each job a folder; leave it out"
            )));
        }
        if job.name.len() > LONGEST_NAME {
            return Err(malformed(format!(
                "the job's `name` has {} bytes; the coordinator takes {LONGEST_NAME} at the most",
                job.name.len()
            )));
        }
        self.check_location("checkpoint.location", job.checkpoint.location.as_deref())?;
        self.check_location(
            "restore",
            Some(request.restore.as_str()).filter(|from| !from.is_empty()),
        )?;
        // The sizes of the cluster may not suit the job's strategy.
        let sized = self.sized(job.clone());
        if sized.validate().is_ok() {
            job = sized;
        }
        Ok(job)
    }

    /// Refuses a location that jobs may not use. `setting` names the setting in the refusal.
    fn check_location(&self, setting: &str, location: Option<&str>) -> Result<(), Refusal> {
        let Some(location) = location else {
            return Ok(());
        };
        let malformed = |what: String| Refusal::new(Reason::Malformed, what);
        match self.allowed.have(location) {
            Ok(true) => Ok(()),
            Ok(false) => Err(malformed(format!(
                "the job's `{setting}` is {}, and this coordinator allows submitted jobs only places in: {}; name one there, or start the coordinator with --allow-location",
                without_user(location),
                self.allowed
            ))),
            Err(error) => Err(malformed(format!("the job's `{setting}`: {error}"))),
        }
    }

    /// Fills in the numbers of servers and workers that a job leaves out with the defaults of this cluster.
    fn sized(&self, mut job: Job) -> Job {
        let (ps, workers) = self.sizes;
        if job.strategy.name.has_servers() {
            job.cluster.ps = job.cluster.ps.or(ps);
        }
        job.cluster.workers = job.cluster.workers.or(workers);
        job
    }

    /// Returns the requested job, or a page of jobs if the request has id 0. The running job has its current progress.
    pub(super) fn list(
        &self,
        request: wire::ListJobsRequest,
        slot: &Slot,
    ) -> Result<Vec<wire::QueuedJob>, Refusal> {
        let mut jobs = match request.id {
            0 => self.queue.page(request.after, PAGE),
            id => vec![self.queue.shown(id)?],
        };
        if let Ok(active) = slot.active() {
            let running = |job: &&mut wire::QueuedJob| job.id == active.id;
            let running = jobs.iter_mut().find(running);
            if let Some(job) = running.filter(|job| job.state() == wire::JobState::Running) {
                let status = active.shared.look(|cluster, now| cluster.status(now));
                job.samples = status.samples;
                job.total_samples = status.total_samples;
                job.steps = status.steps;
                job.seconds = status.seconds;
                job.lost_updates = status.lost_updates;
                job.waiting_for = status.waiting_for;
                let newest = status.evaluations.into_iter().next_back();
                job.metrics = newest.map(|newest| newest.metrics).unwrap_or_default();
            }
        }
        Ok(jobs)
    }

    /// Returns the records of a job from the byte offset `from` of its file on. Once the job has ended and no records
    /// are left, returns its summary.
    pub(super) async fn records(
        &self,
        request: &wire::ReadRecordsRequest,
    ) -> Result<wire::ReadRecordsReply, Status> {
        let refused = |refusal: Refusal| Status::from(refusal);
        let entry = self.queue.entry(request.id).map_err(refused)?;
        let dir = self.queue.run_dir(&entry);
        let unreadable = |error: std::io::Error| {
            tracing::error!(id = request.id, %error, "the records of a job cannot be read");
            Status::unavailable(format!(
                "the coordinator cannot read the job's records: {error}"
            ))
        };
        // A job that is queued has no records. Its folder may have those of an earlier one.
        if entry.began == 0 {
            return Ok(wire::ReadRecordsReply::default());
        }
        let lines = lines_from(&dir.join(run_dir::METRICS), request.from).await;
        let lines = lines.map_err(unreadable)?;
        let mut summary = String::new();
        if entry.has_ended() && lines.is_empty() {
            match tokio::fs::read_to_string(dir.join(run_dir::SUMMARY)).await {
                Ok(text) => summary = text,
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => return Err(unreadable(error)),
            }
        }
        Ok(wire::ReadRecordsReply { lines, summary })
    }

    /// Cancels a job.
    pub(super) async fn cancel(
        &self,
        request: wire::CancelJobRequest,
        slot: &Slot,
    ) -> Result<Vec<wire::QueuedJob>, QueueError> {
        let wire::CancelJobRequest { id, at_once } = request;
        let cancelled = self.queue.cancel(id, at_once).await?;
        tracing::info!(id, at_once, "a job is to be cancelled");
        let at_once = cancelled == Cancelled::AtOnce;
        // A job that is being begun finds that it is to be cancelled.
        if let Ok(active) = slot.active()
            && active.id == id
            && cancelled != Cancelled::Nothing
        {
            let cancel = |cluster: &mut cluster::Cluster, now| cluster.cancel(now, at_once);
            active.shared.ask(cancel).await;
        }
        let one = wire::ListJobsRequest { id, after: 0 };
        Ok(self.list(one, slot)?)
    }
}

/// Returns the whole lines of a file from a byte offset on, at most `MOST_RECORDS` bytes; empty if the file is missing.
/// Only a line that is longer than this is cut.
async fn lines_from(path: &Path, from: u64) -> std::io::Result<Bytes> {
    let mut file = match tokio::fs::File::open(path).await {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Bytes::new()),
        opened => opened?,
    };
    file.seek(SeekFrom::Start(from)).await?;
    let mut lines = Vec::new();
    file.take(MOST_RECORDS).read_to_end(&mut lines).await?;
    match lines.iter().rposition(|byte| *byte == b'\n') {
        Some(end) => lines.truncate(end + 1),
        // A part of a very long line.
        None if lines.len() as u64 == MOST_RECORDS => {}
        None => lines.clear(),
    }
    Ok(lines.into())
}

/// Returns the status for a call that has failed and changed nothing.
pub(super) fn failed(error: QueueError, refused: impl FnOnce(Refusal) -> Status) -> Status {
    match error {
        QueueError::Refused(refusal) => refused(refusal),
        QueueError::Store(error) => {
            tracing::error!("the queue of jobs cannot be written: {error}");
            Status::unavailable(format!(
                "the coordinator cannot write its queue of jobs: {error}; look at its disk"
            ))
        }
    }
}

/// Returns the refusal with which a coordinator without a queue answers calls about jobs.
pub(super) fn no_queue() -> Refusal {
    Refusal::new(
        Reason::NoQueue,
        "this coordinator serves one job alone; start it with --no-job for a cluster that takes others",
    )
}
