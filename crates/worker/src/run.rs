//! The process: registers, agrees on the variables, works until the job is done.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use candle_core::Device;
use daemon::Ready;
use daemon::membership::{Coordinator, Membership, MembershipError, Registration};
use daemon::process::Process;
use daemon::settings::{MemberSettings, ProcessSettings};
use metrics::counter;
use ps_client::{ClientError, Lost, MapSource, ParameterServers};
use shared_proto::blocks::ShardMap;
use shared_proto::ids::{Clock, Epoch, Role, Task, ViewNumber, names};
use shared_proto::job::{Job, JobError, run_dir};
use shared_proto::refusal::Refusal;
use shared_proto::transport::{Listen, SystemNetwork};
use shared_proto::wire;
use shared_proto::wire::lease_work_reply::Work;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use crate::counters::Counters;
use crate::device::{self, DeviceError};
use crate::model::Registry;
use crate::replica::{Description, Positions, Replica, ReplicaError};
use crate::reporter::{Place, Reporter};
use crate::step::{idle, step};
use crate::strategy::{ParameterServer, Strategy};

/// How long to wait before registering again.
const REGISTER_AGAIN: Duration = Duration::from_millis(50);

/// How long to wait between two looks at the shard map.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// Reports of losses that may wait to be sent.
const LOSSES: usize = 64;

/// What a worker can be told.
#[derive(Clone, Debug, clap::Args)]
pub struct Settings {
    /// Where to compute: auto, cpu or cuda:N.
    #[arg(long, env = "FLAMBEAU_DEVICE", default_value = "auto")]
    pub device: device::Choice,
    /// Where this worker finds the data's files; overrides the job's.
    #[arg(long, env = "FLAMBEAU_DATA_DIR", value_name = "DIR")]
    pub data_dir: Option<PathBuf>,
    /// Where this worker writes the final weights; overrides the job's.
    #[arg(long, env = "FLAMBEAU_RUN_DIR", value_name = "DIR")]
    pub run_dir: Option<PathBuf>,
    /// How it finds its cluster.
    #[command(flatten)]
    pub member: MemberSettings,
    /// What all processes can be told.
    #[command(flatten)]
    pub process: ProcessSettings,
}

