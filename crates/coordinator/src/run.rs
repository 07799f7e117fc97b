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

use crate::begin::{Keeping, Wish, begin};
use crate::callers::Counted;
use crate::cluster::Cluster;
use crate::gauges::Gauges;
use crate::keeper::{keep_claim, run_errands};
use crate::record::Recorder;
use crate::service::Service;
use crate::shared::Shared;
use crate::state::{State, StateError};

type BoxFuture = std::pin::Pin<Box<dyn Future<Output = ()> + Send>>;

/// How long the servers' last counters are waited for, and then the members' good-byes.
pub(crate) const FAREWELL: Duration = Duration::from_secs(5);

/// How long a coordinator stays that is started again after the end of its job.
const AFTERLIFE: Duration = Duration::from_secs(20);

/// How long connections may take to end.
const DRAIN: Duration = Duration::from_secs(2);

/// Calls of one connection at a time. A member makes a few.
const MOST_STREAMS: u32 = 64;

/// How long a call may take to begin with its answer: one whose request never comes whole ends then.
const MOST_TIME: Duration = Duration::from_secs(30);

/// How often leases are looked at.
const TICK: Duration = Duration::from_millis(100);

/// What the coordinator can be told.
#[derive(Clone, Debug, clap::Args)]
pub struct Settings {
    /// The job file; `flambeau job init` writes one. Default: digits, MLP.
    #[arg(env = "FLAMBEAU_JOB", value_name = "JOB.toml")]
    pub job_file: Option<PathBuf>,
    /// Listen here; the address that all others are given.
    #[arg(long, env = "FLAMBEAU_LISTEN", default_value = "127.0.0.1:7070")]
    pub listen: SocketAddr,
    /// Begin with a checkpoint: a run directory (its newest one), a checkpoint's folder, or the URL of
    /// either. A coordinator that goes on with a run of its own does so without.
    #[arg(long, env = "FLAMBEAU_RESTORE", value_name = "RUN_DIR|CHECKPOINT|URL")]
    pub restore: Option<String>,
    /// Go on with the job of the run directory although it has failed: from its newest checkpoint.
    /// A job that failed because no worker could work is taken up without this.
    #[arg(long, env = "FLAMBEAU_TAKE_UP")]
    pub take_up: bool,
    /// How many may be connected.
    #[command(flatten)]
    pub connections: ConnectionSettings,
    /// What all processes can be told.
    #[command(flatten)]
    pub process: ProcessSettings,
    /// Overrides of the job file.
    #[command(flatten)]
    pub job: JobFlags,
}

/// Why the coordinator ended otherwise than well.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CoordinatorError {
    /// The job file cannot be read.
    #[error("cannot read the job file {path:?}: {error}")]
    JobFile {
        /// Its path.
        path: PathBuf,
        /// What the system says.
        error: std::io::Error,
    },
    /// The job makes no sense.
    #[error(transparent)]
    Job(#[from] JobError),
    /// The address cannot be had.
    #[error("cannot listen on {address}: {error}; give another --listen")]
    Listen {
        /// Where it should listen.
        address: SocketAddr,
        /// What the system says.
        error: std::io::Error,
    },
    /// What it shows to others and demands of them cannot be used.
    #[error(transparent)]
    Security(#[from] SecurityError),
    /// The run directory cannot be written.
    #[error("cannot write the run directory {dir:?}: {error}; give another --run-dir")]
    RunDir {
        /// Its path.
        dir: PathBuf,
        /// What the system says.
        error: std::io::Error,
    },
    /// What was kept of an earlier process cannot be used.
    #[error(
        "the coordinator's state {path:?} cannot be used: {error}; is another coordinator at work there? Give another --run-dir, or go on from its checkpoints with --restore"
    )]
    State {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it.
        error: StateError,
    },
    /// The state cannot be written any more.
    #[error("the coordinator's state cannot be written; the log has the reason")]
    StateLost,
    /// The run directory is another run's.
    #[error("the run directory {dir:?} {what}")]
    OtherRun {
        /// Its path.
        dir: PathBuf,
        /// What it is, and what to do.
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
        /// Why not.
        what: String,
    },
    /// The job failed.
    #[error("the job failed: {0}")]
    JobFailed(String),
    /// The server broke.
    #[error("the server has ended: {0}")]
    Transport(#[from] tonic::transport::Error),
}

