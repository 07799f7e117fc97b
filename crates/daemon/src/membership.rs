//! A process's place in the cluster: it registers, keeps its lease, follows views, leaves.

use std::future::Future;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use backon::{ExponentialBuilder, Retryable};
use metrics::gauge;
use shared_proto::ids::{Clock, Epoch, Generation, Origin, Role, Sequence, Task};
use shared_proto::job::{Job, JobError};
use shared_proto::refusal::{Reason, Refusal};
use shared_proto::security::{Credentials, Security, certificate_error, chain_of};
use shared_proto::transport::{CALL_TIMEOUT, Network, PROTOCOL_VERSION, SystemNetwork};
use shared_proto::view::{JobPhase, View};
use shared_proto::wire;
use shared_proto::wire::coordinator_client::CoordinatorClient;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::service::interceptor::InterceptedService;
use tonic::transport::Channel;
use tonic::{Code, Request, Response, Status};

/// Heartbeats in one lease.
const HEARTBEATS_PER_LEASE: u32 = 3;

/// How often a name that leads nowhere is looked up again.
const LOOK_UP_AGAIN: Duration = Duration::from_millis(500);

/// How long the coordinator may be silent before the log says so.
const ALARM: Duration = Duration::from_secs(1);

/// How long saying good-bye may take.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(1);

/// What can go wrong between a process and its coordinator; split by what the process does next.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MembershipError {
    /// Nothing was heard for longer than the process's patience: give up.
    #[error(
        "the coordinator at {address} could not be reached for {patience:?}: {reason}; is it running, is the address right, and do both or neither use --tls-ca?"
    )]
    Unreachable {
        /// Where it should be.
        address: String,
        /// How long it was tried.
        patience: Duration,
        /// What the last try came to.
        reason: String,
    },
    /// One of the two does not accept the other's certificate: give up.
    #[error(
        "this process and the coordinator at {address} do not trust each other: {reason}; look at --tls-ca, --tls-cert and --tls-key on both sides"
    )]
    Untrusted {
        /// Where it should be.
        address: String,
        /// What is wrong with the certificates.
        reason: String,
    },
    /// The coordinator takes this process for dead, or another has its identity: register again.
    #[error("no longer a member of the cluster: {0}")]
    Fenced(String),
    /// Another process has taken this one's identity: give up.
    #[error("superseded: {0}")]
    Superseded(String),
    /// The coordinator refused: give up.
    #[error("the coordinator refused: {0}")]
    Refused(String),
    /// The job has failed: give up.
    #[error("the job failed: {0}")]
    JobFailed(String),
    /// The job that the coordinator sent makes no sense here.
    #[error("the coordinator's job cannot be read: {0}")]
    Job(#[from] JobError),
}

impl MembershipError {
    /// Whether registering again may help.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Fenced(_))
    }
}

/// The coordinator, called with deadlines and, while it does not answer, again.
#[derive(Clone, Debug)]
pub struct Coordinator {
    address: String,
    client: Calls,
    patience: Duration,
    /// It has answered once: if it does not trust this process any more, that will be put right.
    has_answered: Arc<AtomicBool>,
}

/// Calls to a coordinator.
pub type Calls = CoordinatorClient<InterceptedService<Channel, Credentials>>;

impl Coordinator {
    /// The coordinator at `address`. Connects when first called.
    ///
    /// # Errors
    /// If the address is none.
    pub fn at(
        address: &str,
        patience: Duration,
        security: Security,
    ) -> Result<Self, MembershipError> {
        Self::over(&SystemNetwork::new(security), address, patience)
    }

    /// The same over some network.
    ///
    /// # Errors
    /// If the address is none.
    pub fn over(
        network: &dyn Network,
        address: &str,
        patience: Duration,
    ) -> Result<Self, MembershipError> {
        let security = network.security();
        let endpoint = security.endpoint(address, Role::Coordinator);
        let endpoint = endpoint.map_err(|error| {
            MembershipError::Refused(format!(
                "{address:?} is not an address: {error}; expected host:port"
            ))
        })?;
        let channel = network.connect_lazily(endpoint);
        Ok(Self {
            address: address.to_owned(),
            client: CoordinatorClient::with_interceptor(channel, security.credentials()),
            patience,
            has_answered: Arc::default(),
        })
    }

