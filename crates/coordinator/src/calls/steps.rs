//! The most frequent calls: workers lease work, and report finished steps one by one or over a stream.

use std::time::Instant;

use cluster::Cluster;
use cluster::messages::wire_work;
use futures_util::stream::{Stream, unfold};
use network::connections::Caller;
use network::security::crowded;
use shared_proto::ids::Origin;
use shared_proto::planted;
use shared_proto::refusal::Refusal;
use shared_proto::view::JobPhase;
use shared_proto::wire::{self, lease_work_reply::Work};
use tonic::{Extensions, Status, Streaming};

use super::current_job::{CurrentJob, of_member, refused};
use super::origin::CallOrigin;
use super::slot::Active;

/// Returns the call to the cluster that leases work. `copied` is the number of the newest checkpoint for which the
/// worker has copied its values, if there is one.
fn lease(
    origin: Origin,
    copied: Option<u64>,
) -> impl FnMut(&mut Cluster, Instant) -> Result<wire::LeaseWorkReply, Refusal> {
    of_member(origin, move |cluster, now, origin| {
        let (work, clock) = cluster.lease_work(now, origin, copied);
        // The view that has this work, which may not be published yet when the call is answered.
        let view = cluster.refresh_view();
        Ok(wire::LeaseWorkReply {
            clock: clock.0,
            epoch: view.epoch.0,
            view: view.number.0,
            work: Some(wire_work(work, view.error.clone())),
        })
    })
}

fn has_work(reply: &wire::LeaseWorkReply) -> bool {
    !matches!(reply.work, Some(Work::Idle(_)))
}

impl CurrentJob {
    /// Counts the steps that a worker has finished. Also leases work, if the request wants some.
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
            cluster.finish_step(now, origin, request)?;
            if !planted!(UnrenewedLease) {
                cluster.heartbeat(now, origin.task);
            }
            Ok((cluster.waits_for_parts(origin.task), cluster.steps_alone()))
        });
        let Active { shared, over, .. } = self.slot.active().map_err(refused)?;
        // The numbers in the reply are those of a published view.
        let at_once = |counted: &Result<_, _>| matches!(counted, Ok((_, true)));
        let counted = shared.count_steps(finish, at_once).await;
        let (step, _) = counted.map_err(refused)?;
        if let Some((step, epoch)) = step {
            shared.persist_part(step, epoch, &over).await;
        }
        let work = match request.wants_work {
            true => {
                let lease = lease(self.origin(&from)?, None);
                let leased = shared.ask_fast(lease).await.map_err(refused)?;
                Some(leased).filter(has_work)
            }
            false => None,
        };
        let view = shared.views.borrow();
        Ok(wire::FinishStepReply {
            min_clock: view.min_clock.0,
            epoch: view.epoch.0,
            work,
            // The answer to a heartbeat has the error of a failed job.
            renewed: view.phase != JobPhase::Failed,
            sequence: request.origin.as_ref().map_or(0, |o| o.sequence),
        })
    }

    /// Leases work to a worker. Waits a few seconds for work, then returns the reason why there is none.
    ///
    /// # Errors
    /// The refusal, as a status.
    pub(super) async fn lease_work(
        &self,
        extensions: &Extensions,
        request: &wire::LeaseWorkRequest,
    ) -> Result<wire::LeaseWorkReply, Status> {
        let from = CallOrigin::new(&request.origin, extensions, "LeaseWork").worker();
        let lease = lease(self.origin(&from)?, request.copied);
        let shared = self.shared()?;
        let leased = shared.ask_fast_until(lease, has_work).await;
        leased.map_err(refused)
    }

    /// Handles the requests of a stream in turn. A request that wants no reply gets one only if it is refused. The
    /// first request that succeeds marks the connection as a member's. The stream ends after a refusal, when the worker
    /// closes it, or with the job.
    ///
    /// # Errors
    /// [`Reason::NoJob`](shared_proto::refusal::Reason::NoJob), as a status.
    pub(super) fn finish_steps(
        self,
        extensions: Extensions,
        requests: Streaming<wire::FinishStepRequest>,
    ) -> Result<impl Stream<Item = Result<wire::FinishStepReply, Status>> + Send, Status> {
        let over = self.slot.active().map_err(refused)?.over;
        let newcomer = Caller::of(&extensions).cloned();
        let open = Some((self, extensions, requests, over, newcomer));
        Ok(unfold(open, |open| async {
            let (current_job, extensions, mut requests, over, mut newcomer) = open?;
            loop {
                let request = match over.run_until_cancelled(requests.message()).await? {
                    Ok(request) => request?,
                    Err(status) => return Some((Err(status), None)),
                };
                let mut finished = current_job.finish_step(&extensions, &request).await;
                if finished.is_ok() && newcomer.take().is_some_and(|caller| !caller.admit()) {
                    finished = Err(crowded());
                }
                match finished {
                    Ok(_) if request.without_reply => {}
                    Ok(reply) => {
                        let open = (current_job, extensions, requests, over, newcomer);
                        return Some((Ok(reply), Some(open)));
                    }
                    Err(status) => return Some((Err(status), None)),
                }
            }
        }))
    }
}
