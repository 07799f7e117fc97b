//! Finished steps, reported by calls of their own or over a stream.

use futures_util::stream::{Stream, unfold};
use shared_proto::wire;
use tonic::{Extensions, Status, Streaming};

use super::at_work::{AtWork, of_member, refused};
use super::origin::CallOrigin;

impl AtWork {
    /// Counts finished steps.
    ///
    /// # Errors
    /// The refusal, as a status.
    pub(super) async fn finish_step(
        &self,
        extensions: &Extensions,
        request: &wire::FinishStepRequest,
    ) -> Result<wire::FinishStepReply, Status> {
        let from = CallOrigin::new(&request.origin, extensions, "FinishStep").worker();
        let finish = of_member(self.origin(&from)?, |cluster, now, origin| {
            cluster.finish_step(now, origin, request)
        });
        let shared = self.shared()?;
        let min_clock = shared.ask_steadily(finish).await.map_err(refused)?;
        let epoch = shared.views.borrow().epoch;
        Ok(wire::FinishStepReply {
            min_clock: min_clock.0,
            epoch: epoch.0,
        })
    }

    /// Answers each request of a stream in turn. Ends with the first that is refused, with the stream, or with the job.
    ///
    /// # Errors
    /// [`Reason::NoJob`](shared_proto::refusal::Reason::NoJob), as a status.
    pub(super) fn finish_steps(
        self,
        extensions: Extensions,
        requests: Streaming<wire::FinishStepRequest>,
    ) -> Result<impl Stream<Item = Result<wire::FinishStepReply, Status>> + Send, Status> {
        let over = self.slot.active().map_err(refused)?.over;
        let open = Some((self, extensions, requests, over));
        Ok(unfold(open, |open| async {
            let (at_work, extensions, mut requests, over) = open?;
            let request = over.run_until_cancelled(requests.message()).await?;
            // The worker has closed the stream, or it is broken.
            let request = request.ok().flatten()?;
            match at_work.finish_step(&extensions, &request).await {
                Ok(reply) => Some((Ok(reply), Some((at_work, extensions, requests, over)))),
                Err(status) => Some((Err(status), None)),
            }
        }))
    }
}
