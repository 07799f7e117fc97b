//! The gRPC face: reads a request, asks the cluster under its lock, publishes what has changed.

use std::sync::Arc;
use std::time::{Duration, Instant};

use daemon::Offload;
use metrics::counter;
use parking_lot::Mutex;
use shared_proto::blocks::VariableSpec;
use shared_proto::ids::{Origin, Role};
use shared_proto::refusal::{Reason, Refusal};
use shared_proto::transport::PROTOCOL_VERSION;
use shared_proto::view::View;
use shared_proto::wire;
use shared_proto::wire::coordinator_server::Coordinator;
use tokio::sync::{Notify, mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use crate::cluster::{Changes, Cluster, Errand, Initialization, Work};
use crate::record::Record;
use crate::state::State;

/// How long a call waits for something to come up before it answers "nothing yet".
const LONG_POLL: Duration = Duration::from_secs(4);

/// How often a waiting call looks again at what changes with time alone.
const LOOK_AGAIN: Duration = Duration::from_millis(200);

type Answer<T> = Result<Response<T>, Status>;

/// The cluster and those who listen to it.
pub(crate) struct Shared {
    cluster: Mutex<Cluster>,
    views: watch::Sender<View>,
    /// Something has happened that may be work for those who wait.
    changed: Notify,
    records: mpsc::Sender<Record>,
    state: Arc<State>,
    offload: Offload,
    /// What is kept in the state. Held by whoever writes it.
    kept: tokio::sync::Mutex<Changes>,
    /// The state cannot be written: nobody is answered any more.
    broken: CancellationToken,
}

/// The time. In simulations it is not the system's.
fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

impl Shared {
    pub(crate) fn new(
        cluster: Cluster,
        records: mpsc::Sender<Record>,
        state: State,
        offload: Offload,
    ) -> Arc<Self> {
        Arc::new(Self {
            cluster: Mutex::new(cluster),
            views: watch::channel(View::default()).0,
            changed: Notify::new(),
            records,
            state: Arc::new(state),
            offload,
            kept: tokio::sync::Mutex::default(),
            broken: CancellationToken::new(),
        })
    }

    /// Asks the cluster something, keeps what has to be kept, and then tells everybody.
    pub(crate) async fn ask<T>(
        self: &Arc<Self>,
        ask: impl FnOnce(&mut Cluster, Instant) -> T,
    ) -> T {
        let answer = self.ask_quietly(ask).await;
        self.changed.notify_waiters();
        answer
    }

    /// Asks the cluster something, keeps what has to be kept, and then publishes the view if it is
    /// new; wakes nobody else.
    async fn ask_quietly<T>(self: &Arc<Self>, ask: impl FnOnce(&mut Cluster, Instant) -> T) -> T {
        let (answer, urgent, records) = {
            let mut cluster = self.cluster.lock();
            let answer = ask(&mut cluster, now());
            cluster.refresh_view();
            (answer, cluster.changes().urgent, cluster.take_records())
        };
        let shared = Arc::clone(self);
        // Whoever has asked may go away meanwhile; what it has changed is kept and told all the same.
        let settled = tokio::spawn(async move {
            shared.settle(urgent).await;
            for record in records {
                // The recorder is gone only when the run directory could not be written: said there.
                let _ = shared.records.send(record).await;
            }
        });
        let _ = settled.await;
        answer
    }

    /// Returns when urgent changes up to this one are kept, and everybody can see them. Whoever
    /// finds others waiting keeps theirs as well.
    async fn settle(&self, urgent: u64) {
        let mut kept = self.kept.lock().await;
        if kept.urgent < urgent {
            *kept = self.keep().await;
        }
        // Only what is kept may be seen; later changes publish their view themselves.
        let cluster = self.cluster.lock();
        if cluster.changes().urgent == kept.urgent {
            self.publish(cluster.view());
        }
    }

    /// Keeps what may be forgotten too, where there is something new.
    pub(crate) async fn keep_all(&self) {
        let mut kept = self.kept.lock().await;
        if self.look(|cluster, _| cluster.changes()) != *kept {
            *kept = self.keep().await;
        }
    }

    async fn keep(&self) -> Changes {
        let (saved, changes) = self.look(|cluster, now| (cluster.save_all(now), cluster.changes()));
        let state = Arc::clone(&self.state);
        if let Err(error) = self.offload.run(move || state.write(&saved)).await {
            // To go on would be to promise what a restart forgets.
            tracing::error!("the coordinator's state cannot be written: {error}; ending");
            self.broken.cancel();
            std::future::pending::<()>().await;
        }
        changes
    }

    fn publish(&self, view: &View) {
        self.views.send_if_modified(|current| {
            let newer = view.number > current.number;
            if newer {
                current.clone_from(view);
            }
            newer
        });
    }

    /// Returns when the state cannot be written any more.
    pub(crate) async fn broken(&self) {
        self.broken.cancelled().await;
    }

    /// What is to be done with the store of checkpoints.
    pub(crate) fn take_errand(&self) -> Option<Errand> {
        self.cluster.lock().take_errand()
    }

    pub(crate) fn views(&self) -> watch::Receiver<View> {
        self.views.subscribe()
    }

    /// Looks at the cluster without changing it.
    pub(crate) fn look<T>(&self, look: impl FnOnce(&Cluster, Instant) -> T) -> T {
        look(&self.cluster.lock(), now())
    }

    /// Waits for the next change, or a moment.
    pub(crate) async fn changed(&self) {
        let _ = tokio::time::timeout(LOOK_AGAIN, self.changed.notified()).await;
    }

    /// Asks until the answer satisfies, or for as long as a call may wait.
    async fn ask_until<T>(
        self: &Arc<Self>,
        mut ask: impl FnMut(&mut Cluster, Instant) -> Result<T, Refusal>,
        satisfies: impl Fn(&T) -> bool,
    ) -> Result<T, Refusal> {
        let deadline = now() + LONG_POLL;
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            // Whoever waits must not wake the others by looking.
            let answer = self.ask_quietly(&mut ask).await?;
            if satisfies(&answer) || now() >= deadline {
                self.changed.notify_waiters();
                return Ok(answer);
            }
            let _ = tokio::time::timeout(LOOK_AGAIN, changed).await;
        }
    }
}

