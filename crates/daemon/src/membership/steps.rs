//! The stream by which a worker reports finished steps.

use parking_lot::Mutex;
use shared_proto::ids::Epoch;
use shared_proto::planted;
use shared_proto::task::boxed;
use shared_proto::wire;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Response, Status, Streaming};

use super::MembershipError;
use super::coordinator::{Calls, Coordinator};
use super::lease::Lease;

/// The most reports in a row without a reply.
const MOST_UNCONFIRMED: usize = 64;

/// The least number of replies in one lease. Replies renew the lease, and are more frequent than heartbeats would be.
const REPLIES_PER_LEASE: u32 = 4;

/// The stream by which a worker reports finished steps. It opens again after it has broken.
pub struct StepReports {
    coordinator: Coordinator,
    /// Renewed by the replies.
    lease: Lease,
    /// The stream; `None` if it is not open, or while a report is under way.
    open: Mutex<Option<Open>>,
    /// The reports that were sent without a reply since the last reply, in order.
    unconfirmed: Mutex<Vec<wire::FinishStepRequest>>,
}

struct Open {
    /// The epoch of all reports on this stream. A refusal for an outdated epoch therefore always concerns this epoch, whichever report the
    /// coordinator refused.
    epoch: Epoch,
    requests: mpsc::Sender<wire::FinishStepRequest>,
    replies: Streaming<wire::FinishStepReply>,
    /// The time of the last reply, if it says that replies may be left out.
    replied: Option<Instant>,
}

impl StepReports {
    /// Returns the report stream of the member that holds this lease. It opens with the first report.
    pub(super) fn new(coordinator: Coordinator, lease: Lease) -> Self {
        Self {
            coordinator,
            lease,
            open: Mutex::default(),
            unconfirmed: Mutex::default(),
        }
    }

    /// Reports finished steps, with retries while the coordinator does not answer. If `wants_reply` is false, the
    /// result may be none: then the report was only sent. The next reply confirms it, and unconfirmed reports are
    /// repeated.
    ///
    /// # Errors
    /// See the variants of [`MembershipError`]. The error may be that of an earlier report without a reply.
    #[boxed]
    pub async fn report(
        &mut self,
        request: wire::FinishStepRequest,
        wants_reply: bool,
    ) -> Result<Option<wire::FinishStepReply>, MembershipError> {
        let report = |client| async {
            let sent = Instant::now();
            let reply = self.attempt(client, request.clone(), wants_reply).await?;
            if reply.as_ref().is_some_and(|reply| reply.renewed) {
                self.lease.renew(sent);
            }
            Ok(Response::new(reply))
        };
        self.coordinator.call(report).await
    }

    /// Returns whether a reply has confirmed all reports.
    pub fn are_confirmed(&self) -> bool {
        self.unconfirmed.lock().is_empty()
    }

    /// Returns the newest report, if no reply has confirmed it.
    pub fn unconfirmed(&self) -> Option<wire::FinishStepRequest> {
        self.unconfirmed.lock().last().cloned()
    }

    /// Waits until the stream has ended, because a report without a reply was refused, or because the connection broke.
    /// The next report then repeats the unconfirmed reports. Waits for ever if no stream is open.
    #[boxed]
    pub async fn ended(&mut self) {
        let Some(open) = self.open.get_mut() else {
            return std::future::pending().await;
        };
        let ended = loop {
            match open.replies.message().await {
                Ok(Some(_)) => {}
                Ok(None) => break has_ended(),
                Err(status) => break status,
            }
        };
        tracing::debug!("reports without a reply are repeated: {ended}");
        *self.open.get_mut() = None;
    }

    /// Reports once. A stream on which an attempt has failed or was abandoned is not used again: a late reply to it
    /// would be taken for the reply to the next report.
    async fn attempt(
        &self,
        client: Calls,
        mut request: wire::FinishStepRequest,
        wants_reply: bool,
    ) -> Result<Option<wire::FinishStepReply>, Status> {
        let epoch = epoch_of(&request);
        let open = self.open.lock().take();
        let open = open.filter(|open| open.epoch == epoch || planted!(SharedReportStream));
        let mut open = match open {
            Some(open) => open,
            None => self.open(client, epoch).await?,
        };
        request.without_reply = !wants_reply && self.may_leave_out(&open);
        // The status, if there is one, comes with the replies.
        let _ = open.requests.send(request.clone()).await;
        let reply = match request.without_reply {
            true => {
                self.unconfirmed.lock().push(request);
                None
            }
            false => {
                let reply = open.reply().await?;
                self.unconfirmed.lock().clear();
                Some(reply)
            }
        };
        *self.open.lock() = Some(open);
        Ok(reply)
    }

    fn may_leave_out(&self, open: &Open) -> bool {
        let pause = self.lease.length() / REPLIES_PER_LEASE;
        open.replied.is_some_and(|at| at.elapsed() < pause)
            && self.unconfirmed.lock().len() < MOST_UNCONFIRMED
    }

    /// Opens a stream for reports of an epoch, and repeats on it the reports that no reply has confirmed.
    async fn open(&self, client: Calls, epoch: Epoch) -> Result<Open, Status> {
        let open = Open::on(client, epoch).await?;
        if planted!(ForgottenReports) {
            self.unconfirmed.lock().clear();
        }
        let unconfirmed = self.unconfirmed.lock().clone();
        for mut request in unconfirmed {
            if let Some(origin) = &mut request.origin {
                origin.epoch = epoch.0;
            }
            request.repeated = true;
            let _ = open.requests.send(request).await;
        }
        Ok(open)
    }
}

fn epoch_of(request: &wire::FinishStepRequest) -> Epoch {
    Epoch(request.origin.as_ref().map_or(0, |origin| origin.epoch))
}

fn has_ended() -> Status {
    Status::unavailable("the stream of reports has ended")
}

impl Open {
    async fn on(mut client: Calls, epoch: Epoch) -> Result<Self, Status> {
        let (requests, stream) = mpsc::channel(1);
        let stream = ReceiverStream::new(stream);
        let replies = client.finish_steps(stream).await?.into_inner();
        Ok(Self {
            epoch,
            requests,
            replies,
            replied: None,
        })
    }

    async fn reply(&mut self) -> Result<wire::FinishStepReply, Status> {
        let reply = self.replies.message().await?.ok_or_else(has_ended)?;
        self.replied = (reply.sequence > 0).then(Instant::now);
        Ok(reply)
    }
}
