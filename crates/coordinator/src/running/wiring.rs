//! A running coordinator, built from its parts. The process and the embedded coordinator differ only in the parts,
//! and in how they drive the work.

use std::sync::Arc;
use std::time::Duration;

use checkpoint::{CheckpointError, Claim, Store};
use cluster::{Cluster, Record, Summary};
use daemon::Offload;
use daemon::process::Process;
use futures_util::future::BoxFuture;
use network::connections::{AcceptedStream, Caller, Connections, Port};
use network::listener;
use network::security::Security;
use network::transport::{self, Listen};
use parking_lot::Mutex;
use shared_proto::task;
use shared_proto::view::View;
use shared_proto::wire::coordinator_server::CoordinatorServer;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::service::interceptor::InterceptedService;
use tonic::{Request, Status};

use super::begin::{Begun, Keeping};
use super::error::CoordinatorError;
use super::gauges::Gauges;
use super::settings::Settings;
use crate::calls::callers::Counted;
use crate::calls::current_job::CurrentJob;
use crate::calls::service::Service;
use crate::calls::slot::{Active, Slot};
use crate::keeping::keeper::{keep_claim, run_store_tasks};
use crate::keeping::shared::Shared;
use crate::keeping::state::State;

/// The longest wait for the servers' last reports, and then for the members to leave.
const FAREWELL: Duration = Duration::from_secs(5);

/// The longest wait at the end for connections to close, and for the store to answer.
pub(crate) const DRAIN: Duration = Duration::from_secs(2);

/// The most concurrent calls of one connection. A member makes a few.
const MOST_STREAMS: u32 = 64;

/// The time in which the answer to a call must begin. It also ends calls with a request that never arrives whole.
const MOST_TIME: Duration = Duration::from_secs(30);

/// The interval at which leases are checked.
const TICK: Duration = Duration::from_millis(100);

/// The parts of a coordinator.
pub(crate) struct Parts {
    pub(crate) begun: Begun,
    pub(crate) state: State,
    /// Takes the records of the job.
    pub(crate) records: mpsc::Sender<Record>,
    pub(crate) offload: Offload,
    pub(crate) security: Security,
}

/// A coordinator of one job. It runs while the future of its work is polled.
pub(crate) struct Running {
    pub(crate) shared: Arc<Shared>,
    /// True if the job had already ended when this process began or resumed it.
    pub(crate) had_ended: bool,
    /// Cancelled to end the work.
    stop: CancellationToken,
    /// The store of checkpoints, and the run's claim to it. `None` if the job writes no checkpoints, or had already
    /// ended.
    owned: Option<(Store, Arc<Mutex<Claim>>)>,
}

impl Parts {
    /// Builds a coordinator of one job. Returns it, and the future of its work, which serves calls, ends leases,
    /// persists changes and carries out tasks in the store, until the coordinator is stopped.
    pub(crate) fn build(
        self,
        incoming: AcceptedStream,
    ) -> (
        Running,
        impl Future<Output = Result<(), tonic::transport::Error>> + Send + 'static,
    ) {
        let security = self.security.clone();
        let (running, work) = self.start();
        let service = Service {
            current_job: CurrentJob {
                slot: Slot::new(Some(running.active(0, ""))),
                security,
            },
            queue: None,
        };
        let server = serve(service, incoming, running.stop.clone());
        let work = async move { tokio::join!(server, work).0 };
        (running, work)
    }

    /// Builds a coordinator of one job that serves no calls. Returns it, and the future of its work on the leases, the
    /// state and the store.
    pub(crate) fn start(self) -> (Running, impl Future<Output = ()> + Send + 'static) {
        let had_ended = self.begun.cluster.ended();
        let shared = Shared::new(self.begun.cluster, self.records, self.state, self.offload);
        let stop = CancellationToken::new();
        let keeping = self.begun.keeping.map(|Keeping { store, keep, claim }| {
            let claim = Arc::new(Mutex::new(claim));
            (store, keep, claim)
        });
        // A job that had ended owns nothing any more.
        let owned = keeping.as_ref().filter(|_| !had_ended);
        let owned = owned.map(|(store, _, claim)| (store.clone(), Arc::clone(claim)));
        let running = Running {
            shared: Arc::clone(&shared),
            had_ended,
            stop: stop.clone(),
            owned: owned.clone(),
        };
        let claims = {
            let (shared, stop) = (Arc::clone(&shared), stop.clone());
            async move {
                if let Some((store, claim)) = owned {
                    keep_claim(shared, store, claim, stop).await;
                }
            }
        };
        let beside = async move {
            let store_tasks = async {
                if let Some((store, keep, _)) = keeping {
                    run_store_tasks(Arc::clone(&shared), store, keep).await;
                }
            };
            tokio::join!(store_tasks, tick(Arc::clone(&shared)));
        };
        let beside = stop.run_until_cancelled_owned(beside);
        let work = async move {
            tokio::join!(claims, beside);
        };
        (running, work)
    }
}