/// The service itself.
pub(crate) struct Service {
    shared: Arc<Shared>,
    shutdown: CancellationToken,
}

impl Service {
    pub(crate) fn new(shared: Arc<Shared>, shutdown: CancellationToken) -> Self {
        Self { shared, shutdown }
    }

    /// Asks on behalf of a member. Whoever is none is refused, under the same lock.
    async fn ask_as<T>(
        &self,
        (origin, what): (Option<&wire::Origin>, &str),
        ask: impl FnOnce(&mut Cluster, Instant, &Origin) -> Result<T, Refusal>,
    ) -> Result<T, Status> {
        let origin = Origin::read(origin, what).map_err(refused)?;
        let ask = |cluster: &mut Cluster, now| {
            cluster.admit(&origin)?;
            cluster.hear_of(&origin);
            ask(cluster, now, &origin)
        };
        self.shared.ask(ask).await.map_err(refused)
    }

    /// The same, until the answer satisfies, or for as long as a call may wait.
    async fn ask_as_until<T>(
        &self,
        (origin, what): (Option<&wire::Origin>, &str),
        mut ask: impl FnMut(&mut Cluster, Instant, &Origin) -> Result<T, Refusal>,
        satisfies: impl Fn(&T) -> bool,
    ) -> Result<T, Status> {
        let origin = Origin::read(origin, what).map_err(refused)?;
        let ask = |cluster: &mut Cluster, now| {
            cluster.admit(&origin)?;
            cluster.hear_of(&origin);
            ask(cluster, now, &origin)
        };
        self.shared.ask_until(ask, satisfies).await.map_err(refused)
    }
}

/// Counts what is refused.
fn refused(refusal: Refusal) -> Status {
    counter!("flambeau_coordinator_refused_total", "reason" => refusal.label()).increment(1);
    tracing::warn!(reason = refusal.label(), "refused: {refusal}");
    refusal.into()
}

#[tonic::async_trait]
impl Coordinator for Service {
    async fn register(
        &self,
        request: Request<wire::RegisterRequest>,
    ) -> Answer<wire::RegisterReply> {
        let request = request.into_inner();
        if request.protocol_version != PROTOCOL_VERSION {
            return Err(refused(Refusal::new(
                Reason::WrongProtocolVersion,
                format!(
                    "{:?} speaks protocol version {}, the coordinator {PROTOCOL_VERSION}; use the same release everywhere",
                    request.identity, request.protocol_version
                ),
            )));
        }
        let role = Role::try_from(request.role).map_err(refused)?;
        let shared = &self.shared;
        let task = shared
            .ask(|cluster, now| cluster.register(now, role, request))
            .await
            .map_err(refused)?;
        tracing::info!(%task, generation = task.generation.0, "registered");
        let view = shared.views.borrow().number.0;
        let reply = shared.look(|cluster, _| wire::RegisterReply {
            job: cluster.job().name.clone(),
            task: Some(task.into()),
            lease_milliseconds: cluster.lease().as_millis() as u64,
            view,
            job_toml: cluster.job().to_toml(),
            checkpoints: cluster
                .place()
                .map_or_else(String::new, |place| place.location.clone()),
            probe: cluster
                .place()
                .map_or_else(String::new, |place| place.probe.clone()),
        });
        Ok(Response::new(reply))
    }

