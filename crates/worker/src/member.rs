//! A member of the cluster: registers, joins by the job's strategy, trains. If the cluster moves on without it,
//! it begins again.

use std::borrow::Borrow;
use std::sync::Arc;
use std::time::Duration;

use daemon::membership::{Coordinator, Membership, Registration};
use shared_proto::ids::Clock;
use shared_proto::job::Job;
use shared_proto::transport::Network;

use crate::counters::Counters;
use crate::error::WorkerError;
use crate::replica::Replica;
use crate::reporter::Reporter;
use crate::strategy::{Joining, Strategy, StrategyError};
use crate::trainer::Trainer;

/// The pause before the worker registers again.
const REGISTER_AGAIN: Duration = Duration::from_millis(50);

/// A builder of replicas for jobs.
pub(crate) trait Replicas {
    type Replica: Replica;

    /// Returns the coordinator's job with this worker's own settings.
    fn job(&self, job: &Job) -> Result<Job, WorkerError>;

    /// Returns the replica for a job, an existing one if possible.
    async fn replica(&mut self, job: &Job) -> Result<Arc<Self::Replica>, WorkerError>;
}

/// A member with any kind of replica, network and strategy.
pub(crate) struct Member<R, J> {
    pub(crate) coordinator: Coordinator,
    pub(crate) registration: Registration,
    pub(crate) network: Arc<dyn Network>,
    pub(crate) patience: Duration,
    pub(crate) counters: Counters,
    pub(crate) replicas: R,
    /// Joins by the job's strategy.
    pub(crate) join: J,
}

impl<R, J> Member<R, J>
where
    R: Replicas,
    J: AsyncFn(&Joining<'_>, &dyn Replica) -> Result<Box<dyn Strategy>, StrategyError>,
{
    /// Registers and works until the job is done. Calls `registered` whenever it registers or loses its place.
    /// The caller must leave by the membership that remains in `place`.
    pub(crate) async fn work(
        &mut self,
        registered: impl Fn(bool),
        place: &mut Option<Membership>,
    ) -> Result<(), WorkerError> {
        loop {
            self.counters.registrations.increment(1);
            let join = Membership::join(self.coordinator.clone(), self.registration.clone());
            let membership = place.insert(join.await?);
            registered(true);
            let outcome = tokio::select! {
                biased;
                outcome = self.work_as(membership) => outcome,
                lost = membership.lost() => Err(lost.into()),
            };
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
        let job = &self.replicas.job(&membership.job)?;
        let replica = self.replicas.replica(job).await?;
        let joining = Joining {
            job,
            membership,
            network: &self.network,
            patience: self.patience,
        };
        let strategy = (self.join)(&joining, &*replica).await?;
        let (coordinator, settled) = (membership.coordinator.clone(), strategy.settled());
        let reporter = Reporter::start(coordinator, membership.sender(), settled);
        let mut trainer = Trainer {
            job,
            membership,
            replica: &*replica,
            strategy,
            reporter,
            counters: &self.counters,
            clock: Clock(0),
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
