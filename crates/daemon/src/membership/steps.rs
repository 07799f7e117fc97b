//! The stream by which a worker reports finished steps.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use parking_lot::Mutex;
use shared_proto::wire;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Response, Status, Streaming};

use super::MembershipError;
use super::coordinator::{Calls, Coordinator};
use super::lease::Lease;

/// The stream by which a worker reports finished steps. It opens again after it has broken.
pub struct StepReports {
    coordinator: Coordinator,
    /// Renewed by each report.
    lease: Lease,
    /// None while it is not open, or a report is under way.
    open: Mutex<Option<Open>>,
    /// True if the coordinator is of a release without the stream.
    by_calls: AtomicBool,
}

struct Open {
    requests: mpsc::Sender<wire::FinishStepRequest>,
    replies: Streaming<wire::FinishStepReply>,
}

impl StepReports {
    /// Returns the report stream of the member that holds this lease. It opens with the first report.
    pub(super) fn new(coordinator: Coordinator, lease: Lease) -> Self {
        Self {
            coordinator,
            lease,
            open: Mutex::default(),
            by_calls: AtomicBool::new(false),
        }
    }

    /// Reports finished steps. Reports again while the coordinator does not answer, as calls do.
    ///
    /// # Errors
    /// See the variants of [`MembershipError`].
    pub async fn report(
        &mut self,
        request: wire::FinishStepRequest,
    ) -> Result<wire::FinishStepReply, MembershipError> {
        let report = |client| async {
            let sent = Instant::now();
            let reply = self.attempt(client, request.clone()).await?;
            if reply.get_ref().renewed {
                self.lease.renew(sent);
            }
            Ok(reply)
        };
        self.coordinator.call(report).await
    }

    /// Reports once. A stream on which this was given up, or has failed, is not used again: an answer that comes late would be taken for
    /// that of the next report.
    async fn attempt(
        &self,
        mut client: Calls,
        request: wire::FinishStepRequest,
    ) -> Result<Response<wire::FinishStepReply>, Status> {
        if self.by_calls.load(Relaxed) {
            return client.finish_step(request).await;
        }
        let open = self.open.lock().take();
        let opened = match open {
            Some(open) => Ok(open),
            None => Open::on(client.clone()).await,
        };
        let mut open = match opened {
            // Workers are upgraded before their coordinator.
            Err(status) if status.code() == Code::Unimplemented => {
                self.by_calls.store(true, Relaxed);
                return client.finish_step(request).await;
            }
            opened => opened?,
        };
        let broken = |_| Status::unavailable("the stream of reports has ended");
        // The status, if there is one, comes with the replies.
        let _ = open.requests.send(request).await;
        let reply = open.replies.message().await?.ok_or(()).map_err(broken)?;
        *self.open.lock() = Some(open);
        Ok(Response::new(reply))
    }
}

impl Open {
    async fn on(mut client: Calls) -> Result<Self, Status> {
        let (requests, stream) = mpsc::channel(1);
        let stream = ReceiverStream::new(stream);
        let replies = client.finish_steps(stream).await?.into_inner();
        Ok(Self { requests, replies })
    }
}