    async fn heartbeat(
        &self,
        request: Request<wire::HeartbeatRequest>,
    ) -> Answer<wire::HeartbeatReply> {
        let origin = Origin::read(request.into_inner().origin.as_ref(), "Heartbeat");
        let origin = origin.map_err(refused)?;
        // No work comes up by a heartbeat, so nobody is woken.
        let beat = |cluster: &mut Cluster, now| {
            cluster.admit(&origin)?;
            cluster.hear_of(&origin);
            cluster.heartbeat(now, origin.task);
            Ok(())
        };
        self.shared.ask_quietly(beat).await.map_err(refused)?;
        let view = self.shared.views.borrow();
        Ok(Response::new(wire::HeartbeatReply {
            view: view.number.0,
            phase: view.phase.into(),
            error: view.error.clone(),
        }))
    }

    async fn leave(&self, request: Request<wire::LeaveRequest>) -> Answer<wire::LeaveReply> {
        let request = request.into_inner();
        self.ask_as(
            (request.origin.as_ref(), "Leave"),
            |cluster, now, origin| {
                cluster.leave(now, origin.task, request.error);
                Ok(())
            },
        )
        .await?;
        Ok(Response::new(wire::LeaveReply {}))
    }

    async fn get_cluster_spec(
        &self,
        _: Request<wire::ClusterSpecRequest>,
    ) -> Answer<wire::ClusterSpec> {
        Ok(Response::new(
            self.shared.look(|cluster, _| cluster.cluster_spec()),
        ))
    }

    async fn get_job(&self, _: Request<wire::JobRequest>) -> Answer<wire::JobReply> {
        let reply = self.shared.look(|cluster, _| wire::JobReply {
            job: cluster.job().name.clone(),
            job_toml: cluster.job().to_toml(),
        });
        Ok(Response::new(reply))
    }

    async fn get_shard_map(&self, _: Request<wire::ShardMapRequest>) -> Answer<wire::ShardMap> {
        // Not before it is kept.
        let map = |cluster: &mut Cluster, _| cluster.shard_map().map(wire::ShardMap::from);
        let map = self.shared.ask_quietly(map).await;
        map.map(Response::new).map_err(refused)
    }

    async fn register_variables(
        &self,
        request: Request<wire::RegisterVariablesRequest>,
    ) -> Answer<wire::RegisterVariablesReply> {
        let request = request.into_inner();
        let specs = request.variables.iter().map(VariableSpec::read);
        let specs = specs.collect::<Result<Vec<_>, _>>().map_err(refused)?;
        let samples = (request.training_samples, request.evaluation_samples);
        let initialization = self
            .ask_as_until(
                (request.origin.as_ref(), "RegisterVariables"),
                |cluster, now, origin| {
                    cluster.register_variables(now, origin.task, specs.clone(), samples)
                },
                |answer| !matches!(answer, Initialization::Pending(_)),
            )
            .await?;
        let view = self.shared.views.borrow().number.0;
        let map = |cluster: &mut Cluster, _| cluster.shard_map().ok().map(Into::into);
        let shard_map = self.shared.ask_quietly(map).await;
        let (initialization, waiting_for) = match initialization {
            Initialization::Yours => (wire::Initialization::Yours, String::new()),
            Initialization::Pending(what) => (wire::Initialization::Pending, what),
            Initialization::Done => (wire::Initialization::Done, String::new()),
        };
        Ok(Response::new(wire::RegisterVariablesReply {
            shard_map,
            view,
            initialization: initialization.into(),
            waiting_for,
        }))
    }

