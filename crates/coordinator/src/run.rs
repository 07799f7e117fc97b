//! The process: listens, ticks, records, and ends when the job does.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use checkpoint::{CheckpointError, Claim, Store};
use daemon::Offload;
use daemon::process::Process;
use daemon::settings::{ConnectionSettings, JobFlags, ProcessSettings};
use parking_lot::Mutex;
use shared_proto::connections::{Caller, Connections, Port};
use shared_proto::job::{Job, JobError, run_dir};
use shared_proto::security::{Security, SecurityError};
use shared_proto::transport::{self, Listen};
use shared_proto::wire::coordinator_server::CoordinatorServer;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio_stream::Stream;
use tokio_util::sync::CancellationToken;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::server::Connected;
use tonic::{Request, Status};

use crate::begin::{Keeping, Restore, Wish, begin, open_store};
use crate::callers::Counted;
use crate::cluster::Cluster;
use crate::gauges::Gauges;
use crate::keeper::{keep_claim, run_store_tasks};
use crate::record::Recorder;
use crate::service::Service;
use crate::shared::Shared;
use crate::state::{State, StateError};

type BoxFuture = std::pin::Pin<Box<dyn Future<Output = ()> + Send>>;

/// The longest wait for the servers' last reports, and then for the members to leave.
pub(crate) const FAREWELL: Duration = Duration::from_secs(5);

/// The time for which a coordinator keeps serving if it is restarted after the end of its job.
const AFTERLIFE: Duration = Duration::from_secs(20);

/// The time in which connections must end.
const DRAIN: Duration = Duration::from_secs(2);

/// The most concurrent calls of one connection. A member makes a few.
const MOST_STREAMS: u32 = 64;

/// The time in which the answer to a call must begin. It also ends calls with a request that never arrives whole.
const MOST_TIME: Duration = Duration::from_secs(30);

/// The interval at which leases are checked.
const TICK: Duration = Duration::from_millis(100);

/// The settings of a coordinator.
#[derive(Clone, Debug, clap::Args)]
pub struct Settings {
    /// The job file; `flambeau job init` writes one. Default: digits, MLP.
    #[arg(env = "FLAMBEAU_JOB", value_name = "JOB.toml")]
    pub job_file: Option<PathBuf>,
    /// Listen on this address, which all other processes are given.
    #[arg(long, env = "FLAMBEAU_LISTEN", default_value = "127.0.0.1:7070")]
    pub listen: SocketAddr,
    /// Begin with a checkpoint: a run directory (its newest one), a checkpoint's folder, or the URL of
    /// either. Ignored if the run directory already has a run to resume.
    #[arg(long, env = "FLAMBEAU_RESTORE", value_name = "RUN_DIR|CHECKPOINT|URL")]
    pub restore: Option<String>,
    /// Resume a failed job of the run directory from its newest checkpoint. A job that failed because no
    /// worker could work is resumed without this.
    #[arg(long, env = "FLAMBEAU_RESUME_FAILED")]
    pub resume_failed: bool,
    /// Limits of connections.
    #[command(flatten)]
    pub connections: ConnectionSettings,
    /// The settings of all processes.
    #[command(flatten)]
    pub process: ProcessSettings,
    /// Overrides of the job file.
    #[command(flatten)]
    pub job: JobFlags,
}

/// The error with which the coordinator ended.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CoordinatorError {
    /// The job file cannot be read.
    #[error("cannot read the job file {path:?}: {error}")]
    JobFile {
        /// The path of the file.
        path: PathBuf,
        /// The system's error.
        error: std::io::Error,
    },
    /// The job makes no sense.
    #[error(transparent)]
    Job(#[from] JobError),
    /// The address cannot be listened on.
    #[error("cannot listen on {address}: {error}; give another --listen")]
    Listen {
        /// The address to listen on.
        address: SocketAddr,
        /// The system's error.
        error: std::io::Error,
    },
    /// The certificates or the token cannot be used.
    #[error(transparent)]
    Security(#[from] SecurityError),
    /// The run directory cannot be written.
    #[error("cannot write the run directory {dir:?}: {error}; give another --run-dir")]
    RunDir {
        /// The run directory.
        dir: PathBuf,
        /// The system's error.
        error: std::io::Error,
    },
    /// The state of an earlier process cannot be used.
    #[error(
        "the coordinator's state {path:?} cannot be used: {error}; is another coordinator at work there? Give another --run-dir, or go on from its checkpoints with --restore"
    )]
    State {
        /// The state's file.
        path: PathBuf,
        /// The error of the state.
        error: StateError,
    },
    /// The state cannot be written any more.
    #[error("the coordinator's state cannot be written; the log has the reason")]
    StateLost,
    /// The run directory belongs to another run.
    #[error("the run directory {dir:?} {what}")]
    OtherRun {
        /// The run directory.
        dir: PathBuf,
        /// The content of the run directory, and the remedy.
        what: String,
    },
    /// The checkpoints cannot be used.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The checkpoint to begin with does not fit.
    #[error("cannot begin with {location}: {what}")]
    Restore {
        /// The checkpoint.
        location: String,
        /// The reason why it does not fit.
        what: String,
    },
    /// The job failed.
    #[error("the job failed: {0}")]
    JobFailed(String),
    /// The gRPC server failed.
    #[error("the server has ended: {0}")]
    Transport(#[from] tonic::transport::Error),
}

