//! The process: registers, follows views, serves, reports, and ends when the job does.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use checkpoint::CheckpointError;
use daemon::Offload;
use daemon::membership::{Coordinator, Membership, MembershipError, Registration};
use daemon::process::Process;
use daemon::settings::{AfterJob, ConnectionSettings, MemberSettings, ProcessSettings};
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

/// How long sessions may take to end.
const DRAIN: Duration = Duration::from_secs(2);

/// What a parameter server can be told.
#[derive(Clone, Debug, clap::Args)]
pub struct Settings {
    /// Listen here for workers: IP:PORT, where port 0 takes a free one, or unix:PATH, a socket file
    /// for workers on this host.
    #[arg(long, env = "FLAMBEAU_LISTEN", default_value = "127.0.0.1:0")]
    pub listen: Listen,
    /// Where workers reach this server, as host:port or unix:PATH. Default: the address it listens on, or where
    /// that is 0.0.0.0, the one by which it reaches the coordinator.
    #[arg(long, env = "FLAMBEAU_ADVERTISE")]
    pub advertise: Option<String>,
    /// Threads that serve workers. Default: as many as there are cores.
    #[arg(long, env = "FLAMBEAU_THREADS")]
    pub threads: Option<NonZeroUsize>,
    /// How it finds its cluster.
    #[command(flatten)]
    pub member: MemberSettings,
    /// How many may be connected.
    #[command(flatten)]
    pub connections: ConnectionSettings,
    /// What all processes can be told.
    #[command(flatten)]
    pub process: ProcessSettings,
}

impl Settings {
    fn threads(&self) -> usize {
        let cores = std::thread::available_parallelism();
        self.threads.or(cores.ok()).map_or(1, NonZeroUsize::get)
    }
}

/// Why a parameter server ended otherwise than well.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PsError {
    /// The address cannot be had.
    #[error("cannot listen on {address}: {error}; give another --listen")]
    Listen {
        /// Where it should listen.
        address: Listen,
        /// What the system says.
        error: std::io::Error,
    },
    /// What it shows to others and demands of them cannot be used.
    #[error(transparent)]
    Security(#[from] SecurityError),
    /// The cluster does not want it, or cannot be reached.
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
        /// Where it looked.
        location: String,
    },
    /// A step was committed with a gradient that is not here.
    #[error(
        "step {step} was committed with a gradient of {task} that this shard does not have; its weights are not the job's any more"
    )]
    Diverged {
        /// The step.
        step: u64,
        /// Whose gradient is missing.
        task: Task,
    },
}

impl daemon::process::Failure for PsError {}

/// Serves one shard of a job.
///
/// # Errors
/// As the variants of [`PsError`] say.
pub async fn run(settings: Settings, process: Process) -> Result<(), PsError> {
    process.security.for_listening()?;
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
    };
    let join = Membership::join(coordinator.clone(), registration.clone());
    let Some(membership) = process.shutdown.run_until_cancelled(join).await else {
        return Ok(());
    };
    let membership = membership?;
    process.announce(Some(address));

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
            // What the shard has taken is saved before its process ends.
            None => {
                let within = process.shutdown_within.saturating_sub(2 * DRAIN);
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
    if matches!(outcome, Some(Ok(()))) && process.after_job == AfterJob::Wait {
        // Whatever it still held, nobody waits for it.
        process.readiness.set(true);
        process.linger().await;
    }
    stop.cancel();
    sessions.close();
    let _ = tokio::time::timeout(DRAIN, sessions.wait()).await;
    if let Some(membership) = place {
        membership.leave(None).await;
    }
    let _ = tokio::time::timeout(DRAIN, accepting).await;
    outcome.unwrap_or(Ok(()))
}
