//! The process: registers, follows views, serves, reports, and ends when the job does.

use std::num::NonZeroUsize;
use std::sync::{Arc, Once};
use std::time::Duration;

use checkpoint::CheckpointError;
use daemon::Offload;
use daemon::membership::{Coordinator, Membership, MembershipError, Registration};
use daemon::process::Process;
use daemon::settings::{ConnectionSettings, MemberSettings, ProcessSettings};
use shared_proto::connections::{Connections, Port};
use shared_proto::ids::{Role, Task};
use shared_proto::refusal::Refusal;
use shared_proto::security::SecurityError;
use shared_proto::transport::Listen;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::follow::Follower;
use crate::listener::Listener;
use crate::service::Sessions;
use crate::shard::Shard;
use crate::threads::SessionThreads;

/// The time in which sessions must end.
const DRAIN: Duration = Duration::from_secs(2);

/// The settings of a parameter server.
#[derive(Clone, Debug, clap::Args)]
pub struct Settings {
    /// Listen here for workers: IP:PORT, where port 0 takes a free one, or unix:PATH, a socket file
    /// for workers on this host.
    #[arg(long, env = "FLAMBEAU_LISTEN", default_value = "127.0.0.1:0")]
    pub listen: Listen,
    /// The address by which workers reach this server, as host:port or unix:PATH. Default: the address it listens
    /// on, or if that is 0.0.0.0, the one by which it reaches the coordinator.
    #[arg(long, env = "FLAMBEAU_ADVERTISE")]
    pub advertise: Option<String>,
    /// Threads that serve workers. Default: as many as there are cores.
    #[arg(long, env = "FLAMBEAU_THREADS")]
    pub threads: Option<NonZeroUsize>,
    /// Memory for weights, optimizer state and staged gradients, in MiB: a model that needs more is refused.
    /// Default: nine tenths of the memory that the container or the machine has.
    #[arg(long, env = "FLAMBEAU_CAPACITY_MEBIBYTES")]
    pub capacity_mebibytes: Option<u64>,
    /// The settings by which it finds its cluster.
    #[command(flatten)]
    pub member: MemberSettings,
    /// The limits on connections.
    #[command(flatten)]
    pub connections: ConnectionSettings,
    /// The settings of every process.
    #[command(flatten)]
    pub process: ProcessSettings,
}

impl Settings {
    fn threads(&self) -> usize {
        let cores = std::thread::available_parallelism();
        self.threads.or(cores.ok()).map_or(1, NonZeroUsize::get)
    }

    fn capacity_bytes(&self) -> u64 {
        match self.capacity_mebibytes {
            Some(mebibytes) => mebibytes.saturating_mul(1 << 20),
            None => daemon::memory_limit() / 10 * 9,
        }
    }
}

/// An error that ends a parameter server.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PsError {
    /// The server cannot listen on its address.
    #[error("cannot listen on {address}: {error}; give another --listen")]
    Listen {
        /// The address.
        address: Listen,
        /// The system's error.
        error: std::io::Error,
    },
    /// The files for TLS or the token cannot be used.
    #[error(transparent)]
    Security(#[from] SecurityError),
    /// The coordinator refuses the server, or cannot be reached.
    #[error(transparent)]
    Membership(#[from] MembershipError),
    /// The coordinator's shard map makes no sense.
    #[error("the shard map cannot be read: {0}")]
    ShardMap(#[from] Refusal),
    /// The store of checkpoints cannot be used.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The store of checkpoints is not the coordinator's.
    #[error(
        "this server does not see the checkpoints of the coordinator in {location}; set checkpoint.location to a folder that all of them share, or to an URL as in s3://bucket/folder, or checkpoint.enabled to false"
    )]
    OtherStore {
        /// The store that the server sees.
        location: String,
    },
    /// A step was committed with a gradient that this shard does not have.
    #[error(
        "step {step} was committed with a gradient of {task} that this shard does not have; its weights are not the job's any more"
    )]
    Diverged {
        /// The step.
        step: u64,
        /// The worker that the missing gradient is from.
        task: Task,
    },
}