impl daemon::process::Failure for CoordinatorError {}

impl Settings {
    /// Reads the job. Flags override the file, which overrides the defaults.
    ///
    /// # Errors
    /// If the file cannot be read or the job makes no sense.
    pub fn read_job(&self) -> Result<Job, CoordinatorError> {
        read_job(self.job_file.as_deref(), self.job.clone())
    }
}

/// Reads the job of a file, or takes the default job, and applies the flags.
///
/// # Errors
/// If the file cannot be read or the job makes no sense.
pub fn read_job(path: Option<&Path>, flags: JobFlags) -> Result<Job, CoordinatorError> {
    let file = path.map(|path| {
        let text = std::fs::read_to_string(path).map_err(|error| CoordinatorError::JobFile {
            path: path.to_owned(),
            error,
        })?;
        // The flags may supply what the file lacks, so both are validated together.
        Ok::<_, CoordinatorError>(Job::parse(&text)?)
    });
    Ok(flags.over(file.transpose()?)?)
}

/// Coordinates one job.
///
/// # Errors
/// See the variants of [`CoordinatorError`]; a failed job is one of them.
pub async fn run(settings: Settings, process: Process) -> Result<(), CoordinatorError> {
    process.security.for_listening()?;
    let mut job = settings.read_job()?;
    let listen = |error| CoordinatorError::Listen {
        address: settings.listen,
        error,
    };
    let listener = TcpListener::bind(settings.listen).await.map_err(listen)?;
    let address = listener.local_addr().map_err(listen)?;

    let default_dir = || PathBuf::from("runs").join(&job.name);
    let dir = job.run_dir.clone().unwrap_or_else(default_dir);
    let run_dir = |error| CoordinatorError::RunDir {
        dir: dir.clone(),
        error,
    };
    // Workers write there too, and may have another working directory.
    let dir = std::path::absolute(&dir).map_err(run_dir)?;
    tokio::fs::create_dir_all(&dir).await.map_err(run_dir)?;
    job.run_dir = Some(dir.clone());
    let path = dir.join(run_dir::STATE);
    let state = State::open(&path).map_err(|error| CoordinatorError::State { path, error })?;
    let host =
        hostname::get().map_or_else(|_| "?".into(), |host| host.to_string_lossy().into_owned());
    let wish = Wish {
        checkpoints: open_store(&job, &dir)?,
        restore: settings.restore.as_deref().map(Restore::At),
        resume_failed: settings.resume_failed,
        run: format!("{:016x}", rand::random::<u64>()),
        here: format!("{host} ({address})"),
    };
    // May take a while, if it watches whether another run is alive.
    let begun = begin(job, &dir, &state, wish);
    let Some(begun) = process.shutdown.run_until_cancelled(begun).await else {
        return Ok(());
    };
    let begun = begun?;
    let run = Run {
        again: begun.again,
        keeping: begun.keeping,
        cluster: begun.cluster,
        state,
        dir: dir.clone(),
        offload: Offload::Threads,
    };
    process.announce(Some(Listen::Tcp(address)));
    process.readiness.set(true);
    tracing::info!(%address, run_dir = %dir.display(), again = run.again, "coordinating");
    let connections = Connections::new(Port::Coordinator, settings.connections.limits());
    let incoming = Box::pin(connections.incoming(listener));
    if process.security.is_listening_encrypted() {
        let incoming = Box::pin(process.security.secured(incoming));
        run.serve(incoming, &process).await
    } else {
        run.serve(incoming, &process).await
    }
}

/// A job to be served.
struct Run {
    cluster: Cluster,
    keeping: Option<Keeping>,
    state: State,
    dir: PathBuf,
    again: bool,
    offload: Offload,
}

