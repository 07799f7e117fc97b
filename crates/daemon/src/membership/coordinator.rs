//! Calls to the coordinator, with retries while it does not answer, and a limit.

use std::future::Future;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use backon::{ExponentialBuilder, Retryable};
use network::security::{Credentials, Mismatch, Security, certificate_error, chain_of};
use network::transport::CALL_TIMEOUT;
use network::{Network, SystemNetwork};
use shared_proto::ids::Role;
use shared_proto::refusal::{Reason, Refusal};
use shared_proto::task::boxed;
use shared_proto::wire;
use shared_proto::wire::coordinator_client::CoordinatorClient;
use tokio::sync::Notify;
use tokio::time::Instant;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::Channel;
use tonic::{Code, Response, Status};

use super::MembershipError;

/// The interval at which a name that does not resolve is looked up again.
const LOOK_UP_AGAIN: Duration = Duration::from_millis(500);

/// The interval at which members call a coordinator that is gone, while they wait for the next one.
pub(super) const ASK_AGAIN: Duration = Duration::from_secs(2);

/// The time without an answer of the coordinator before a warning is logged.
const ALARM: Duration = Duration::from_secs(1);

/// The coordinator. Calls have deadlines, and are retried while it does not answer.
#[derive(Clone, Debug)]
pub struct Coordinator {
    pub(super) address: String,
    pub(super) client: Calls,
    pub(super) patience: Duration,
    /// True if the coordinator has answered before. If it does not trust this process now, certificates are being
    /// replaced.
    has_answered: Arc<AtomicBool>,
    /// The number by which the coordinator distinguishes this process from others with the same identity.
    pub(super) process: u64,
    attempts: Arc<AtomicU32>,
    /// Notified when a registration finds that the coordinator has no job.
    pub(super) idle: Arc<Notify>,
    /// True if the coordinator has a queue of jobs, according to its last reply to a registration.
    has_queue: Arc<AtomicBool>,
    /// The description of this process that the coordinator shows while the process waits for a job; unset before the
    /// process registers.
    waiting: Arc<OnceLock<wire::WaitingMember>>,
    security: Security,
}

/// Calls to a coordinator.
pub type Calls = CoordinatorClient<InterceptedService<Channel, Credentials>>;

impl Coordinator {
    /// Returns the coordinator at `address`. Connects at the first call.
    ///
    /// # Errors
    /// If the address is invalid.
    pub fn at(
        address: &str,
        patience: Duration,
        security: Security,
    ) -> Result<Self, MembershipError> {
        Self::over(&SystemNetwork::new(security), address, patience)
    }