    /// The address by which others reach a port that this process listens on: the one it listens
    /// on, or where that is all of them, that of the interface which leads to the coordinator. Waits for
    /// one while patience lasts.
    ///
    /// # Errors
    /// If no interface does.
    pub async fn reachable(&self, listening: SocketAddr) -> Result<SocketAddr, MembershipError> {
        if !listening.ip().is_unspecified() {
            return Ok(listening);
        }
        // Names of containers are known once those run.
        let began = Instant::now();
        loop {
            match local_ip(&self.address).await {
                Ok(ip) => return Ok(SocketAddr::new(ip, listening.port())),
                Err(_) if began.elapsed() < self.patience => {
                    tokio::time::sleep(LOOK_UP_AGAIN).await;
                }
                Err(error) => {
                    return Err(MembershipError::Unreachable {
                        address: self.address.clone(),
                        patience: self.patience,
                        reason: error.to_string(),
                    });
                }
            }
        }
    }

    /// Calls until there is an answer other than "not now", with backoff, for as long as the
    /// process's patience lasts.
    ///
    /// # Errors
    /// As the variants of [`MembershipError`] say.
    pub async fn call<T, F>(&self, call: impl Fn(Calls) -> F) -> Result<T, MembershipError>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        let once = || async {
            match tokio::time::timeout(CALL_TIMEOUT, call(self.client.clone())).await {
                Ok(answer) => {
                    self.has_answered.fetch_or(answer.is_ok(), Relaxed);
                    answer.map(Response::into_inner)
                }
                Err(_) => Err(Status::deadline_exceeded(format!(
                    "no answer for {CALL_TIMEOUT:?}"
                ))),
            }
        };
        let began = Instant::now();
        let mut alarmed = false;
        let backoff = ExponentialBuilder::default()
            .with_jitter()
            .with_min_delay(Duration::from_millis(20))
            .with_max_delay(Duration::from_secs(1))
            .without_max_times();
        once.retry(backoff)
            .when(|status| self.may_pass(status) && began.elapsed() < self.patience)
            .notify(|status, _| {
                if began.elapsed() >= ALARM && !std::mem::replace(&mut alarmed, true) {
                    let (address, reason) = (&self.address, chain_of(status));
                    tracing::warn!(
                        address,
                        reason,
                        "the coordinator does not answer; trying on"
                    );
                }
            })
            .await
            .map_err(|status| self.give_up(&status))
    }

    /// Whether the same call may go well later. While a cluster runs, certificates and tokens are
    /// replaced one process at a time.
    fn may_pass(&self, status: &Status) -> bool {
        match distrusts(status) {
            true => self.has_answered.load(Relaxed),
            false => may_pass(status),
        }
    }

    fn give_up(&self, status: &Status) -> MembershipError {
        let address = self.address.clone();
        if let Some(reason) = certificate_error(status) {
            MembershipError::Untrusted { address, reason }
        } else if self.may_pass(status) {
            MembershipError::Unreachable {
                address,
                patience: self.patience,
                reason: chain_of(status),
            }
        } else {
            MembershipError::of(status)
        }
    }
}

impl MembershipError {
    /// What a call comes to that will not go better if it is made again.
    fn of(status: &Status) -> Self {
        let message = status.message().to_owned();
        let reason = Refusal::from_status(status).map(|refusal| refusal.reason);
        match (reason, status.code()) {
            (Some(Reason::Superseded), _) => Self::Superseded(message),
            (_, Code::Aborted) => Self::Fenced(message),
            _ => Self::Refused(message),
        }
    }
}

/// The address of the interface through which `peer` is reached. Nothing is sent.
async fn local_ip(peer: &str) -> std::io::Result<IpAddr> {
    let socket = tokio::net::UdpSocket::bind("0.0.0.0:0").await?;
    socket.connect(peer).await?;
    Ok(socket.local_addr()?.ip())
}

/// Whether the same call may go well later. `Unknown` and `Internal` are what a connection that breaks
/// during a call ends in.
fn may_pass(status: &Status) -> bool {
    let transient = matches!(
        status.code(),
        Code::Unavailable
            | Code::DeadlineExceeded
            | Code::Unknown
            | Code::Internal
            | Code::Cancelled
    );
    transient && Refusal::from_status(status).is_none()
}

/// Whether one of two peers does not accept what the other shows.
fn distrusts(status: &Status) -> bool {
    let told = matches!(
        status.code(),
        Code::Unauthenticated | Code::PermissionDenied
    );
    told || certificate_error(status).is_some()
}

