//! A process's place in the cluster: it registers, keeps its lease, follows views, leaves.

mod calls;
mod coordinator;
mod error;
mod jobs;
mod lease;
mod sender;
mod steps;

use std::sync::Arc;
use std::time::Duration;

pub use coordinator::{Calls, Coordinator};
pub use error::MembershipError;
pub use lease::Lease;
use lease::heartbeats;
use metrics::gauge;
use parking_lot::Mutex;
pub use sender::Sender;
use shared_proto::ids::{Generation, Origin, Role, RunNumber, Task};
use shared_proto::job::Job;
use shared_proto::protocol::PROTOCOL_VERSION;
use shared_proto::receipt::ReceiptKey;
use shared_proto::task::{self, boxed};
use shared_proto::view::View;
use shared_proto::wire;
pub use steps::StepReports;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::{Request, Status};

/// The time in which the coordinator must answer a server that is about to stop.
const DRAIN_CALL: Duration = Duration::from_secs(6);

/// The pause before a coordinator that did not answer is asked again.
const DRAIN_AGAIN: Duration = Duration::from_millis(200);

/// The time limit of the call that gives a lease back.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(1);

/// The time limit of the call that reports an error to the coordinator.
const TELL_TIMEOUT: Duration = Duration::from_secs(5);

/// A registered task. Its lease is kept until this is dropped or [`Membership::leave`] is called.
#[derive(Debug)]
pub struct Membership {
    /// The coordinator, for other calls of the role.
    pub coordinator: Coordinator,
    /// The task of this process.
    pub task: Task,
    /// The run of which the process is a member.
    pub run: RunNumber,
    /// The job.
    pub job: Job,
    /// The run directory of a submitted job, relative to the coordinator's folder; empty for a job that the coordinator
    /// was started with.
    pub run_folder: String,
    /// The location of the checkpoints, and the run that owns it; `None` without checkpoints.
    pub checkpoints: Option<(String, String)>,
    /// The key of receipts; servers only.
    pub receipt_key: Option<ReceiptKey>,
    sender: Sender,
    lease: Lease,
    standing: watch::Receiver<Standing>,
    _heartbeats: DropGuard,
}

/// The standing of a process according to the last heartbeat.
#[derive(Clone, Debug)]
enum Standing {
    Member,
    /// The lease is lost, or another process has the identity.
    Lost(Arc<MembershipError>),
    /// The job has failed.
    Failed(String),
}

impl Standing {
    /// Returns the error of a process that has lost its lease or whose job has failed; `None` for a member.
    fn error(&self) -> Option<MembershipError> {
        match self {
            Self::Member => None,
            Self::Lost(why) => Some(match &**why {
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
            }),
            Self::Failed(error) => Some(MembershipError::JobFailed(error.clone())),
        }
    }
}

/// The data by which a process registers.
#[derive(Clone, Debug)]
pub struct Registration {
    /// The role of the process.
    pub role: Role,
    /// The name of the process, which stays the same over restarts.
    pub identity: String,
    /// The address at which others reach the process; empty if it does not listen. The host 0.0.0.0 stands
    /// for the interface that leads to the coordinator, looked up at each registration.
    pub address: String,
    /// The address of the process's metrics. The host 0.0.0.0 has the same meaning here.
    pub metrics_address: String,
    /// The values that a returning server still has; `None` for other processes.
    pub holding: Option<wire::Holding>,
    /// Servers only: the size in bytes of the values for which the server has memory; 0 if it is not known.
    pub capacity_bytes: u64,
}

