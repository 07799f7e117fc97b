//! A member of the cluster: registers, agrees on the variables, trains. If it is put out of the cluster, it
//! begins again.

use std::borrow::Borrow;
use std::sync::Arc;
use std::time::Duration;

use daemon::membership::{Coordinator, Membership, Registration};
use metrics::counter;
use ps_client::{Loss, MapSource, ParameterServers};
use shared_proto::blocks::ShardMap;
use shared_proto::ids::{Clock, Task, ViewNumber, names};
use shared_proto::job::Job;
use shared_proto::transport::Network;
use shared_proto::wire;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use crate::counters::Counters;
use crate::error::WorkerError;
use crate::replica::{Description, Replica};
use crate::reporter::Reporter;
use crate::strategy::Strategy;
use crate::trainer::Trainer;

/// How long to wait before registering again.
const REGISTER_AGAIN: Duration = Duration::from_millis(50);

/// How long to wait between two requests for the shard map.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// The number of losses that may wait to be reported.
const LOSSES: usize = 64;

/// A builder of replicas for jobs.
pub(crate) trait Replicas {
    type Replica: Replica;

    /// Returns the coordinator's job with this worker's own settings.
    fn job(&self, job: &Job) -> Result<Job, WorkerError>;

    /// Returns the replica for a job, an existing one if possible. If `fresh`, the replica has not been trained.
    async fn replica(&mut self, job: &Job, fresh: bool) -> Result<Arc<Self::Replica>, WorkerError>;
}

/// A member with any kind of replica, network and strategy.
pub(crate) struct Member<R, W> {
    pub(crate) coordinator: Coordinator,
    pub(crate) registration: Registration,
    pub(crate) network: Arc<dyn Network>,
    pub(crate) patience: Duration,
    pub(crate) counters: Counters,
    pub(crate) replicas: R,
    /// Makes a strategy of parameter servers.
    pub(crate) strategy: W,
}

impl<R, W, S> Member<R, W>
where
    R: Replicas,
    W: Fn(ParameterServers) -> S,
    S: Strategy,
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
        let replica = self.replicas.replica(job, false).await?;
        let (map, view, ours) = register_variables(membership, replica.description()).await?;
        let replica = match ours {
            // Initial values come from a replica that has not been trained.
            true => self.replicas.replica(job, true).await?,
            false => replica,
        };
        let (source, maps) = MapSource::new(map);
        let (tell_lost, lost) = mpsc::channel(LOSSES);
        let mut servers = ParameterServers::connect(
            &maps,
            &ps_client::Identity {
                job: job.name.clone(),
                run: membership.run,
                task: membership.task,
                view,
                patience: self.patience,
                wire: job.strategy.wire.into(),
                network: Arc::clone(&self.network),
                losses: tell_lost,
            },
        );
        let stop = CancellationToken::new();
        let _stop = stop.clone().drop_guard();
        let waits = tell_waits(membership, servers.waiting_on());
        let maps = fetch_maps(membership, source);
        let losses = tell_losses(membership, lost);
        tokio::spawn(stop.clone().run_until_cancelled_owned(waits));
        tokio::spawn(stop.clone().run_until_cancelled_owned(maps));
        tokio::spawn(stop.run_until_cancelled_owned(losses));
        if ours {
            servers.initialize(&replica.values().await?).await?;
            finish_initialization(membership).await?;
        }
        let (coordinator, settled) = (membership.coordinator.clone(), servers.settled());
        let reporter = Reporter::start(coordinator, membership.sender(), settled);
        let mut trainer = Trainer {
            job,
            membership,
            replica: &*replica,
            strategy: (self.strategy)(servers),
            reporter,
            counters: &self.counters,
            clock: Clock(0),
        };
        trainer.train().await
    }
}

