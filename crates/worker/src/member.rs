//! A member of the cluster: registers, joins by the job's strategy, trains. If the cluster moves on without it,
//! it begins again.

use std::borrow::Borrow;
use std::sync::Arc;
use std::time::Duration;

use collective::Exchange;
use daemon::membership::{Coordinator, Membership, MembershipError, Registration};
use daemon::process::{After, Again, Onward};
use network::Network;
use replica::Replica;
use shared_proto::ids::{Clock, RunNumber};
use shared_proto::job::Job;
use tokio_util::sync::CancellationToken;

use crate::counters::Counters;
use crate::error::WorkerError;
use crate::reporter::Reporter;
use crate::strategy::{Joining, Stores, Strategy, StrategyError};
use crate::trainer::Trainer;

/// The pause before the worker registers again.
const REGISTER_AGAIN: Duration = Duration::from_millis(50);

/// A builder of replicas for jobs.
pub(crate) trait Replicas {
    type Replica: Replica;

    /// Returns the coordinator's job with this worker's own settings.
    fn job(&self, membership: &Membership) -> Result<Job, WorkerError>;

    /// Returns the replica for a job, an existing one if possible.
    async fn replica(&mut self, job: &Job) -> Result<Arc<Self::Replica>, WorkerError>;

    /// Drops the replica that exists, because its run has ended.
    fn forget(&mut self);
}

/// A worker's identity, and its connections to other processes.
#[derive(Debug)]
pub struct Parts {
    /// The worker's coordinator.
    pub coordinator: Coordinator,
    /// The registration with which the worker joins.
    pub registration: Registration,
    /// The network through which the worker reaches servers.
    pub network: Arc<dyn Network>,
    /// The place where links from other workers arrive.
    pub links: Exchange,
    /// The stores of checkpoints.
    pub stores: Stores,
    /// The time for which the worker continues without an answer of a server.
    pub patience: Duration,
}

/// A member with any kind of replica, network and strategy.
pub(crate) struct Member<R, J> {
    parts: Parts,
    counters: Counters,
    replicas: R,
    /// The run of the newest membership.
    run: Option<RunNumber>,
    /// Joins the cluster with the job's strategy.
    join: J,
}

impl<R, J> Member<R, J>
where
    R: Replicas,
    J: AsyncFn(&Joining<'_>, &dyn Replica) -> Result<Box<dyn Strategy>, StrategyError>,
{
    pub(crate) fn new(parts: Parts, replicas: R, join: J) -> Self {
        Self {
            parts,
            counters: Counters::new(),
            replicas,
            run: None,
            join,
        }
    }

    /// Works until the shutdown, or until a job has ended and `next_job` expects no other one; then leaves the cluster.
    /// Calls `registered` with true when the worker registers or waits for a job, and with false when it loses its
    /// place.
    pub(crate) async fn run(
        mut self,
        shutdown: &CancellationToken,
        registered: impl Fn(bool),
        next_job: impl AsyncFn(After<'_>) -> Onward,
    ) -> Result<(), WorkerError> {
        let mut place = None;
        let mut again = Again::default();
        let mut unable_in = None;
        let mut has_left = false;
        let outcome = loop {
            let work = self.work(&registered, &mut place);
            let Some(outcome) = shutdown.run_until_cancelled(work).await else {
                break None;
            };
            self.replicas.forget();
            let onward = match (&outcome, place.take()) {
                (Err(error), Some(membership)) if error.is_of_this_job() => {
                    let run = Some(membership.run);
                    if run != unable_in {
                        (again, unable_in) = (Again::default(), run);
                    }
                    leave(membership, Some(&outcome)).await;
                    has_left = true;
                    let after = After::Unable {
                        coordinator: &self.parts.coordinator,
                        run,
                        again: again.next_pause(),
                        error,
                    };
                    next_job(after).await
                }
                (Ok(()), Some(ended)) => next_job(After::Done(place.insert(ended))).await,
                (
                    Err(WorkerError::Membership(error @ MembershipError::JobFailed(_))),
                    Some(ended),
                ) => next_job(After::Failed(place.insert(ended), error)).await,
                (_, ended) => {
                    place = ended;
                    Onward::Ends
                }
            };
            match onward {
                Onward::Registers => {}
                Onward::ToldToGo => break None,
                Onward::Ends => break Some(outcome),
            }
        };
        let Some(membership) = place else {
            // It is not a member, so there is nothing to leave. If it never was one, the error is not about a job.
            let outcome = outcome.unwrap_or(Ok(()));
            return match has_left {
                true => outcome.map_err(WorkerError::explained),
                false => outcome,
            };
        };
        leave(membership, outcome.as_ref()).await;
        outcome.unwrap_or(Ok(())).map_err(WorkerError::explained)
    }

    /// Registers and works until the job is done. If a membership remains in `place`, the caller has to leave it.
    async fn work(
        &mut self,
        registered: impl Fn(bool),
        place: &mut Option<Membership>,
    ) -> Result<(), WorkerError> {
        loop {
            self.counters.registrations.increment(1);
            let (coordinator, registration) = (&self.parts.coordinator, &self.parts.registration);
            let (coordinator, registration) = (coordinator.clone(), registration.clone());
            let join = Membership::join_or_wait(coordinator, registration, || registered(true));
            let membership = place.insert(join.await?);
            registered(true);
            if self.run.replace(membership.run) != Some(membership.run) {
                // A run that begins anew may have the same job, but the values in the replica belong to the run before.
                self.replicas.forget();
            }
            let outcome = tokio::select! {
                biased;
                outcome = self.work_as(membership) => outcome,
                lost = membership.lost() => Err(lost.into()),
            };
            self.counters.rest();
            match outcome {
                Err(error) if error.is_retryable() => {
                    tracing::warn!("{error}; registering again");
                    registered(false);
                    tokio::time::sleep(REGISTER_AGAIN).await;
                }
                outcome => return outcome,
            }
        }
    }

    async fn work_as(&mut self, membership: &Membership) -> Result<(), WorkerError> {
        let job = &self.replicas.job(membership)?;
        let replica = self.replicas.replica(job).await?;
        let joining = Joining {
            job,
            membership,
            network: &self.parts.network,
            links: &self.parts.links,
            stores: &self.parts.stores,
            patience: self.parts.patience,
        };
        let strategy = (self.join)(&joining, &*replica).await?;
        let reporter = Reporter::start(job, membership, strategy.reconciled());
        let mut trainer = Trainer {
            job,
            membership,
            replica: &*replica,
            strategy,
            reporter,
            counters: &self.counters,
            clock: Clock(0),
            copied: None,
        };
        trainer.train().await
    }
}

/// Leaves the cluster, and reports the error if there is one.
pub(crate) async fn leave<E: Borrow<WorkerError>>(
    membership: Membership,
    outcome: Option<&Result<(), E>>,
) {
    let error = outcome.and_then(|outcome| outcome.as_ref().err());
    match error.and_then(|error| error.borrow().to_tell()) {
        Some(told) => membership.leave_because(told.failure, &told.error).await,
        None => membership.leave(None).await,
    }
}