impl Membership {
    /// Registers, and keeps the lease from then on. Waits while the coordinator has no job.
    ///
    /// # Errors
    /// If the coordinator cannot be reached, or refuses.
    #[boxed]
    pub async fn join(
        coordinator: Coordinator,
        registration: Registration,
    ) -> Result<Self, MembershipError> {
        let mut request = wire::RegisterRequest {
            protocol_version: PROTOCOL_VERSION,
            role: wire::Role::from(registration.role).into(),
            identity: registration.identity,
            address: coordinator.reachable(registration.address).await?,
            metrics_address: coordinator.reachable(registration.metrics_address).await?,
            holding: registration.holding,
            process: coordinator.process,
            attempt: 0,
            capacity_bytes: registration.capacity_bytes,
        };
        coordinator.waits_as(&request);
        let sent = Mutex::new(Instant::now());
        let mut idle = false;
        let reply = loop {
            request.attempt = coordinator.next_attempt();
            let reply = coordinator
                .call(|mut c| {
                    let request = request.clone();
                    *sent.lock() = Instant::now();
                    async move { c.register(request).await }
                })
                .await;
            match reply {
                // The answer was lost for longer than the lease in it.
                Err(MembershipError::OutOfOrder(_)) => {}
                Err(MembershipError::NoJob(_)) => {
                    if !std::mem::replace(&mut idle, true) {
                        let address = &coordinator.address;
                        tracing::info!(address, "the coordinator has no job yet; waiting for one");
                        coordinator.idle.notify_one();
                    }
                    coordinator.has_work(None).await;
                }
                reply => break reply?,
            }
        };
        let task = reply
            .task
            .as_ref()
            .and_then(|task| Task::try_from(task).ok())
            .filter(|task| task.id.role == registration.role && task.generation > Generation(0))
            .ok_or_else(|| MembershipError::Refused("it gave no task".to_owned()))?;
        coordinator.set_queue(reply.has_queue);
        let job = Job::from_toml(&reply.job_toml)?;
        let length = Duration::from_millis(reply.lease_milliseconds);
        let lease = Lease::new(length, *sent.lock());
        // Added and not set: a process that registers again may be the same task as before.
        let shown = gauge!("flambeau_task_info", "task" => task.to_string());
        shown.increment(1.0);
        tracing::info!(%task, generation = task.generation.0, coordinator = %coordinator.address, "registered");

        let (tell, standing) = watch::channel(Standing::Member);
        let stop = CancellationToken::new();
        let run = RunNumber(reply.run);
        let sender = Sender::new(&job, run, task);
        let heart = heartbeats(coordinator.clone(), sender.clone(), lease.clone(), tell);
        let stopped = stop.clone();
        task::spawn(async move {
            stopped.run_until_cancelled(heart).await;
            shown.decrement(1.0);
        });
        Ok(Self {
            coordinator,
            task,
            run,
            job,
            run_folder: reply.run_folder,
            checkpoints: (!reply.checkpoints.is_empty())
                .then_some((reply.checkpoints, reply.probe)),
            receipt_key: ReceiptKey::read(&reply.receipt_key),
            sender,
            lease,
            standing,
            _heartbeats: stop.drop_guard(),
        })
    }

    /// Registers as [`Self::join`] does. Calls `waits` once if the coordinator has no job yet.
    ///
    /// # Errors
    /// As [`Self::join`].
    pub async fn join_or_wait(
        coordinator: Coordinator,
        registration: Registration,
        waits: impl FnOnce(),
    ) -> Result<Self, MembershipError> {
        let idle = Arc::clone(&coordinator.idle);
        let mut join = std::pin::pin!(Self::join(coordinator, registration));
        tokio::select! {
            biased;
            joined = join.as_mut() => return joined,
            () = idle.notified() => waits(),
        }
        join.await
    }

    /// Returns the origin of this task's next call, under a new sequence number.
    pub fn next_origin(&self) -> Origin {
        self.sender.next_origin_here()
    }

    /// Returns this task as a sender of calls.
    pub fn sender(&self) -> Sender {
        self.sender.clone()
    }

    /// Returns the lease as this process knows it.
    pub fn lease(&self) -> Lease {
        self.lease.clone()
    }

    /// Returns the stream by which this worker reports finished steps. The replies renew the lease.
    pub fn step_reports(&self) -> StepReports {
        StepReports::new(self.coordinator.clone(), self.lease())
    }

