//! Workers and servers without a model: they make the calls that real ones make, over connections of their own.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bytes::Bytes;
use daemon::membership::{
    Coordinator, Membership, MembershipError, Registration, Sender, StepReports,
};
use network::security::Security;
use shared_proto::blocks::{VariableKind, VariableSpec};
use shared_proto::ids::{Clock, Epoch, Role, Task};
use shared_proto::job::{Job, Mode};
use shared_proto::receipt::ReceiptKey;
use shared_proto::staleness::StalenessBound;
use shared_proto::view::View;
use shared_proto::wire::{self, Initialization, lease_work_reply::Work};
use tokio::sync::oneshot::error::TryRecvError;
use tokio::sync::{oneshot, watch};
use tokio::task::{JoinSet, LocalSet};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::progress::Progress;
use super::{PATIENCE, ended};
use crate::command::block_on;
use crate::error::CommandError;

/// The number of samples of the job: more than a measurement needs.
const SAMPLES: u64 = 1 << 45;

/// The number of elements of the only variable, for each server.
const ELEMENTS: usize = 1 << 16;

/// The members of a measured cluster. The workers share the thread of the measurement. The servers share another
/// thread, so that they receive views while the workers' thread is busy.
pub(super) struct Members {
    workers: JoinSet<Result<(), MembershipError>>,
    servers: Servers,
    /// One token for each worker, which ends the worker as if it were lost.
    lose: Vec<CancellationToken>,
}

/// What all members of a cluster have in common.
#[derive(Clone)]
struct Common {
    address: String,
    servers: u32,
    mode: Mode,
    bound: StalenessBound,
    batch: u64,
    /// The time from the beginning of a worker's step to that of the next; zero if workers do not pause.
    pause: Duration,
    progress: Arc<Progress>,
    /// The key of receipts; `None` until a server has joined.
    key: Arc<watch::Sender<Option<ReceiptKey>>>,
}

impl Members {
    /// Starts the workers and servers of a job.
    pub(super) fn start(job: &Job, address: String, rate: f64, progress: &Arc<Progress>) -> Self {
        let (servers, workers) = (
            job.cluster.ps.unwrap_or(1),
            job.cluster.workers.unwrap_or(1),
        );
        let common = Common {
            address,
            servers,
            mode: job.strategy.mode,
            bound: job.strategy.bound(),
            batch: u64::from(job.batch_size),
            pause: match rate > 0.0 {
                true => Duration::from_secs_f64(1.0 / rate),
                false => Duration::ZERO,
            },
            progress: Arc::clone(progress),
            key: Arc::new(watch::channel(None).0),
        };
        let (shown, views): (Vec<_>, Vec<_>) = (0..servers)
            .map(|_| watch::channel(View::default()))
            .unzip();
        let servers_at_work = Servers::start(&common, shown);
        let mut tasks = JoinSet::new();
        let mut lose = Vec::new();
        for index in 0..workers {
            let stop = CancellationToken::new();
            lose.push(stop.clone());
            // It follows the views of this server, as a worker that pulls from it would.
            let views = views[(index % servers) as usize].clone();
            let working = work(common.clone(), index, views);
            tasks.spawn_local(
                async move { stop.run_until_cancelled(working).await.unwrap_or(Ok(())) },
            );
        }
        Self {
            workers: tasks,
            servers: servers_at_work,
            lose,
        }
    }

    /// Stops `workers` workers without deregistering them.
    pub(super) fn lose(&mut self, workers: u32) {
        self.lose[..workers as usize]
            .iter()
            .for_each(CancellationToken::cancel);
    }

