//! Calls about the jobs of a long-lived cluster, and the wait for the next one.

use std::time::Duration;

use network::transport::CALL_TIMEOUT;
use shared_proto::ids::RunNumber;
use shared_proto::refusal::{Reason, Refusal};
use shared_proto::task::boxed;
use shared_proto::view::JobPhase;
use shared_proto::wire;
use tonic::Status;

use super::coordinator::{ASK_AGAIN, distrusts, may_pass};
use super::{Calls, Coordinator, MembershipError};

/// The shortest pause between two calls that ask for the next job. A coordinator without a job delays its reply.
const PAUSE: Duration = Duration::from_millis(100);

impl Coordinator {
    /// Waits until the coordinator has a running job that is not of the run `except`, or refuses the call. Waits
    /// without a limit for a coordinator that does not answer.
    pub(crate) async fn has_work(&self, except: Option<RunNumber>) {
        loop {
            let mut client = self.client.clone();
            let job = client.get_job(wire::JobRequest {
                wait: true,
                waiting: self.waiting(),
            });
            let pause = match tokio::time::timeout(CALL_TIMEOUT, job).await {
                Ok(Ok(reply)) => {
                    let reply = reply.into_inner();
                    let ended = matches!(reply.phase(), JobPhase::Done | JobPhase::Failed);
                    let other = except.is_none_or(|run| run.0 != reply.run);
                    if other && !ended {
                        return;
                    }
                    match ended {
                        true => PAUSE,
                        false => ASK_AGAIN,
                    }
                }
                Ok(Err(status)) if has_no_job(&status) => PAUSE,
                Ok(Err(status)) if may_pass(&status) || distrusts(&status) => ASK_AGAIN,
                // The next registration gets the reason.
                Ok(Err(_)) => return,
                Err(_) => ASK_AGAIN,
            };
            tokio::time::sleep(pause).await;
        }
    }

    /// Adds a job to the queue of a long-lived cluster.
    ///
    /// # Errors
    /// See the variants of [`MembershipError`].
    #[boxed]
    pub async fn submit_job(
        &self,
        request: wire::SubmitJobRequest,
    ) -> Result<wire::SubmitJobReply, MembershipError> {
        let call = |mut client: Calls, request| async move { client.submit_job(request).await };
        self.send(request, call).await
    }

    /// Returns the job with this id, or all jobs if `id` is none.
    ///
    /// # Errors
    /// See the variants of [`MembershipError`].
    #[boxed]
    pub async fn list_jobs(
        &self,
        id: Option<u64>,
    ) -> Result<Vec<wire::QueuedJob>, MembershipError> {
        let id = id.unwrap_or(0);
        let mut jobs: Vec<wire::QueuedJob> = Vec::new();
        loop {
            let after = jobs.last().map_or(0, |job| job.id);
            let request = wire::ListJobsRequest { id, after };
            let call = |mut client: Calls, request| async move { client.list_jobs(request).await };
            let page = self.send(request, call).await?.jobs;
            // A coordinator that does not know pages answers with all jobs, and repeats them.
            let more = page.last().is_some_and(|job| job.id > after);
            if more {
                jobs.extend(page);
            }
            if id != 0 || !more {
                return Ok(jobs);
            }
        }
    }

    /// Returns records of a job from byte `from` on. Returns the job's summary too, once the job has ended and all
    /// records are read.
    ///
    /// # Errors
    /// See the variants of [`MembershipError`].
    #[boxed]
    pub async fn read_records(
        &self,
        id: u64,
        from: u64,
    ) -> Result<wire::ReadRecordsReply, MembershipError> {
        let request = wire::ReadRecordsRequest { id, from };
        let call = |mut client: Calls, request| async move { client.read_records(request).await };
        self.send(request, call).await
    }

    /// Cancels a job. A running job ends in good order, or, if `at_once` is true, without a last checkpoint.
    ///
    /// # Errors
    /// See the variants of [`MembershipError`].
    #[boxed]
    pub async fn cancel_job(
        &self,
        id: u64,
        at_once: bool,
    ) -> Result<Option<wire::QueuedJob>, MembershipError> {
        let request = wire::CancelJobRequest { id, at_once };
        let call = |mut client: Calls, request| async move { client.cancel_job(request).await };
        Ok(self.send(request, call).await?.job)
    }

    /// Returns the coordinator's job.
    ///
    /// # Errors
    /// See the variants of [`MembershipError`].
    #[boxed]
    pub async fn job(&self) -> Result<wire::JobReply, MembershipError> {
        let call = |mut client: Calls, request| async move { client.get_job(request).await };
        self.send(wire::JobRequest::default(), call).await
    }
}

/// Returns whether a coordinator has answered that it has no job at present.
pub(super) fn has_no_job(status: &Status) -> bool {
    Refusal::from_status(status).is_some_and(|refusal| refusal.reason == Reason::NoJob)
}