    /// Waits until the lease is lost, or the job has failed. Select on this beside any other wait: after
    /// a loss, the other event may never come.
    #[boxed]
    pub async fn lost(&self) -> MembershipError {
        let mut standing = self.standing.clone();
        let member = |standing: &Standing| matches!(standing, Standing::Member);
        let left = standing.wait_for(|standing| !member(standing)).await;
        // The heartbeats may have stopped; then the standing no longer changes.
        let error = left.ok().and_then(|standing| standing.error());
        match error {
            Some(error) => error,
            None => std::future::pending().await,
        }
    }

    /// Waits until this server may stop, because a checkpoint has all of its shard, or because the coordinator refuses
    /// to write one. Returns true then. Returns false if the membership has ended: the server must register again and
    /// wait again.
    pub fn drained(&self) -> impl Future<Output = bool> + use<> {
        let (coordinator, sender) = (self.coordinator.clone(), self.sender());
        let mut client = coordinator.client.clone();
        async move {
            loop {
                let request = wire::DrainRequest {
                    origin: Some(sender.next_origin_here().into()),
                };
                match tokio::time::timeout(DRAIN_CALL, client.drain(request)).await {
                    Ok(Ok(reply)) if !reply.get_ref().done => {}
                    Ok(Ok(_)) => return true,
                    Ok(Err(status)) if coordinator.may_pass(&status) => {
                        tokio::time::sleep(DRAIN_AGAIN).await;
                    }
                    Ok(Err(status)) if MembershipError::new(&status).is_retryable() => {
                        return false;
                    }
                    Ok(Err(status)) => {
                        tracing::warn!(%status, "stopping without a checkpoint");
                        return true;
                    }
                    Err(_) => {}
                }
            }
        }
    }

    /// Gives the lease back. With an error, tells the coordinator that the job cannot continue because of it.
    #[boxed]
    pub async fn leave(self, error: Option<&str>) {
        let error = error.unwrap_or_default();
        self.leave_because(wire::WorkerFailure::Unspecified, error)
            .await;
    }

    /// Deregisters this process, and tells the coordinator why it cannot work. With
    /// [`wire::WorkerFailure::Unspecified`] and an error, the job fails; with any other failure, it continues without this
    /// process. An empty error means that nothing is wrong.
    #[boxed]
    pub async fn leave_because(self, failure: wire::WorkerFailure, error: &str) {
        let request = wire::LeaveRequest {
            origin: Some(self.next_origin().into()),
            error: error.to_owned(),
            failure: failure.into(),
        };
        // The coordinator may have ended before this process, and the lease ends by itself.
        let mut client = self.coordinator.client.clone();
        let patience = match error.is_empty() {
            true => LEAVE_TIMEOUT,
            false => TELL_TIMEOUT,
        };
        let left = tokio::time::timeout(patience, client.leave(request)).await;
        if !matches!(left, Ok(Ok(_))) {
            tracing::debug!("could not give the lease back to the coordinator");
        }
    }

    /// Follows the coordinator's views until `stop` is cancelled or all receivers are dropped. Opens the stream again
    /// after it has broken.
    pub fn views(&self, stop: CancellationToken) -> watch::Receiver<View> {
        let (sender, receiver) = watch::channel(View::default());
        let coordinator = self.coordinator.clone();
        let origin: wire::Origin = self.next_origin().into();
        task::spawn(async move {
            let follow = async {
                while !sender.is_closed() {
                    let request = wire::WatchRequest {
                        origin: Some(origin.clone()),
                        differences: true,
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

async fn follow(
    coordinator: &Coordinator,
    request: wire::WatchRequest,
    sender: &watch::Sender<View>,
) -> Result<(), Status> {
    let mut client = coordinator.client.clone();
    let mut views = client.watch(Request::new(request)).await?.into_inner();
    let mut workers = Vec::new();
    while let Some(view) = views.message().await? {
        let view = View::read(view, &workers)?;
        workers.clone_from(&view.workers);
        sender.send_if_modified(|current| {
            let newer = view.number > current.number || view.is_older_than(current);
            if newer {
                *current = view;
            }
            newer
        });
    }
    Ok(())
}