impl Run {
    async fn serve<S>(
        self,
        incoming: impl Stream<Item = std::io::Result<S>> + Send + 'static,
        process: &Process,
    ) -> Result<(), CoordinatorError>
    where
        S: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
    {
        let dir = self.dir;
        let had_ended = self.cluster.ended();
        let run_dir_error = |error| CoordinatorError::RunDir {
            dir: dir.clone(),
            error,
        };
        let recorder = Recorder::open(&dir, self.cluster.job(), self.again);
        let recorder = recorder.await.map_err(run_dir_error)?;
        let shared = Shared::new(self.cluster, recorder.lines(), self.state, self.offload);

        let stop = CancellationToken::new();
        let service =
            Service::new(Arc::clone(&shared), stop.clone()).with_security(process.security.clone());
        let server = transport::server()
            .max_concurrent_streams(MOST_STREAMS)
            .timeout(MOST_TIME)
            .add_service(Counted(InterceptedService::new(
                CoordinatorServer::new(service),
                admit(process.security.clone()),
            )))
            .serve_with_incoming_shutdown(incoming, stop.clone().cancelled_owned());
        let server = tokio::spawn(server);
        let beside = |work: BoxFuture| tokio::spawn(stop.clone().run_until_cancelled_owned(work));
        let mut others = vec![beside(Box::pin(tick(Arc::clone(&shared))))];
        let (mut owned, mut owned_by) = (None, None);
        if let Some(Keeping { store, keep, claim }) = self.keeping {
            let store_tasks = run_store_tasks(Arc::clone(&shared), store.clone(), keep);
            others.push(beside(Box::pin(store_tasks)));
            if !had_ended {
                let claim = Arc::new(Mutex::new(claim));
                owned = Some((store.clone(), Arc::clone(&claim)));
                let claims = keep_claim(Arc::clone(&shared), store, claim, stop.clone());
                owned_by = Some(tokio::spawn(claims));
            }
        }

        let until_ended = async {
            tokio::select! {
                biased;
                () = until_ended(&shared) => Ok(()),
                () = shared.broken() => Err(CoordinatorError::StateLost),
            }
        };
        let ended = process.shutdown.run_until_cancelled(until_ended).await;
        let mut error = String::new();
        if let Some(ended) = ended {
            ended?;
            shared.release_reserve();
            let summary = shared.look(|cluster, now| cluster.summary(now));
            error.clone_from(&summary.error);
            // If the job had ended before this process started, the existing summary knows more.
            if !(had_ended && dir.join(run_dir::SUMMARY).exists()) {
                let written = recorder.summarise(&summary).await;
                written.map_err(run_dir_error)?;
            }
            // A job that failed without workers is resumed by the next start, so this process must end.
            if !shared.look(|cluster, _| cluster.failed_without_workers()) {
                process.linger().await;
            }
            if had_ended {
                // Processes that are restarted together with it learn that the job has ended.
                let _ = tokio::time::timeout(AFTERLIFE, process.shutdown.cancelled()).await;
            }
            let all_left = until(&shared, |cluster| !cluster.anyone_there());
            let _ = tokio::time::timeout(FAREWELL, all_left).await;
        }
        stop.cancel();
        // Connections that clients do not close are dropped.
        let served = tokio::time::timeout(DRAIN, server).await;
        for other in others {
            let _ = other.await;
        }
        if let Some(claims) = owned_by {
            // The store may not answer.
            let _ = tokio::time::timeout(DRAIN, claims).await;
        }
        if let Some((store, claim)) = owned {
            let claim = claim.lock().clone();
            release(&store, &claim).await;
        }
        let _ = tokio::time::timeout(DRAIN, shared.keep_all()).await;
        drop(shared);
        let _ = tokio::time::timeout(DRAIN, recorder.close()).await;
        if let Ok(Ok(outcome)) = served {
            outcome?;
        }
        if error.is_empty() {
            Ok(())
        } else {
            Err(CoordinatorError::JobFailed(error))
        }
    }
}

/// Releases the location of the checkpoints, so that the next run there need not wait.
pub(crate) async fn release(store: &Store, claim: &Claim) {
    let released = async {
        if store.owner().await?.as_ref() == Some(claim) {
            store.release(claim).await?;
        }
        Ok::<_, CheckpointError>(())
    };
    match tokio::time::timeout(DRAIN, released).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::warn!("cannot release the location of the checkpoints: {error}"),
        Err(_) => tracing::warn!(
            "cannot release the location of the checkpoints: the store does not answer"
        ),
    }
}

/// Returns an interceptor that refuses calls without the job's token.
fn admit(security: Security) -> impl Fn(Request<()>) -> Result<Request<()>, Status> + Clone {
    move |request| {
        security.check_token(request.metadata().as_ref(), request.extensions())?;
        // The connection may stay longer, because the message may take a while to arrive.
        Caller::of(request.extensions())
            .into_iter()
            .for_each(Caller::called);
        Ok(request)
    }
}

/// Waits for the end of the job, and then a little for the servers' last reports.
pub(crate) async fn until_ended(shared: &Shared) {
    until(shared, Cluster::ended).await;
    let reported = until(shared, Cluster::all_shards_reported);
    if tokio::time::timeout(FAREWELL, reported).await.is_err() {
        tracing::warn!("not all parameter servers have reported; the summary lacks their part");
    }
}

pub(crate) async fn until(shared: &Shared, holds: impl Fn(&Cluster) -> bool) {
    while !shared.look(|cluster, _| holds(cluster)) {
        shared.changed().await;
    }
}

/// Ends leases, persists changes and updates the gauges, again and again.
pub(crate) async fn tick(shared: Arc<Shared>) {
    let mut ticks = tokio::time::interval(TICK);
    let gauges = Gauges::new();
    loop {
        ticks.tick().await;
        shared.ask(|cluster, now| cluster.tick(now)).await;
        shared.keep_all().await;
        shared.look(|cluster, now| gauges.show(cluster, now));
    }
}
