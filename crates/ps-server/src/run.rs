//! The process: registers, follows views, serves, reports, and ends when the job does.

use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use daemon::Ready;
use daemon::membership::{Coordinator, Membership, MembershipError, Registration};
use daemon::process::Process;
use daemon::settings::{AfterJob, MemberSettings, ProcessSettings};
use shared_proto::blocks::ShardMap;
use shared_proto::ids::{Role, Task};
use shared_proto::refusal::Refusal;
use shared_proto::view::{JobPhase, View};
use shared_proto::wire;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::service::Service;
use crate::shard::Shard;
use crate::threads::SessionThreads;

/// How often counters are handed in.
const REPORT_EVERY: Duration = Duration::from_secs(1);

/// How long sessions may take to end.
const DRAIN: Duration = Duration::from_secs(2);

/// What a parameter server can be told.
#[derive(Clone, Debug, clap::Args)]
pub struct Settings {
    /// Listen here for workers; port 0 takes a free one.
    #[arg(long, env = "FLAMBEAU_LISTEN", default_value = "127.0.0.1:0")]
    pub listen: SocketAddr,
    /// Where workers reach this server, as host:port. Default: the address it listens on, or where
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
        address: SocketAddr,
        /// What the system says.
        error: std::io::Error,
    },
    /// The way to the coordinator cannot be found.
    #[error(
        "cannot find the address by which the coordinator at {coordinator} is reached: {error}; give --advertise"
    )]
    Advertise {
        /// The coordinator's address.
        coordinator: String,
        /// What the system says.
        error: std::io::Error,
    },
    /// The cluster does not want it, or cannot be reached.
    #[error(transparent)]
    Membership(#[from] MembershipError),
    /// The coordinator's shard map makes no sense.
    #[error("the shard map cannot be read: {0}")]
    ShardMap(#[from] Refusal),
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
        address: settings.listen,
        error,
    };
    let listener = TcpListener::bind(settings.listen).await.map_err(listen)?;
    let address = listener.local_addr().map_err(listen)?;
    Ready {
        address: Some(address),
        metrics: process.metrics,
    }
    .announce();

    let member = &settings.member;
    let patience = Duration::from_secs(member.patience_seconds);
    let coordinator = Coordinator::at(&member.coordinator, patience)?;
    let advertised = advertised(&settings, address).await?;
    let registration = Registration {
        role: Role::Ps,
        identity: member.identity(settings.listen.port()),
        metrics_address: metrics_address(&advertised, process.metrics),
        address: advertised.clone(),
    };
    let join = Membership::join(coordinator, registration);
    let Some(membership) = process.shutdown.run_until_cancelled(join).await else {
        return Ok(());
    };
    let membership = membership?;

    let stop = CancellationToken::new();
    let shard = Arc::new(Shard::new(&membership.job));
    let sessions = TaskTracker::new();
    let service = Service {
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
    let _ = accepting.await;
    outcome.unwrap_or(Ok(()))
}

/// Follows the coordinator until the job's end.
async fn serve(
    shard: &Shard,
    membership: &Membership,
    address: &str,
    stop: &CancellationToken,
) -> Result<(), PsError> {
    let mut views = membership.views(stop.clone());
    let mut reports = tokio::time::interval(REPORT_EVERY);
    let mut ended = false;
    loop {
        tokio::select! {
            view = next_view(&mut views) => {
                let ended = view.ended();
                let failed = (view.phase == JobPhase::Failed).then(|| view.error.clone());
                catch_up(shard, membership, address, view).await?;
                if ended {
                    report(shard, membership, true).await;
                    return failed.map_or(Ok(()), |error| Err(MembershipError::JobFailed(error).into()));
                }
            }
            _ = reports.tick() => report(shard, membership, false).await,
            lost = membership.lost(), if !ended => match lost {
                // The view of it is on its way; it is followed, and reported on, first.
                MembershipError::JobFailed(_) => ended = true,
                lost => return Err(lost.into()),
            },
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
    shard: &Shard,
    membership: &Membership,
    address: &str,
    view: View,
) -> Result<(), PsError> {
    let mut map = None;
    if view.epoch > shard.followed().epoch() {
        let reply = membership
            .coordinator
            .call(|mut c| async move { c.get_shard_map(wire::ShardMapRequest {}).await })
            .await?;
        let fresh = ShardMap::try_from(reply)?;
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
    shard
        .follow(view, map)
        .map_err(|missing| PsError::Diverged {
            step,
            task: missing.0,
        })
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

/// The address by which workers reach this server.
async fn advertised(settings: &Settings, listening: SocketAddr) -> Result<String, PsError> {
    if let Some(advertise) = &settings.advertise {
        return Ok(advertise.clone());
    }
    if !listening.ip().is_unspecified() {
        return Ok(listening.to_string());
    }
    let coordinator = &settings.member.coordinator;
    let ip = local_ip(coordinator)
        .await
        .map_err(|error| PsError::Advertise {
            coordinator: coordinator.clone(),
            error,
        })?;
    Ok(SocketAddr::new(ip, listening.port()).to_string())
}

/// The address of the interface through which `peer` is reached. Nothing is sent.
async fn local_ip(peer: &str) -> std::io::Result<IpAddr> {
    let socket = tokio::net::UdpSocket::bind("0.0.0.0:0").await?;
    socket.connect(peer).await?;
    Ok(socket.local_addr()?.ip())
}

fn metrics_address(advertised: &str, metrics: SocketAddr) -> String {
    match advertised.rsplit_once(':') {
        Some((host, _)) if metrics.ip().is_unspecified() => format!("{host}:{}", metrics.port()),
        _ => metrics.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_are_where_the_server_is() {
        let any: SocketAddr = "0.0.0.0:9".parse().unwrap();
        let one: SocketAddr = "127.0.0.1:9".parse().unwrap();
        assert_eq!(metrics_address("ps-1.cluster:7", any), "ps-1.cluster:9");
        assert_eq!(metrics_address("ps-1.cluster:7", one), "127.0.0.1:9");
    }

    #[tokio::test]
    async fn the_way_to_the_coordinator_shows_the_address() {
        let ip = local_ip("127.0.0.1:9").await.unwrap();
        assert!(ip.is_loopback());
    }
}