/// A registered task. Its lease is kept until this is dropped or [`Membership::leave`] is called.
#[derive(Debug)]
pub struct Membership {
    /// For calls of the role's own.
    pub coordinator: Coordinator,
    /// This process.
    pub task: Task,
    /// What is trained.
    pub job: Job,
    /// Where checkpoints lie, and what the probe file there must say; none without checkpoints.
    pub checkpoints: Option<(String, String)>,
    sender: Sender,
    standing: watch::Receiver<Standing>,
    _heartbeats: DropGuard,
}

/// What the last heartbeat has told.
#[derive(Clone, Debug)]
enum Standing {
    Member,
    /// The lease is lost, or another process has the identity.
    Lost(Arc<MembershipError>),
    /// The job has failed.
    Failed(String),
}

/// Who registers.
#[derive(Clone, Debug)]
pub struct Registration {
    /// What for.
    pub role: Role,
    /// What stays the same over restarts.
    pub identity: String,
    /// Where others reach it, as host:port; empty if it does not listen.
    pub address: String,
    /// Where its metrics are served, as host:port.
    pub metrics_address: String,
}

impl Membership {
    /// Registers, and keeps the lease from then on.
    ///
    /// # Errors
    /// If the coordinator cannot be reached, or refuses.
    pub async fn join(
        coordinator: Coordinator,
        registration: Registration,
    ) -> Result<Self, MembershipError> {
        let request = wire::RegisterRequest {
            protocol_version: PROTOCOL_VERSION,
            role: wire::Role::from(registration.role).into(),
            identity: registration.identity,
            address: registration.address,
            metrics_address: registration.metrics_address,
        };
        let reply = coordinator
            .call(|mut c| {
                let request = request.clone();
                async move { c.register(request).await }
            })
            .await?;
        let task = reply
            .task
            .as_ref()
            .and_then(|task| Task::try_from(task).ok())
            .filter(|task| task.id.role == registration.role && task.generation > Generation(0))
            .ok_or_else(|| MembershipError::Refused("it gave no task".to_owned()))?;
        let job = Job::from_toml(&reply.job_toml)?;
        let lease = Duration::from_millis(reply.lease_milliseconds);
        gauge!("flambeau_task_info", "task" => task.to_string()).set(1.0);
        tracing::info!(%task, generation = task.generation.0, coordinator = %coordinator.address, "registered");

        let (tell, standing) = watch::channel(Standing::Member);
        let stop = CancellationToken::new();
        let sender = Sender::new(&job, task);
        let heart = heartbeats(coordinator.clone(), sender.clone(), lease, tell);
        let stopped = stop.clone();
        tokio::spawn(async move { stopped.run_until_cancelled(heart).await });
        Ok(Self {
            coordinator,
            task,
            job,
            checkpoints: (!reply.checkpoints.is_empty())
                .then_some((reply.checkpoints, reply.probe)),
            sender,
            standing,
            _heartbeats: stop.drop_guard(),
        })
    }

    /// This task as the sender of its next call.
    pub fn origin(&self) -> Origin {
        self.sender.here()
    }

    /// This task as a sender of calls.
    pub fn sender(&self) -> Sender {
        self.sender.clone()
    }

    /// Waits until the lease is lost, or the job has failed. Whoever waits for something else may
    /// never get it then.
    pub async fn lost(&self) -> MembershipError {
        let mut standing = self.standing.clone();
        let member = |standing: &Standing| matches!(standing, Standing::Member);
        match standing
            .wait_for(|standing| !member(standing))
            .await
            .as_deref()
        {
            Ok(Standing::Lost(why)) => match &**why {
                MembershipError::Superseded(why) => MembershipError::Superseded(why.clone()),
                MembershipError::Unreachable {
                    address,
                    patience,
                    reason,
                } => MembershipError::Unreachable {
                    address: address.clone(),
                    patience: *patience,
                    reason: reason.clone(),
                },
                why => MembershipError::Fenced(why.to_string()),
            },
            Ok(Standing::Failed(error)) => MembershipError::JobFailed(error.clone()),
            // The heartbeats have been stopped, so nothing is heard any more.
            Ok(Standing::Member) | Err(_) => std::future::pending().await,
        }
    }

    /// Gives the lease back. With an error, says that the job cannot go on because of it.
    pub async fn leave(self, error: Option<&str>) {
        let request = wire::LeaveRequest {
            origin: Some(self.origin().into()),
            error: error.unwrap_or_default().to_owned(),
        };
        // The coordinator may have gone before us, and the lease ends by itself.
        let mut client = self.coordinator.client.clone();
        let left = tokio::time::timeout(LEAVE_TIMEOUT, client.leave(request)).await;
        if !matches!(left, Ok(Ok(_))) {
            tracing::debug!("could not say good-bye to the coordinator");
        }
    }