/// Registers the variables. Waits until there is a shard map and, unless this worker is to send them, initial
/// values.
async fn register_variables(
    membership: &Membership,
    description: &Description,
) -> Result<(ShardMap, ViewNumber, bool), WorkerError> {
    let request = wire::RegisterVariablesRequest {
        origin: Some(membership.origin().into()),
        variables: description.variables.iter().map(Into::into).collect(),
        training_samples: description.training_samples as u64,
        evaluation_samples: description.evaluation_samples as u64,
        data_digest: description.data_digest.clone(),
    };
    let mut said = String::new();
    loop {
        let reply = membership
            .coordinator
            .call(|mut c| {
                let request = request.clone();
                async move { c.register_variables(request).await }
            })
            .await?;
        let ours = match reply.initialization() {
            wire::Initialization::Yours => true,
            wire::Initialization::Done => false,
            wire::Initialization::Pending | wire::Initialization::Unspecified => {
                if said != reply.waiting_for {
                    tracing::info!("waiting: {}", reply.waiting_for);
                    said = reply.waiting_for;
                }
                continue;
            }
        };
        let map = reply
            .shard_map
            .ok_or(WorkerError::Protocol("RegisterVariables"))?;
        return Ok((ShardMap::try_from(map)?, ViewNumber(reply.view), ours));
    }
}

async fn finish_initialization(membership: &Membership) -> Result<(), WorkerError> {
    let request = wire::FinishInitializationRequest {
        origin: Some(membership.origin().into()),
    };
    let call = membership.coordinator.call(|mut c| {
        let request = request.clone();
        async move { c.finish_initialization(request).await }
    });
    call.await?;
    tracing::info!("sent the initial values");
    Ok(())
}

/// Reports which workers this worker waits for, in the log, the metrics and to the coordinator.
fn tell_waits(
    membership: &Membership,
    mut waiting_on: watch::Receiver<Vec<Task>>,
) -> impl Future<Output = ()> + use<> {
    let coordinator = membership.coordinator.clone();
    let sender = membership.sender();
    async move {
        while waiting_on.changed().await.is_ok() {
            let on = waiting_on.borrow_and_update().clone();
            if !on.is_empty() {
                tracing::info!(on = names(&on), "held back: waiting for slower workers");
            }
            for task in &on {
                counter!("flambeau_worker_waits_total", "on" => task.to_string()).increment(1);
            }
            let request = wire::ReportRequest {
                origin: Some(sender.here().into()),
                report: Some(wire::report_request::Report::Wait(wire::WaitReport {
                    on: on.into_iter().map(Into::into).collect(),
                })),
            };
            let call = coordinator.call(|mut c| {
                let request = request.clone();
                async move { c.report(request).await }
            });
            // Nothing depends on this report.
            let _ = call.await;
        }
    }
}

/// Fetches the shard map when the present one fails, or when an answer of the coordinator names a newer epoch.
fn fetch_maps(membership: &Membership, source: MapSource) -> impl Future<Output = ()> + use<> {
    let coordinator = membership.coordinator.clone();
    let sender = membership.sender();
    let mut newest = sender.newest_epoch();
    async move {
        loop {
            let epoch = source.epoch();
            tokio::select! {
                biased;
                _ = newest.wait_for(|newest| *newest > epoch) => {}
                () = source.wanted() => {}
            }
            let request = wire::ShardMapRequest {
                origin: Some(sender.here().into()),
            };
            let call = coordinator.call(|mut c| {
                let request = request.clone();
                async move { c.get_shard_map(request).await }
            });
            match call.await.map(ShardMap::try_from) {
                Ok(Ok(map)) => source.publish(map),
                Ok(Err(error)) => tracing::warn!("the shard map cannot be read: {error}"),
                Err(error) => tracing::debug!("the shard map cannot be fetched: {error}"),
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }
}

/// Tells the coordinator of updates that are lost with a server.
fn tell_losses(
    membership: &Membership,
    mut losses: mpsc::Receiver<Loss>,
) -> impl Future<Output = ()> + use<> {
    let coordinator = membership.coordinator.clone();
    let sender = membership.sender();
    async move {
        let counted = counter!("flambeau_worker_lost_updates_total");
        while let Some(loss) = losses.recv().await {
            let (shard, lost) = (loss.shard, loss.lost);
            counted.increment(lost.updates);
            let mut origin = sender.here();
            origin.epoch = loss.epoch;
            let request = wire::ReportRequest {
                origin: Some(origin.into()),
                report: Some(wire::report_request::Report::Lost(wire::LostReport {
                    shard,
                    updates: lost.updates,
                    first_step: lost.first.0,
                    last_step: lost.last.0,
                })),
            };
            let call = coordinator.call(|mut c| {
                let request = request.clone();
                async move { c.report(request).await }
            });
            match call.await {
                // If the session no longer waits, it has ended.
                Ok(_) => drop(loss.told.send(())),
                Err(error) => tracing::warn!(shard, "losses could not be reported: {error}"),
            }
        }
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