/// Why a worker ended otherwise than well.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WorkerError {
    /// The cluster does not want it, or cannot be reached.
    #[error(transparent)]
    Membership(#[from] MembershipError),
    /// A server does not answer, or refuses.
    #[error(transparent)]
    Ps(#[from] ClientError),
    /// The data or the model is at fault.
    #[error(transparent)]
    Replica(#[from] ReplicaError),
    /// The device cannot be had.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The run directory cannot be made.
    #[error("cannot make the run directory {dir:?}: {error}; give another --run-dir")]
    RunDir {
        /// Its path.
        dir: PathBuf,
        /// What the system says.
        error: std::io::Error,
    },
    /// The coordinator's shard map makes no sense.
    #[error("the shard map cannot be read: {0}")]
    ShardMap(#[from] Refusal),
    /// What the coordinator sent is not what the protocol says.
    #[error("the coordinator's answer to {0} lacks what it must have; is it of the same release?")]
    Protocol(&'static str),
    /// The job makes no sense with this worker's settings.
    #[error(transparent)]
    Job(#[from] JobError),
}

impl WorkerError {
    /// What the coordinator is to be told of it: what is not this worker's fault it knows.
    fn to_tell(&self) -> Option<String> {
        match self {
            Self::Membership(_) => None,
            error => Some(error.to_string()),
        }
    }

    /// Whether registering again may help.
    fn is_retryable(&self) -> bool {
        match self {
            Self::Membership(error) => error.is_retryable(),
            Self::Ps(error) => error.is_retryable(),
            _ => false,
        }
    }
}

/// Works on a job until it is done.
///
/// # Errors
/// As the variants of [`WorkerError`] say.
pub async fn run(
    settings: Settings,
    registry: Registry,
    process: Process,
) -> Result<(), WorkerError> {
    let device = device::open(settings.device)?;
    tracing::info!(device = ?device.location(), "computing");
    if let Some(dir) = &settings.run_dir {
        // Better now than when the final weights are to be written.
        std::fs::create_dir_all(dir).map_err(|error| WorkerError::RunDir {
            dir: dir.clone(),
            error,
        })?;
    }
    let patience = Duration::from_secs(settings.member.patience_seconds);
    let coordinator = Coordinator::at(&settings.member.coordinator, patience)?;
    let registration = Registration {
        role: Role::Worker,
        identity: settings
            .member
            .identity(&Listen::Tcp(settings.process.metrics_listen)),
        address: String::new(),
        metrics_address: coordinator.reachable(process.metrics).await?.to_string(),
    };
    let mut worker = Worker {
        coordinator,
        registration,
        registry,
        device,
        patience,
        counters: Counters::new(),
        replica: None,
        settings,
    };
    let mut membership = None;
    let work = worker.work(&process, &mut membership);
    let outcome = process.shutdown.run_until_cancelled(work).await;
    if matches!(outcome, Some(Ok(()))) {
        process.linger().await;
    }
    let error = match &outcome {
        Some(Err(error)) => error.to_tell(),
        Some(Ok(())) | None => None,
    };
    if let Some(membership) = membership {
        membership.leave(error.as_deref()).await;
    }
    outcome.unwrap_or(Ok(()))
}

struct Worker {
    settings: Settings,
    coordinator: Coordinator,
    registration: Registration,
    registry: Registry,
    device: Device,
    patience: Duration,
    counters: Counters,
    /// Of the job it was built for; it outlives memberships.
    replica: Option<(Arc<Job>, Arc<Replica>)>,
}

impl Worker {
    /// Registers and works; again, where the cluster has gone on without us. What is left in
    /// `place` is to be given back.
    async fn work(
        &mut self,
        process: &Process,
        place: &mut Option<Membership>,
    ) -> Result<(), WorkerError> {
        let mut first = true;
        loop {
            self.counters.registrations.increment(1);
            let join = Membership::join(self.coordinator.clone(), self.registration.clone());
            let membership = place.insert(join.await?);
            if std::mem::take(&mut first) {
                Ready {
                    address: None,
                    metrics: process.metrics,
                }
                .announce();
            }
            let outcome = tokio::select! {
                outcome = self.work_as(membership) => outcome,
                lost = membership.lost() => Err(lost.into()),
            };
            match outcome {
                Err(error) if error.is_retryable() => {
                    tracing::warn!("{error}; registering again");
                    tokio::time::sleep(REGISTER_AGAIN).await;
                }
                outcome => return outcome,
            }
        }
    }

    async fn work_as(&mut self, membership: &Membership) -> Result<(), WorkerError> {
        let job = Arc::new(self.job(&membership.job)?);
        let replica = self.replica(&job).await?;
        let (map, view, ours) = register_variables(membership, &replica.description).await?;
        let replica = match ours {
            // Initial values are those of a replica that has not been trained.
            true => self.fresh_replica(&job).await?,
            false => replica,
        };
        let epoch = map.epoch;
        let (source, maps) = MapSource::new(map);
        let (tell_lost, lost) = mpsc::channel(LOSSES);
        let mut servers = ParameterServers::connect(
            &maps,
            &ps_client::Identity {
                job: job.name.clone(),
                task: membership.task,
                view,
                patience: self.patience,
                wire: job.strategy.wire.into(),
                network: Arc::new(SystemNetwork),
                lost: tell_lost,
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
        let reporter = Reporter::start(membership.coordinator.clone(), membership.sender(), epoch);
        let mut trainer = Trainer {
            job,
            membership,
            replica: &replica,
            strategy: ParameterServer::new(servers),
            reporter,
            counters: &self.counters,
            clock: Clock(0),
        };
        trainer.train().await
    }

    /// The replica for a job: the one that is there, if it was built for it.
    async fn replica(&mut self, job: &Arc<Job>) -> Result<Arc<Replica>, WorkerError> {
        if let Some((of, replica)) = &self.replica
            && of == job
        {
            return Ok(Arc::clone(replica));
        }
        self.replica = None;
        let (registry, device) = (self.registry.clone(), self.device.clone());
        let replica = Arc::new(Replica::start(Arc::clone(job), registry, device).await?);
        self.replica = Some((Arc::clone(job), Arc::clone(&replica)));
        Ok(replica)
    }

    async fn fresh_replica(&mut self, job: &Arc<Job>) -> Result<Arc<Replica>, WorkerError> {
        if self.counters.has_trained() {
            self.replica = None;
        }
        self.replica(job).await
    }

    /// The coordinator's job, with what this worker was told otherwise.
    fn job(&self, job: &Job) -> Result<Job, WorkerError> {
        let mut job = job.clone();
        if let Some(dir) = &self.settings.data_dir {
            job.data.dir = Some(dir.clone());
        }
        if let Some(dir) = &self.settings.run_dir {
            job.run_dir = Some(dir.clone());
        }
        job.validate()?;
        Ok(job)
    }
}

/// States the variables and waits until there is a shard map and, unless they are ours to send,
/// initial values.
async fn register_variables(
    membership: &Membership,
    description: &Description,
) -> Result<(ShardMap, ViewNumber, bool), WorkerError> {
    let request = wire::RegisterVariablesRequest {
        origin: Some(membership.origin().into()),
        variables: description.variables.iter().map(Into::into).collect(),
        training_samples: description.training_samples as u64,
        evaluation_samples: description.evaluation_samples as u64,
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

/// Says for whom this worker waits, in the log, the metrics and to the coordinator.
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
                origin: Some(sender.origin(Epoch(0), Clock(0)).into()),
                report: Some(wire::report_request::Report::Wait(wire::WaitReport {
                    on: on.into_iter().map(Into::into).collect(),
                })),
            };
            let call = coordinator.call(|mut c| {
                let request = request.clone();
                async move { c.report(request).await }
            });
            // Nothing depends on it.
            let _ = call.await;
        }
    }
}

/// Fetches the shard map when the present one does not serve any more.
fn fetch_maps(membership: &Membership, source: MapSource) -> impl Future<Output = ()> + use<> {
    let coordinator = membership.coordinator.clone();
    async move {
        loop {
            source.wanted().await;
            let call = coordinator
                .call(|mut c| async move { c.get_shard_map(wire::ShardMapRequest {}).await });
            match call.await.map(ShardMap::try_from) {
                Ok(Ok(map)) => source.publish(map),
                Ok(Err(error)) => tracing::warn!("the shard map cannot be read: {error}"),
                Err(error) => tracing::debug!("the shard map cannot be fetched: {error}"),
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }
}

/// Tells the coordinator of updates that went with a server.
fn tell_losses(
    membership: &Membership,
    mut losses: mpsc::Receiver<Lost>,
) -> impl Future<Output = ()> + use<> {
    let coordinator = membership.coordinator.clone();
    let sender = membership.sender();
    async move {
        while let Some(lost) = losses.recv().await {
            counter!("flambeau_worker_lost_updates_total").increment(lost.updates);
            let request = wire::ReportRequest {
                origin: Some(sender.origin(Epoch(0), Clock(0)).into()),
                report: Some(wire::report_request::Report::Lost(wire::LostReport {
                    shard: lost.shard,
                    updates: lost.updates,
                    first_step: lost.first.0,
                    last_step: lost.last.0,
                })),
            };
            let call = coordinator.call(|mut c| {
                let request = request.clone();
                async move { c.report(request).await }
            });
            if let Err(error) = call.await {
                tracing::warn!(shard = lost.shard, "losses could not be reported: {error}");
            }
        }
    }
}

/// A member at work.
struct Trainer<'a, S> {
    job: Arc<Job>,
    membership: &'a Membership,
    replica: &'a Replica,
    strategy: S,
    reporter: Reporter,
    counters: &'a Counters,
    clock: Clock,
}

impl<S: Strategy> Trainer<'_, S> {
    async fn train(&mut self) -> Result<(), WorkerError> {
        loop {
            let asked = Instant::now();
            let (work, clock) = self.lease_work().await?;
            self.clock = self.clock.max(clock);
            self.reporter.waited(&idle(asked.elapsed()));
            match work {
                Work::Split(split) => self.train_split(&split).await?,
                Work::Evaluate(evaluate) => self.evaluate(&evaluate).await?,
                Work::Idle(idle) => tracing::debug!(reason = idle.reason, "idle"),
                Work::Done(done) if done.error.is_empty() => {
                    tracing::info!("the job is done");
                    return Ok(());
                }
                Work::Done(done) => return Err(MembershipError::JobFailed(done.error).into()),
            }
        }
    }

    async fn lease_work(&mut self) -> Result<(Work, Clock), WorkerError> {
        let mut origin = self.membership.origin();
        origin.clock = self.clock;
        let request = wire::LeaseWorkRequest {
            origin: Some(origin.into()),
        };
        let reply = self
            .membership
            .coordinator
            .call(|mut c| {
                let request = request.clone();
                async move { c.lease_work(request).await }
            })
            .await?;
        let work = reply.work.ok_or(WorkerError::Protocol("LeaseWork"))?;
        Ok((work, Clock(reply.clock)))
    }

    async fn train_split(&mut self, split: &wire::Split) -> Result<(), WorkerError> {
        let batch = u64::from(self.job.batch_size);
        let mut start = split.start;
        while start < split.end {
            let positions = Positions {
                epoch: split.data_epoch,
                start,
                end: split.end.min(start + batch),
            };
            let step = step(
                self.replica,
                &mut self.strategy,
                self.counters,
                self.clock,
                positions,
                self.job.non_finite,
            );
            let finished = step.await?;
            self.clock = self.clock.next();
            start = positions.end;
            let place = Place {
                clock: self.clock,
                split: split.id,
                position: start,
            };
            self.reporter.finished(place, &finished);
        }
        // The split is done when the coordinator knows so.
        Ok(self.reporter.flush().await?)
    }

    async fn evaluate(&mut self, evaluate: &wire::Evaluate) -> Result<(), WorkerError> {
        let sink = self.replica.sink();
        self.strategy.pull_fresh(self.clock, sink).await?;
        let metrics = self.replica.evaluate().await?;
        tracing::info!(epoch = evaluate.data_epoch + 1, ?metrics, "evaluated");
        if evaluate.save_model
            && let Some(dir) = &self.job.run_dir
        {
            self.replica.save(dir.join(run_dir::MODEL)).await?;
        }
        let request = wire::ReportRequest {
            origin: Some(self.membership.origin().into()),
            report: Some(wire::report_request::Report::Evaluation(
                wire::EvaluationReport {
                    data_epoch: evaluate.data_epoch,
                    samples: self.replica.description.evaluation_samples as u64,
                    metrics: metrics.into_iter().collect(),
                },
            )),
        };
        let call = self.membership.coordinator.call(|mut c| {
            let request = request.clone();
            async move { c.report(request).await }
        });
        call.await?;
        Ok(())
    }
}