impl daemon::process::Failure for CoordinatorError {}

impl Settings {
    /// The job: flags over file over defaults.
    ///
    /// # Errors
    /// If the file cannot be read or the job makes no sense.
    pub fn read_job(&self) -> Result<Job, CoordinatorError> {
        read_job(self.job_file.as_deref(), self.job.clone())
    }
}

/// The job of a file (or the default job) with flags put over it.
///
/// # Errors
/// If the file cannot be read or the job makes no sense.
pub fn read_job(path: Option<&Path>, flags: JobFlags) -> Result<Job, CoordinatorError> {
    let file = path.map(|path| {
        let text = std::fs::read_to_string(path).map_err(|error| CoordinatorError::JobFile {
            path: path.to_owned(),
            error,
        })?;
        // The flags may add what makes the file valid, so it is checked with them.
        Ok::<_, CoordinatorError>(Job::parse(&text)?)
    });
    Ok(flags.over(file.transpose()?)?)
}

/// Coordinates one job.
///
/// # Errors
/// As the variants of [`CoordinatorError`] say; a job that failed is one of them.
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
    // Workers write there too; on this machine they may have been started anywhere.
    let dir = std::path::absolute(&dir).map_err(run_dir)?;
    tokio::fs::create_dir_all(&dir).await.map_err(run_dir)?;
    job.run_dir = Some(dir.clone());
    let path = dir.join(run_dir::STATE);
    let state = State::open(&path).map_err(|error| CoordinatorError::State { path, error })?;
    let host =
        hostname::get().map_or_else(|_| "?".into(), |host| host.to_string_lossy().into_owned());
    let wish = Wish {
        restore: settings.restore.as_deref(),
        take_up: settings.take_up,
        here: format!("{host} ({address})"),
    };
    // It may watch for a while whether another run is at work.
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

/// A job that is begun, or gone on with.
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
        let mut owned = None;
        if let Some(Keeping { store, keep, claim }) = self.keeping {
            let errands = run_errands(Arc::clone(&shared), store.clone(), keep);
            others.push(beside(Box::pin(errands)));
            if !had_ended {
                let claim = Arc::new(Mutex::new(claim));
                owned = Some((store.clone(), Arc::clone(&claim)));
                let claims = keep_claim(Arc::clone(&shared), store, claim);
                others.push(beside(Box::pin(claims)));
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
            // One that had ended before knows less of it than the summary that is there.
            if !(had_ended && dir.join(run_dir::SUMMARY).exists()) {
                let written = recorder.summarise(&summary).await;
                written.map_err(run_dir_error)?;
            }
            // Where workers are missing, the next start takes the job up: not by a process that stays.
            if !shared.look(|cluster, _| cluster.failed_without_workers()) {
                process.linger().await;
            }
            if had_ended {
                // Whoever is started again with it is to hear that there is nothing to do.
                let _ = tokio::time::timeout(AFTERLIFE, process.shutdown.cancelled()).await;
            }
            let all_left = until(&shared, |cluster| !cluster.anyone_there());
            let _ = tokio::time::timeout(FAREWELL, all_left).await;
        }
        stop.cancel();
        // Whoever does not hang up is hung up on.
        let served = tokio::time::timeout(DRAIN, server).await;
        for other in others {
            let _ = other.await;
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

/// Gives the place of the checkpoints up, so that the next run there need not wait.
async fn release(store: &Store, claim: &Claim) {
    let released = async {
        if store.owner().await?.as_ref() == Some(claim) {
            store.release(claim).await?;
        }
        Ok::<_, CheckpointError>(())
    };
    match tokio::time::timeout(DRAIN, released).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::warn!("the checkpoints' place is not given up: {error}"),
        Err(_) => tracing::warn!("the checkpoints' place is not given up: no answer"),
    }
}

/// Lets through what carries the job's token.
fn admit(security: Security) -> impl Fn(Request<()>) -> Result<Request<()>, Status> + Clone {
    move |request| {
        security.check_token(request.metadata().as_ref(), request.extensions())?;
        // Its message may take a while to come.
        Caller::of(request.extensions())
            .into_iter()
            .for_each(Caller::called);
        Ok(request)
    }
}

/// Waits for the end of the job, and then a little for the servers' last counters.
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

/// Lets leases end, and keeps the gauges.
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
