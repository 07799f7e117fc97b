//! The gRPC face: reads a request, asks the cluster under its lock, publishes what has changed.

use std::sync::Arc;
use std::time::{Duration, Instant};

use metrics::counter;
use parking_lot::Mutex;
use shared_proto::blocks::VariableSpec;
use shared_proto::ids::{Origin, Role, Task};
use shared_proto::refusal::{Reason, Refusal};
use shared_proto::transport::PROTOCOL_VERSION;
use shared_proto::view::View;
use shared_proto::wire;
use shared_proto::wire::coordinator_server::Coordinator;
use tokio::sync::{Notify, mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use crate::cluster::{Cluster, Initialization, Work};
use crate::record::Record;

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
}

impl Shared {
    pub(crate) fn new(cluster: Cluster, records: mpsc::Sender<Record>) -> Arc<Self> {
        Arc::new(Self {
            cluster: Mutex::new(cluster),
            views: watch::channel(View::default()).0,
            changed: Notify::new(),
            records,
        })
    }

    /// Asks the cluster something, and tells everybody what has changed by it.
    pub(crate) async fn ask<T>(&self, ask: impl FnOnce(&mut Cluster, Instant) -> T) -> T {
        let (answer, records) = {
            let mut cluster = self.cluster.lock();
            let answer = ask(&mut cluster, Instant::now());
            let view = cluster.refresh_view();
            self.views.send_if_modified(|current| {
                let newer = view.number > current.number;
                if newer {
                    current.clone_from(view);
                }
                newer
            });
            (answer, cluster.take_records())
        };
        self.changed.notify_waiters();
        for record in records {
            // The recorder is gone only when the run directory could not be written: said there.
            let _ = self.records.send(record).await;
        }
        answer
    }

    pub(crate) fn views(&self) -> watch::Receiver<View> {
        self.views.subscribe()
    }

    /// Looks at the cluster without changing it.
    pub(crate) fn look<T>(&self, look: impl FnOnce(&Cluster, Instant) -> T) -> T {
        look(&self.cluster.lock(), Instant::now())
    }

    /// Waits for the next change, or a moment.
    pub(crate) async fn changed(&self) {
        let _ = tokio::time::timeout(LOOK_AGAIN, self.changed.notified()).await;
    }

    /// Asks until the answer satisfies, or for as long as a call may wait.
    async fn ask_until<T>(
        &self,
        mut ask: impl FnMut(&mut Cluster, Instant) -> Result<T, Refusal>,
        satisfies: impl Fn(&T) -> bool,
    ) -> Result<T, Refusal> {
        let deadline = Instant::now() + LONG_POLL;
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            // Not through `ask`: whoever waits must not wake the others by looking.
            let answer = ask(&mut self.cluster.lock(), Instant::now())?;
            if satisfies(&answer) || Instant::now() >= deadline {
                self.ask(|_, _| ()).await;
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

    /// Reads who is asking, and refuses whoever is not a member.
    fn admit(&self, origin: Option<&wire::Origin>, what: &str) -> Result<Origin, Refusal> {
        let origin = Origin::read(origin, what)?;
        self.shared.look(|cluster, _| cluster.admit(&origin))?;
        Ok(origin)
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
        });
        Ok(Response::new(reply))
    }

    async fn heartbeat(
        &self,
        request: Request<wire::HeartbeatRequest>,
    ) -> Answer<wire::HeartbeatReply> {
        let origin = self
            .admit(request.into_inner().origin.as_ref(), "Heartbeat")
            .map_err(refused)?;
        // No view changes by a heartbeat, so nobody is told.
        self.shared
            .cluster
            .lock()
            .heartbeat(Instant::now(), origin.task);
        let view = self.shared.views.borrow();
        Ok(Response::new(wire::HeartbeatReply {
            view: view.number.0,
            phase: view.phase.into(),
            error: view.error.clone(),
        }))
    }