/// Serves calls on a task of its own, until `stop`.
pub(super) fn spawn_server(
    service: Service,
    settings: &Settings,
    process: &Process,
    listener: TcpListener,
    stop: CancellationToken,
) -> JoinHandle<Result<(), tonic::transport::Error>> {
    let connections = Connections::new(
        Port::Coordinator,
        settings.connections.limits(&Listen::Tcp(settings.listen)),
    );
    let incoming = process.security.accepted(connections.incoming(listener));
    task::spawn_with_result(serve(service, incoming, stop))
}

/// Serves calls until `stop`.
fn serve(
    service: Service,
    incoming: AcceptedStream,
    stop: CancellationToken,
) -> BoxFuture<'static, Result<(), tonic::transport::Error>> {
    let admit = admit(service.current_job.security.clone());
    let server = transport::server()
        .max_concurrent_streams(MOST_STREAMS)
        .timeout(MOST_TIME);
    let service = InterceptedService::new(CoordinatorServer::new(service), admit);
    listener::serve(server, Counted(service), incoming, stop)
}

impl Running {
    /// Returns the job as calls see it.
    pub(crate) fn active(&self, id: u64, folder: &str) -> Active {
        Active {
            shared: Arc::clone(&self.shared),
            over: self.stop.clone(),
            id,
            folder: folder.to_owned(),
        }
    }

    /// Waits for the end of the job, and then a little for the servers' last reports. Returns the summary.
    ///
    /// # Errors
    /// [`CoordinatorError::StateLost`].
    pub(crate) async fn ended(&self) -> Result<Summary, CoordinatorError> {
        let shared = &self.shared;
        let ended = async {
            // A view is published once all that it follows from is persisted.
            let _ = shared.views().wait_for(View::ended).await;
            let reported = until(shared, Cluster::all_shards_reported);
            if tokio::time::timeout(FAREWELL, reported).await.is_err() {
                tracing::warn!(
                    "not all parameter servers have reported; the summary lacks their part"
                );
            }
        };
        tokio::select! {
            biased;
            () = ended => {}
            () = shared.broken() => return Err(CoordinatorError::StateLost),
        }
        shared.release_reserve();
        Ok(shared.look(|cluster, now| cluster.summary(now)))
    }

    /// Waits a little for the members to leave.
    pub(crate) async fn all_left(&self) {
        let all_left = until(&self.shared, |cluster| !cluster.anyone_there());
        let _ = tokio::time::timeout(FAREWELL, all_left).await;
    }

    /// Ends the work.
    pub(crate) fn stop(&self) {
        self.stop.cancel();
    }

    /// Releases the location of the checkpoints, so that the next run there need not wait. Called when the work has
    /// ended.
    pub(crate) async fn release(&self) {
        let Some((store, claim)) = &self.owned else {
            return;
        };
        let claim = claim.lock().clone();
        let released = async {
            if store.owner().await?.as_ref() == Some(&claim) {
                store.release(&claim).await?;
            }
            Ok::<_, CheckpointError>(())
        };
        match tokio::time::timeout(DRAIN, released).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                tracing::warn!("cannot release the location of the checkpoints: {error}");
            }
            Err(_) => tracing::warn!(
                "cannot release the location of the checkpoints: the store does not answer"
            ),
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Returns an interceptor that refuses calls without the job's token.
fn admit(security: Security) -> impl Fn(Request<()>) -> Result<Request<()>, Status> + Clone {
    move |request| {
        security.check_token(request.metadata().as_ref(), request.extensions())?;
        // The connection may stay longer, because the message may take a while to arrive.
        Caller::of(request.extensions())
            .into_iter()
            .for_each(Caller::record_request);
        Ok(request)
    }
}

async fn until(shared: &Shared, holds: impl Fn(&Cluster) -> bool) {
    while !shared.look(|cluster, _| holds(cluster)) {
        shared.changed().await;
    }
}

/// Ends expired leases, persists changes and updates the gauges at each `TICK`.
async fn tick(shared: Arc<Shared>) {
    let mut ticks = tokio::time::interval(TICK);
    let gauges = Gauges::new(shared.look(|cluster, _| cluster.has_ring()));
    loop {
        ticks.tick().await;
        shared.ask(|cluster, now| cluster.tick(now)).await;
        shared.keep_all().await;
        shared.look(|cluster, now| gauges.show(cluster, now));
    }
}