    /// Returns the coordinator at `address`, reached over `network`.
    ///
    /// # Errors
    /// If the address is invalid.
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
            process: fastrand::u64(1..),
            attempts: Arc::default(),
            idle: Arc::default(),
            has_queue: Arc::default(),
            waiting: Arc::default(),
            security: security.clone(),
        })
    }

    /// Returns the same coordinator, with another patience: the longest time for which the coordinator may not answer.
    #[must_use]
    pub fn with_patience(self, patience: Duration) -> Self {
        Self { patience, ..self }
    }

    /// Returns whether the coordinator has a queue of jobs, according to its last reply to a registration.
    pub(crate) fn has_queue(&self) -> bool {
        self.has_queue.load(Relaxed)
    }

    pub(super) fn set_queue(&self, has_queue: bool) {
        self.has_queue.store(has_queue, Relaxed);
    }

    /// Stores the description of this process that the coordinator shows while the process waits for a job.
    pub(super) fn waits_as(&self, registration: &wire::RegisterRequest) {
        self.waiting.get_or_init(|| wire::WaitingMember {
            role: registration.role,
            identity: registration.identity.clone(),
            address: registration.address.clone(),
            metrics_address: registration.metrics_address.clone(),
            process: registration.process,
        });
    }

    /// Returns the description of this process that the coordinator shows while the process waits for a job; none
    /// before the process registers.
    pub(super) fn waiting(&self) -> Option<wire::WaitingMember> {
        self.waiting.get().cloned()
    }

    /// Returns the number of this process's next registration.
    pub(super) fn next_attempt(&self) -> u32 {
        self.attempts.fetch_add(1, Relaxed) + 1
    }

    /// Returns the address at which other processes reach this one. For a process that listens on all interfaces, this
    /// is the address of the interface that leads to the coordinator. Waits for such an interface while patience lasts.
    ///
    /// # Errors
    /// If no interface leads to the coordinator.
    #[boxed]
    pub async fn reachable(&self, address: String) -> Result<String, MembershipError> {
        let port = match address.parse::<SocketAddr>() {
            Ok(listening) if listening.ip().is_unspecified() => listening.port(),
            _ => return Ok(address),
        };
        // The name of a container resolves once it runs.
        let began = Instant::now();
        loop {
            match local_ip(&self.address).await {
                Ok(ip) => return Ok(SocketAddr::new(ip, port).to_string()),
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

    /// Calls until the coordinator gives an answer other than "not now", with backoff, for as long as the
    /// process's patience lasts.
    ///
    /// # Errors
    /// See the variants of [`MembershipError`].
    pub async fn call<T, F>(&self, call: impl Fn(Calls) -> F) -> Result<T, MembershipError>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        let attempt = || async {
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
        // The credentials that are refused may have been replaced since they were read.
        let once = || async {
            match attempt().await {
                Err(status) if distrusts(&status) && self.security.read_again().await => {
                    attempt().await
                }
                answer => answer,
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

    /// Returns whether the same call may succeed later. While a cluster runs, certificates and tokens are
    /// replaced one process at a time.
    pub(super) fn may_pass(&self, status: &Status) -> bool {
        match distrusts(status) {
            true => self.has_answered.load(Relaxed),
            false => may_pass(status),
        }
    }

    fn give_up(&self, status: &Status) -> MembershipError {
        let address = self.address.clone();
        if let Some(mismatch) = Mismatch::of(status) {
            MembershipError::Mismatched { address, mismatch }
        } else if let Some(reason) = certificate_error(status) {
            MembershipError::Untrusted { address, reason }
        } else if self.may_pass(status) {
            MembershipError::Unreachable {
                address,
                patience: self.patience,
                reason: chain_of(status),
            }
        } else {
            MembershipError::new(status)
        }
    }
}

impl MembershipError {
    /// Returns the error of a call that would fail again.
    pub(super) fn new(status: &Status) -> Self {
        let message = status.message().to_owned();
        let reason = Refusal::from_status(status).map(|refusal| refusal.reason);
        match (reason, status.code()) {
            (Some(Reason::Superseded), _) => Self::Superseded(message),
            (Some(Reason::StaleEpoch), _) => Self::Outdated(message),
            (Some(Reason::OutOfOrder), _) => Self::OutOfOrder(message),
            (Some(Reason::NoJob), _) => Self::NoJob(message),
            (_, Code::Aborted) => Self::Fenced(message),
            _ => Self::Refused(message),
        }
    }
}

/// Returns the address of the interface through which `peer` is reached. Nothing is sent.
async fn local_ip(peer: &str) -> std::io::Result<IpAddr> {
    let socket = tokio::net::UdpSocket::bind("0.0.0.0:0").await?;
    socket.connect(peer).await?;
    Ok(socket.local_addr()?.ip())
}

/// Returns whether the same call may succeed later. A connection that breaks during a call gives `Unknown` or
/// `Internal`. HTTP/2 closes a connection on which many calls were given up, for example because a coordinator has
/// not answered for a while; that gives `ResourceExhausted`.
pub(super) fn may_pass(status: &Status) -> bool {
    let transient = matches!(
        status.code(),
        Code::Unavailable
            | Code::DeadlineExceeded
            | Code::Unknown
            | Code::Internal
            | Code::Cancelled
            | Code::ResourceExhausted
    );
    transient && Refusal::from_status(status).is_none()
}

/// Returns whether one of the two peers rejects the other's credentials, or presents none.
pub(super) fn distrusts(status: &Status) -> bool {
    let told = matches!(
        status.code(),
        Code::Unauthenticated | Code::PermissionDenied
    );
    told || certificate_error(status).is_some() || Mismatch::of(status).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;
    use shared_proto::wire;

    #[tokio::test]
    async fn a_coordinator_that_is_not_there_is_told_without_values_of_the_program() {
        // Port 9 belongs to the discard protocol; no process listens there.
        let coordinator =
            Coordinator::at("127.0.0.1:9", Duration::ZERO, Security::default()).unwrap();
        let call =
            coordinator.call(|mut c| async move { c.get_job(wire::JobRequest::default()).await });
        let said = call.await.unwrap_err().to_string();
        assert!(said.contains("refused"), "{said}");
        for value in ["source:", "ConnectError(", "Os {", "message:"] {
            assert!(!said.contains(value), "{said}");
        }
    }

    #[test]
    fn a_connection_that_is_closed_for_calls_that_were_given_up_is_opened_again() {
        assert!(may_pass(&Status::resource_exhausted(
            "h2 protocol error: http2 error"
        )));
        let refused = Refusal::new(Reason::TooManyRequests, "too many");
        assert!(!may_pass(&Status::from(refused)));
    }

    #[tokio::test]
    async fn a_port_on_all_interfaces_is_reached_by_the_one_that_leads_to_the_coordinator() {
        let coordinator =
            Coordinator::at("127.0.0.1:9", Duration::ZERO, Security::default()).unwrap();
        for (listening, told) in [
            ("0.0.0.0:7", "127.0.0.1:7"),
            ("127.0.0.5:7", "127.0.0.5:7"),
            ("unix:/run/ps.sock", "unix:/run/ps.sock"),
            ("", ""),
        ] {
            let reachable = coordinator.reachable(listening.to_owned()).await.unwrap();
            assert_eq!(reachable, told);
        }
    }
}