    async fn leave(&self, request: Request<wire::LeaveRequest>) -> Answer<wire::LeaveReply> {
        let request = request.into_inner();
        let origin = self
            .admit(request.origin.as_ref(), "Leave")
            .map_err(refused)?;
        self.shared
            .ask(|cluster, now| cluster.leave(now, origin.task, request.error))
            .await;
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
        let map = self
            .shared
            .look(|cluster, _| cluster.shard_map().map(wire::ShardMap::from));
        map.map(Response::new).map_err(refused)
    }

    async fn register_variables(
        &self,
        request: Request<wire::RegisterVariablesRequest>,
    ) -> Answer<wire::RegisterVariablesReply> {
        let request = request.into_inner();
        let origin = self
            .admit(request.origin.as_ref(), "RegisterVariables")
            .map_err(refused)?;
        let specs = request.variables.iter().map(VariableSpec::read);
        let specs = specs.collect::<Result<Vec<_>, _>>().map_err(refused)?;
        let samples = (request.training_samples, request.evaluation_samples);
        let initialization = self
            .shared
            .ask_until(
                |cluster, now| cluster.register_variables(now, origin.task, specs.clone(), samples),
                |answer| !matches!(answer, Initialization::Pending(_)),
            )
            .await
            .map_err(refused)?;
        let view = self.shared.views.borrow().number.0;
        let shard_map = self
            .shared
            .look(|cluster, _| cluster.shard_map().ok().map(Into::into));
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
        let origin = self
            .admit(request.into_inner().origin.as_ref(), "FinishInitialization")
            .map_err(refused)?;
        self.shared
            .ask(|cluster, _| cluster.finish_initialization(origin.task))
            .await
            .map_err(refused)?;
        Ok(Response::new(wire::FinishInitializationReply {}))
    }

    async fn lease_work(
        &self,
        request: Request<wire::LeaseWorkRequest>,
    ) -> Answer<wire::LeaseWorkReply> {
        let origin = self
            .admit(request.into_inner().origin.as_ref(), "LeaseWork")
            .map_err(refused)?;
        let (work, clock) = self
            .shared
            .ask_until(
                |cluster, now| {
                    cluster.admit(&origin)?;
                    Ok(cluster.lease_work(now, origin.task))
                },
                |(work, _)| !matches!(work, Work::Idle(_)),
            )
            .await
            .map_err(refused)?;
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
        let origin = self
            .admit(request.origin.as_ref(), "FinishStep")
            .map_err(refused)?;
        let min_clock = self
            .shared
            .ask(|cluster, now| cluster.finish_step(now, &origin, &request))
            .await
            .map_err(refused)?;
        Ok(Response::new(wire::FinishStepReply {
            min_clock: min_clock.0,
        }))
    }

    async fn report(&self, request: Request<wire::ReportRequest>) -> Answer<wire::ReportReply> {
        let request = request.into_inner();
        let origin = self
            .admit(request.origin.as_ref(), "Report")
            .map_err(refused)?;
        let Some(report) = request.report else {
            return Err(refused(Refusal::new(
                Reason::Malformed,
                "Report has no report in it",
            )));
        };
        let ask = |cluster: &mut Cluster, now| take_report(cluster, now, origin.task, report);
        self.shared.ask(ask).await.map_err(refused)?;
        Ok(Response::new(wire::ReportReply {}))
    }

    type WatchStream = ReceiverStream<Result<wire::View, Status>>;

    async fn watch(&self, request: Request<wire::WatchRequest>) -> Answer<Self::WatchStream> {
        self.admit(request.into_inner().origin.as_ref(), "Watch")
            .map_err(refused)?;
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
    task: Task,
    report: wire::report_request::Report,
) -> Result<(), Refusal> {
    use wire::report_request::Report;
    match report {
        Report::Shard(report) => cluster.report_shard(task, report),
        Report::Evaluation(report) => cluster.evaluated(now, task, report)?,
        Report::Wait(report) => cluster.waiting(task, report.on),
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