    async fn finish_initialization(
        &self,
        request: Request<wire::FinishInitializationRequest>,
    ) -> Answer<wire::FinishInitializationReply> {
        let request = request.into_inner();
        let from = (request.origin.as_ref(), "FinishInitialization");
        self.ask_as(from, |cluster, _, origin| {
            cluster.finish_initialization(origin.task)
        })
        .await?;
        Ok(Response::new(wire::FinishInitializationReply {}))
    }

    async fn lease_work(
        &self,
        request: Request<wire::LeaseWorkRequest>,
    ) -> Answer<wire::LeaseWorkReply> {
        let request = request.into_inner();
        let (work, clock) = self
            .ask_as_until(
                (request.origin.as_ref(), "LeaseWork"),
                |cluster, now, origin| Ok(cluster.lease_work(now, origin.task)),
                |(work, _)| !matches!(work, Work::Idle(_)),
            )
            .await?;
        let error = self.shared.views.borrow().error.clone();
        Ok(Response::new(wire::LeaseWorkReply {
            clock: clock.0,
            work: Some(wire_work(work, error)),
        }))
    }

    async fn finish_step(
        &self,
        request: Request<wire::FinishStepRequest>,
    ) -> Answer<wire::FinishStepReply> {
        let request = request.into_inner();
        let from = (request.origin.as_ref(), "FinishStep");
        let min_clock = self
            .ask_as(from, |cluster, now, origin| {
                cluster.finish_step(now, origin, &request)
            })
            .await?;
        Ok(Response::new(wire::FinishStepReply {
            min_clock: min_clock.0,
        }))
    }

    async fn report(&self, request: Request<wire::ReportRequest>) -> Answer<wire::ReportReply> {
        let wire::ReportRequest { origin, report } = request.into_inner();
        self.ask_as((origin.as_ref(), "Report"), |cluster, now, origin| {
            take_report(cluster, now, origin, report)
        })
        .await?;
        Ok(Response::new(wire::ReportReply {}))
    }

    type WatchStream = ReceiverStream<Result<wire::View, Status>>;

    async fn watch(&self, request: Request<wire::WatchRequest>) -> Answer<Self::WatchStream> {
        let origin = Origin::read(request.into_inner().origin.as_ref(), "Watch");
        let origin = origin.map_err(refused)?;
        let admitted = self.shared.look(|cluster, _| cluster.admit(&origin));
        admitted.map_err(refused)?;
        // One view under way is enough: a slow reader gets the newest when it is ready for it.
        let (sender, stream) = mpsc::channel(1);
        let mut views = self.shared.views();
        let shutdown = self.shutdown.clone();
        tokio::spawn(async move {
            let forward = async {
                loop {
                    let view = wire::View::from(&*views.borrow_and_update());
                    if sender.send(Ok(view)).await.is_err() || views.changed().await.is_err() {
                        return;
                    }
                }
            };
            shutdown.run_until_cancelled(forward).await;
        });
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn get_status(&self, _: Request<wire::StatusRequest>) -> Answer<wire::Status> {
        Ok(Response::new(
            self.shared.look(|cluster, now| cluster.status(now)),
        ))
    }
}

fn take_report(
    cluster: &mut Cluster,
    now: Instant,
    origin: &Origin,
    report: Option<wire::report_request::Report>,
) -> Result<(), Refusal> {
    use wire::report_request::Report;
    let task = origin.task;
    match report {
        Some(Report::Shard(report)) => cluster.report_shard(task, report),
        Some(Report::Evaluation(report)) => cluster.evaluated(now, task, report)?,
        Some(Report::Wait(report)) => cluster.waiting(task, report.on),
        Some(Report::Checkpoint(report)) => cluster.shard_saved(now, task, report),
        Some(Report::Restore(report)) => cluster.shard_restored(now, task, &report),
        Some(Report::Lost(report)) => cluster.lost(now, origin, &report),
        None => {
            let empty = "Report has no report in it";
            return Err(Refusal::new(Reason::Malformed, empty));
        }
    }
    Ok(())
}

fn wire_work(work: Work, error: String) -> wire::lease_work_reply::Work {
    use wire::lease_work_reply::Work as Reply;
    match work {
        Work::Split(split) => Reply::Split(wire::Split {
            id: split.id,
            data_epoch: split.epoch,
            start: split.start,
            end: split.end,
        }),
        Work::Evaluate { epoch, save_model } => Reply::Evaluate(wire::Evaluate {
            data_epoch: epoch,
            save_model,
        }),
        Work::Idle(reason) => Reply::Idle(wire::Idle { reason }),
        Work::Done => Reply::Done(wire::Done { error }),
    }
}