    /// Follows the coordinator's views until this membership's end or `stop`.
    pub fn views(&self, stop: CancellationToken) -> watch::Receiver<View> {
        let (sender, receiver) = watch::channel(View::default());
        let coordinator = self.coordinator.clone();
        let origin: wire::Origin = self.origin().into();
        tokio::spawn(async move {
            let follow = async {
                while !sender.is_closed() {
                    let request = wire::WatchRequest {
                        origin: Some(origin.clone()),
                    };
                    if let Err(status) = follow(&coordinator, request, &sender).await {
                        tracing::debug!(%status, "the stream of views broke; opening it again");
                    }
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            };
            stop.run_until_cancelled(follow).await;
        });
        receiver
    }
}

/// A task that sends calls: numbers them, over all its parts.
#[derive(Clone, Debug)]
pub struct Sender {
    job: Arc<str>,
    task: Task,
    sequence: Arc<AtomicU64>,
    clock: Arc<AtomicU64>,
}

impl Sender {
    fn new(job: &Job, task: Task) -> Self {
        Self {
            job: job.name.as_str().into(),
            task,
            sequence: Arc::default(),
            clock: Arc::default(),
        }
    }

    /// Steps that this worker has finished: its calls tell of them from now on, so that a coordinator
    /// that has started again knows.
    pub fn set_clock(&self, clock: Clock) {
        self.clock.store(clock.0, Relaxed);
    }

    /// As [`Self::origin`], at the clock that was set last.
    pub fn here(&self) -> Origin {
        self.origin(Epoch(0), Clock(self.clock.load(Relaxed)))
    }

    /// The origin of the next call.
    pub fn origin(&self, epoch: Epoch, clock: Clock) -> Origin {
        Origin {
            job: self.job.to_string(),
            task: self.task,
            epoch,
            clock,
            sequence: Sequence(self.sequence.fetch_add(1, Relaxed) + 1),
        }
    }
}

async fn follow(
    coordinator: &Coordinator,
    request: wire::WatchRequest,
    sender: &watch::Sender<View>,
) -> Result<(), Status> {
    let mut client = coordinator.client.clone();
    let mut views = client.watch(Request::new(request)).await?.into_inner();
    while let Some(view) = views.message().await? {
        let view = View::try_from(view)?;
        sender.send_if_modified(|current| {
            let newer = view.number > current.number;
            if newer {
                *current = view;
            }
            newer
        });
    }
    Ok(())
}

async fn heartbeats(
    coordinator: Coordinator,
    sender: Sender,
    lease: Duration,
    tell: watch::Sender<Standing>,
) {
    let period = lease / HEARTBEATS_PER_LEASE;
    let mut last = Instant::now();
    loop {
        tokio::time::sleep(period).await;
        let mut client = coordinator.client.clone();
        let beat = client.heartbeat(wire::HeartbeatRequest {
            origin: Some(sender.here().into()),
        });
        match tokio::time::timeout(period.max(Duration::from_secs(1)), beat).await {
            Ok(Ok(reply)) => {
                last = Instant::now();
                let reply = reply.into_inner();
                if reply.phase() == JobPhase::Failed {
                    tell.send_replace(Standing::Failed(reply.error));
                }
            }
            Ok(Err(status)) if !coordinator.may_pass(&status) => {
                tell.send_replace(Standing::Lost(Arc::new(MembershipError::of(&status))));
                return;
            }
            _ if last.elapsed() > coordinator.patience => {
                let silence = MembershipError::Unreachable {
                    address: coordinator.address.clone(),
                    patience: coordinator.patience,
                    reason: "heartbeats are not answered".to_owned(),
                };
                tell.send_replace(Standing::Lost(Arc::new(silence)));
                return;
            }
            _ => tracing::debug!("a heartbeat was not answered"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_port_on_all_interfaces_is_reached_by_the_one_that_leads_to_the_coordinator() {
        let coordinator =
            Coordinator::at("127.0.0.1:9", Duration::ZERO, Security::default()).unwrap();
        let all: SocketAddr = "0.0.0.0:7".parse().unwrap();
        let reachable = coordinator.reachable(all).await.unwrap();
        assert_eq!(reachable, "127.0.0.1:7".parse().unwrap());
        let one: SocketAddr = "127.0.0.5:7".parse().unwrap();
        assert_eq!(coordinator.reachable(one).await.unwrap(), one);
    }
}