    /// Waits until a condition holds.
    pub(super) async fn until(
        &mut self,
        what: &str,
        holds: impl Fn() -> bool,
    ) -> Result<(), CommandError> {
        let since = Instant::now();
        while !holds() {
            match self.servers.failed.try_recv() {
                Ok(error) => return Err(error),
                Err(TryRecvError::Closed) => return Err(ended("the servers have ended")),
                Err(TryRecvError::Empty) => {}
            }
            match self.workers.try_join_next() {
                Some(Ok(Err(error))) => return Err(ended(error)),
                Some(Err(error)) => return Err(ended(error)),
                Some(Ok(Ok(()))) | None => {}
            }
            if since.elapsed() > PATIENCE {
                let seconds = PATIENCE.as_secs();
                return Err(ended(format!("after {seconds} seconds not yet: {what}")));
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Ok(())
    }

    pub(super) async fn stop(mut self) {
        self.workers.shutdown().await;
        let Servers { thread, stop, .. } = self.servers;
        drop(stop);
        let _ = thread.join();
    }
}

/// The servers, on a thread of their own. They end when this is dropped.
struct Servers {
    /// The error of the first server that has failed.
    failed: oneshot::Receiver<CommandError>,
    stop: DropGuard,
    thread: JoinHandle<()>,
}

impl Servers {
    /// Starts a server for each channel. A server sends its views to its channel.
    fn start(common: &Common, shown: Vec<watch::Sender<View>>) -> Self {
        let (fail, failed) = oneshot::channel();
        let (stop, common) = (CancellationToken::new(), common.clone());
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || {
            let serving = async {
                let mut servers = JoinSet::new();
                for (index, shown) in (0..).zip(shown) {
                    servers.spawn_local(serve(common.clone(), index, shown));
                }
                while let Some(served) = servers.join_next().await {
                    served.map_err(ended)?.map_err(ended)?;
                }
                Ok(())
            };
            let serving = async { stopped.run_until_cancelled(serving).await.unwrap_or(Ok(())) };
            if let Err(error) = block_on(LocalSet::new().run_until(serving)) {
                let _ = fail.send(error);
            }
        });
        Self {
            failed,
            stop: stop.drop_guard(),
            thread,
        }
    }
}

impl Common {
    async fn join(&self, role: Role, index: u32) -> Result<Membership, MembershipError> {
        let coordinator = Coordinator::at(&self.address, PATIENCE, Security::default())?;
        let registration = Registration {
            role,
            identity: format!("{role}-{index}"),
            // No process calls it.
            address: match role {
                Role::Ps => format!("127.0.0.1:{}", 20_000 + index),
                _ => String::new(),
            },
            metrics_address: String::new(),
            holding: None,
            capacity_bytes: 0,
        };
        Membership::join(coordinator, registration).await
    }
}

/// A server: follows views.
async fn serve(
    common: Common,
    index: u32,
    shown: watch::Sender<View>,
) -> Result<(), MembershipError> {
    let membership = common.join(Role::Ps, index).await?;
    common.key.send_replace(membership.receipt_key);
    let mut views = membership.views(CancellationToken::new());
    loop {
        tokio::select! {
            lost = membership.lost() => return Err(lost),
            changed = views.changed() => if changed.is_err() { return Ok(()) },
        }
        let view = views.borrow_and_update().clone();
        common.progress.sees(membership.task.id.index, &view);
        shown.send_replace(view);
    }
}

/// A worker: takes data, and finishes steps.
async fn work(
    common: Common,
    index: u32,
    mut views: watch::Receiver<View>,
) -> Result<(), MembershipError> {
    let membership = common.join(Role::Worker, index).await?;
    let (coordinator, sender) = (&membership.coordinator, membership.sender());
    let mut steps = membership.step_reports();
    initialize(&common, &membership).await?;
    // Workers do not step at the same time.
    tokio::time::sleep(common.pause.mul_f64(f64::from(index % 97) / 97.0)).await;
    let mut clock = Clock(0);
    let mut next = tokio::time::Instant::now();
    let mut given: Option<wire::LeaseWorkReply> = None;
    // The newest report, if it has no reply.
    let mut unconfirmed: Option<wire::FinishStepRequest> = None;
    loop {
        let origin = sender.next_origin(*sender.newest_epoch().borrow(), clock);
        let reply = match given.take() {
            Some(given) => given,
            None => coordinator.lease_work(origin, None).await?,
        };
        clock = clock.max(Clock(reply.clock));
        sender.heard(Epoch(reply.epoch));
        let split = match reply.work {
            Some(Work::Split(split)) => split,
            Some(Work::Idle(_)) => continue,
            _ => return Ok(()),
        };
        let mut position = split.start;
        while position < split.end {
            next += common.pause;
            tokio::time::sleep_until(next).await;
            let may = |view: &View| match common.mode {
                Mode::Sync => view.min_clock >= clock,
                _ => common.bound.admits(clock, view.min_clock),
            };
            loop {
                tokio::select! {
                    _ = views.wait_for(may) => break,
                    // A coordinator that was restarted may lack the reports on which others wait.
                    () = steps.ended(), if unconfirmed.is_some() => {
                        if let Some(request) = unconfirmed.take() {
                            report(&mut steps, &sender, request, true).await?;
                        }
                    }
                }
            }
            let step = common.batch.min(split.end - position);
            position += step;
            let made = clock;
            clock = clock.next();
            sender.set_clock(clock);
            let origin = sender.next_origin(*sender.newest_epoch().borrow(), clock);
            let request = wire::FinishStepRequest {
                origin: Some(origin.into()),
                split: split.id,
                position,
                steps: 1,
                samples: step,
                loss_sum: 1.0,
                receipts: common.receipts(membership.task, made),
                wants_work: position == split.end,
                pushes: clock.0,
                ..Default::default()
            };
            common.progress.reaches(clock);
            let waits = common.mode == Mode::Sync || request.wants_work;
            let (request, reply) = report(&mut steps, &sender, request, waits).await?;
            unconfirmed = reply.is_none().then_some(request);
            given = reply.and_then(|reply| reply.work);
            common.progress.finished(index);
        }
    }
}

/// Registers the variable, and initializes it if the coordinator chooses this worker.
async fn initialize(common: &Common, membership: &Membership) -> Result<(), MembershipError> {
    let variable = VariableSpec {
        name: "weight".to_owned(),
        shape: vec![common.servers as usize * ELEMENTS],
        kind: VariableKind::Trained,
    };
    loop {
        let request = wire::RegisterVariablesRequest {
            origin: Some(membership.next_origin().into()),
            variables: vec![(&variable).into()],
            training_samples: SAMPLES,
            evaluation_samples: 1,
            ..Default::default()
        };
        let reply = membership.coordinator.register_variables(request).await?;
        match reply.initialization() {
            Initialization::Yours => {
                let origin = membership.next_origin();
                return membership.coordinator.finish_initialization(origin).await;
            }
            Initialization::Done => return Ok(()),
            Initialization::Pending | Initialization::Unspecified => {}
        }
    }
}

impl Common {
    /// Returns the receipts of the step at clock `made`: in sync mode one from each shard, otherwise none.
    fn receipts(&self, task: Task, made: Clock) -> Vec<wire::ShardReceipt> {
        let Some(key) = *self.key.borrow() else {
            return Vec::new();
        };
        if self.mode != Mode::Sync {
            return Vec::new();
        }
        let receipt = |shard| wire::ShardReceipt {
            shard,
            receipt: Bytes::copy_from_slice(&key.receipt(shard, task, made)),
        };
        (0..self.servers).map(receipt).collect()
    }
}

/// Reports a step in the newest epoch. Returns the report and its reply; the reply may be `None` unless `waits` is true.
async fn report(
    steps: &mut StepReports,
    sender: &Sender,
    mut request: wire::FinishStepRequest,
    waits: bool,
) -> Result<(wire::FinishStepRequest, Option<wire::FinishStepReply>), MembershipError> {
    loop {
        match steps.report(request.clone(), waits).await {
            Ok(reply) => {
                if let Some(reply) = &reply {
                    sender.heard(Epoch(reply.epoch));
                }
                return Ok((request, reply));
            }
            Err(MembershipError::Outdated(_)) => {
                let origin = request.origin.get_or_insert_default();
                origin.epoch = sender.must_move_beyond(Epoch(origin.epoch)).0;
            }
            Err(error) => return Err(error),
        }
    }
}