impl daemon::process::Failure for PsError {}

/// Serves one shard of a job, and of the jobs after it if processes stay.
///
/// # Errors
/// See the variants of [`PsError`].
pub async fn run(settings: Settings, process: Process) -> Result<(), PsError> {
    process.security.for_listening()?;
    let announced = Once::new();
    while serve_job(&settings, &process, &announced).await? {}
    Ok(())
}

/// Serves one shard of the coordinator's job. Returns whether another job follows.
async fn serve_job(
    settings: &Settings,
    process: &Process,
    announced: &Once,
) -> Result<bool, PsError> {
    let listen = |error| PsError::Listen {
        address: settings.listen.clone(),
        error,
    };
    let listener = Listener::bind(&settings.listen).await.map_err(listen)?;
    let address = listener.address().map_err(listen)?;

    let member = &settings.member;
    let patience = Duration::from_secs(member.patience_seconds);
    let coordinator = Coordinator::at(&member.coordinator, patience, process.security.clone())?;
    let advertise = settings.advertise.clone();
    let registration = Registration {
        role: Role::Ps,
        identity: member.identity(&settings.listen),
        address: advertise.unwrap_or_else(|| address.to_string()),
        metrics_address: process.metrics.to_string(),
        holding: None,
        capacity_bytes: settings.capacity_bytes(),
    };
    let join = Membership::join(coordinator.clone(), registration.clone());
    let Some(membership) = process.shutdown.run_until_cancelled(join).await else {
        return Ok(false);
    };
    let membership = membership?;
    announced.call_once(|| process.announce(Some(address)));

    let stop = CancellationToken::new();
    let shard = Arc::new(Shard::new(&membership.job));
    let sessions = TaskTracker::new();
    let service = Sessions {
        shard: Arc::clone(&shard),
        sessions: sessions.clone(),
        shutdown: stop.clone(),
        security: process.security.clone(),
        greeted: Arc::default(),
    };
    let threads = SessionThreads::start(settings.threads(), &service, &stop).map_err(listen)?;
    let connections = Connections::new(Port::Data, settings.connections.limits());
    let accepting = tokio::spawn(threads.accept(listener, connections, stop.clone()));

    let follower = Follower {
        shard,
        coordinator,
        registration,
        offload: Offload::Threads,
        open: Arc::new(checkpoint::Store::open),
        readiness: process.readiness.clone(),
        drain: process.shutdown.clone(),
    };
    let mut place = Some(membership);
    let outcome = {
        let mut serve = std::pin::pin!(follower.serve(&mut place, &stop));
        let until_told = process.shutdown.run_until_cancelled(serve.as_mut()).await;
        match until_told {
            Some(outcome) => Some(outcome),
            // A checkpoint saves the shard's updates before the process ends.
            None => {
                let within = process.shutdown_within.saturating_sub(3 * DRAIN);
                let saved = tokio::time::timeout(within, serve).await;
                if saved.is_err() {
                    tracing::warn!(
                        ?within,
                        "stopping without a checkpoint: it takes too long; see --shutdown-seconds"
                    );
                }
                saved.ok().filter(Result::is_err)
            }
        }
    };
    let mut next_job = false;
    if let (Some(Ok(())), Some(membership)) = (&outcome, &place) {
        // A rolling upgrade must not wait for a server after the end of its job.
        process.readiness.set(true);
        next_job = process.next_job(membership).await;
    }
    stop.cancel();
    sessions.close();
    let _ = tokio::time::timeout(DRAIN, sessions.wait()).await;
    if let Some(membership) = place.filter(|_| !next_job) {
        membership.leave(None).await;
    }
    let _ = tokio::time::timeout(DRAIN, accepting).await;
    outcome.unwrap_or(Ok(())).map(|()| next_job)
}
