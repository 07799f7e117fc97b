//! The process: registers, follows views, serves, reports, and ends when the job does.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use daemon::Ready;
use daemon::membership::{Coordinator, Membership, MembershipError, Registration};
use daemon::process::Process;
use daemon::settings::{AfterJob, MemberSettings, ProcessSettings};
use shared_proto::blocks::ShardMap;
use shared_proto::ids::{Epoch, Role, Task};
use shared_proto::refusal::Refusal;
use shared_proto::transport::Listen;
use shared_proto::view::{JobPhase, View};
use shared_proto::wire;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::block::NotStaged;
use crate::listener::Listener;
use crate::service::Sessions;
use crate::shard::Shard;
use crate::threads::SessionThreads;

/// How often counters are handed in.
const REPORT_EVERY: Duration = Duration::from_secs(1);

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
    /// The cluster does not want it, or cannot be reached.
    #[error(transparent)]
    Membership(#[from] MembershipError),
    /// The coordinator's shard map makes no sense.
    #[error("the shard map cannot be read: {0}")]
    ShardMap(#[from] Refusal),
    /// A commit has panicked; the log has the message.
    #[error("applying a commit has panicked; this server's log has the message")]
    Panicked,
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

/// Serves one shard of a job.
///
/// # Errors
/// As the variants of [`PsError`] say.
pub async fn run(settings: Settings, process: Process) -> Result<(), PsError> {
    let listen = |error| PsError::Listen {
        address: settings.listen.clone(),
        error,
    };
    let listener = Listener::bind(&settings.listen).await.map_err(listen)?;
    let address = listener.address().map_err(listen)?;

    let member = &settings.member;
    let patience = Duration::from_secs(member.patience_seconds);
    let coordinator = Coordinator::at(&member.coordinator, patience)?;
    let advertised = match (&settings.advertise, &address) {
        (Some(advertise), _) => advertise.clone(),
        (None, Listen::Tcp(address)) => coordinator.reachable(*address).await?.to_string(),
        (None, Listen::Unix(_)) => address.to_string(),
    };
    let registration = Registration {
        role: Role::Ps,
        identity: member.identity(&settings.listen),
        metrics_address: coordinator.reachable(process.metrics).await?.to_string(),
        address: advertised.clone(),
    };
    let join = Membership::join(coordinator, registration);
    let Some(membership) = process.shutdown.run_until_cancelled(join).await else {
        return Ok(());
    };
    let membership = membership?;
    Ready {
        address: Some(address),
        metrics: process.metrics,
    }
    .announce();

    let stop = CancellationToken::new();
    let shard = Arc::new(Shard::new(&membership.job));
    let sessions = TaskTracker::new();
    let service = Sessions {
        shard: Arc::clone(&shard),
        sessions: sessions.clone(),
        shutdown: stop.clone(),
    };
    let threads = SessionThreads::start(settings.threads(), &service, &stop).map_err(listen)?;
    let accepting = tokio::spawn(threads.accept(listener, stop.clone()));

    let serve = serve(&shard, &membership, &advertised, &stop);
    let outcome = process.shutdown.run_until_cancelled(serve).await;
    if matches!(outcome, Some(Ok(()))) && process.after_job == AfterJob::Wait {
        process.linger().await;
    }
    stop.cancel();
    sessions.close();
    let _ = tokio::time::timeout(DRAIN, sessions.wait()).await;
    membership.leave(None).await;
    let _ = tokio::time::timeout(DRAIN, accepting).await;
    outcome.unwrap_or(Ok(()))
}

/// Follows the coordinator until the job's end.
async fn serve(
    shard: &Arc<Shard>,
    membership: &Membership,
    address: &str,
    stop: &CancellationToken,
) -> Result<(), PsError> {
    let mut views = membership.views(stop.clone());
    let mut reports = tokio::time::interval(REPORT_EVERY);
    let mut looked_up = Epoch(0);
    loop {
        tokio::select! {
            view = next_view(&mut views) => {
                let (phase, error) = (view.phase, view.error.clone());
                catch_up(shard, membership, address, &mut looked_up, view).await?;
                match phase {
                    JobPhase::Done => {
                        report(shard, membership, true).await;
                        return Ok(());
                    }
                    JobPhase::Failed => {
                        report(shard, membership, true).await;
                        return Err(MembershipError::JobFailed(error).into());
                    }
                    _ => {}
                }
            }
            _ = reports.tick() => report(shard, membership, false).await,
            lost = membership.lost() => {
                report(shard, membership, true).await;
                return Err(lost.into());
            }
        }
    }
}

async fn next_view(views: &mut watch::Receiver<View>) -> View {
    if views.changed().await.is_err() {
        // The stream of views ends only when this process does.
        std::future::pending::<()>().await;
    }
    views.borrow_and_update().clone()
}

async fn catch_up(
    shard: &Arc<Shard>,
    membership: &Membership,
    address: &str,
    looked_up: &mut Epoch,
    view: View,
) -> Result<(), PsError> {
    let mut map = None;
    if view.epoch > *looked_up {
        let reply = membership
            .coordinator
            .call(|mut c| async move { c.get_shard_map(wire::ShardMapRequest {}).await })
            .await?;
        let fresh = ShardMap::try_from(reply)?;
        *looked_up = fresh.epoch;
        let own = fresh.addresses.iter().position(|a| a == address);
        match own {
            Some(own) => {
                tracing::info!(shard = own, epoch = fresh.epoch.0, "took a shard");
                map = Some((own as u32, fresh));
            }
            None => tracing::info!(epoch = fresh.epoch.0, "holds no shard; stays as a spare"),
        }
    }
    let step = view.commit.as_ref().map_or(0, |commit| commit.step.0);
    let diverged = |missing: NotStaged| PsError::Diverged {
        step,
        task: missing.0,
    };
    if !shard.has_work_for(&view) {
        return shard.follow(view, map).map_err(diverged);
    }
    // A commit updates every block: heartbeats go on beside it.
    let shard = Arc::clone(shard);
    let following = tokio::task::spawn_blocking(move || shard.follow(view, map));
    following
        .await
        .map_err(|_| PsError::Panicked)?
        .map_err(diverged)
}

async fn report(shard: &Shard, membership: &Membership, last: bool) {
    let Some(number) = shard.followed().shard() else {
        return;
    };
    let report = shard.counters.report(number, last);
    let request = wire::ReportRequest {
        origin: Some(membership.origin().into()),
        report: Some(wire::report_request::Report::Shard(report)),
    };
    let sent = membership.coordinator.call(|mut c| {
        let request = request.clone();
        async move { c.report(request).await }
    });
    // The next report says it again; a coordinator that is gone is found out by the lease.
    if let Err(error) = tokio::time::timeout(REPORT_EVERY, sent)
        .await
        .unwrap_or(Ok(wire::ReportReply {}))
    {
        tracing::debug!(%error, "could not report");
    }
}
