//! A worker on a thread of this process. It makes steps like a worker in training, but without leases of data from the
//! coordinator.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use candle_core::Device;
use collective::Exchange;
use daemon::membership::{Coordinator, Membership};
use model::registry::Registry;
use network::SystemNetwork;
use network::security::Security;
use replica::{ModelReplica, Positions, Prepared, Replica, Step};
use shared_proto::ids::Clock;
use shared_proto::job::Job;
use shared_proto::step::{Gradients, RowGradients, Want, WantedRows};
use shared_proto::table::hash::hash;
use shared_proto::task;
use worker::strategy::{Joining, ParameterServer, Stores, Strategy};

use super::super::{failed, registration};
use super::Turn;
use super::replicas::{Kind, Rotating, SQUARES, Squares};
use crate::cluster::LocalCluster;
use crate::error::CommandError;

/// The longest time for which the coordinator or a server may be unreachable.
const PATIENCE: Duration = Duration::from_secs(20);

/// The most rows that one push creates.
const FILLED: usize = 25_000;

/// What a worker is told to do.
enum Order {
    Fill(Vec<u64>),
    Steps(Duration),
    /// Pulls until the flag is set.
    Pulls(Arc<AtomicBool>),
}

/// A worker on a thread of its own, which ends when this is dropped.
pub(super) struct Worker {
    orders: SyncSender<Order>,
    turns: Receiver<Result<Turn, CommandError>>,
}

impl Worker {
    /// Starts a worker, and waits until it has joined the cluster.
    pub(super) fn start(
        cluster: &LocalCluster,
        kind: Kind,
        job: &Job,
        index: u32,
    ) -> Result<Self, CommandError> {
        let (orders, queue) = sync_channel(1);
        let (tell, turns) = sync_channel(1);
        let job = job.clone();
        let (address, security) = (cluster.coordinator.to_string(), cluster.security()?);
        std::thread::Builder::new()
            .name(format!("worker-{index}"))
            .spawn(move || {
                let runtime = tokio::runtime::Builder::new_current_thread()
                    .enable_all()
                    .build();
                let runtime = match runtime {
                    Ok(runtime) => runtime,
                    Err(error) => return drop(tell.send(Err(failed(&error)))),
                };
                let member = Member::join(&address, security, kind, job, index);
                let mut member = match task::block_on(&runtime, member) {
                    Ok(member) => member,
                    Err(error) => return drop(tell.send(Err(error))),
                };
                let _ = tell.send(Ok(Turn::default()));
                while let Ok(order) = queue.recv() {
                    let turn = task::block_on(&runtime, member.obey(order));
                    let _ = tell.send(turn);
                }
            })
            .map_err(CommandError::file("a thread"))?;
        let worker = Self { orders, turns };
        worker.end()?;
        Ok(worker)
    }

    /// Creates the rows of these ids by pushes of gradients that are all zero.
    pub(super) fn fill(&self, ids: impl Iterator<Item = u64>) -> Result<(), CommandError> {
        let mut ids = ids.peekable();
        while ids.peek().is_some() {
            let mut some: Vec<u64> = ids.by_ref().take(FILLED).collect();
            some.sort_unstable_by_key(|id| hash(*id));
            let _ = self.orders.send(Order::Fill(some));
            self.end()?;
        }
        Ok(())
    }

    /// Lets the worker pull batches, one after the other, until the returned flag is set.
    pub(super) fn begin_pulls(&self) -> Arc<AtomicBool> {
        let stop = Arc::new(AtomicBool::new(false));
        let _ = self.orders.send(Order::Pulls(Arc::clone(&stop)));
        stop
    }

    /// Lets the worker make steps for a time.
    pub(super) fn begin(&self, time: Duration) {
        let _ = self.orders.send(Order::Steps(time));
    }

    /// Waits until the worker has carried out its order. Returns the figures of the turn.
    pub(super) fn end(&self) -> Result<Turn, CommandError> {
        let ended = || failed(&"the worker has ended");
        self.turns.recv().map_err(|_| ended())?
    }
}

/// A member of the cluster.
struct Member {
    replica: Box<dyn Replica>,
    strategy: ParameterServer,
    _membership: Membership,
    /// The number of the next step.
    step: u64,
    batch: u64,
    /// The number of batches in rotation.
    batches: u64,
}

impl Member {
    async fn join(
        coordinator: &str,
        security: Security,
        kind: Kind,
        job: Job,
        index: u32,
    ) -> Result<Self, CommandError> {
        let network = SystemNetwork::new(security.clone());
        let coordinator = Coordinator::at(coordinator, PATIENCE, security)?;
        let membership = Membership::join(coordinator, registration(index)).await?;
        let batch = u64::from(job.batch_size);
        let replica = replica(kind, job.clone()).await?;
        let network: Arc<dyn network::Network> = Arc::new(network);
        let joining = Joining {
            job: &job,
            membership: &membership,
            network: &network,
            links: &Exchange::default(),
            stores: &Stores::default(),
            patience: PATIENCE,
        };
        let strategy = ParameterServer::join(&joining, &*replica).await;
        Ok(Self {
            strategy: strategy.map_err(|error| failed(&error))?,
            replica,
            _membership: membership,
            // Workers begin with different batches.
            step: u64::from(index) * 5,
            batches: batches(&job),
            batch,
        })
    }

    async fn obey(&mut self, order: Order) -> Result<Turn, CommandError> {
        match order {
            Order::Fill(ids) => self.fill(ids).await.map(|()| Turn::default()),
            Order::Steps(time) => self.steps(time).await,
            Order::Pulls(stop) => self.pulls(&stop).await,
        }
    }

    async fn fill(&mut self, ids: Vec<u64>) -> Result<(), CommandError> {
        let description = self.replica.description();
        let zeros = |spec: &shared_proto::blocks::VariableSpec| vec![0.0; spec.elements()].into();
        let rows = |(table, spec): (usize, &shared_proto::table::TableSpec)| RowGradients {
            values: vec![0.0; ids.len() * spec.dimension as usize].into(),
            rows: Arc::new(WantedRows {
                table,
                ids: ids.clone(),
            }),
        };
        let gradients = Gradients {
            values: description.variables.iter().map(zeros).collect(),
            rows: description.tables.iter().enumerate().map(rows).collect(),
            norm: 0.0,
        };
        let (clock, samples) = (Clock(self.step), self.batch);
        let (strategy, replica) = (&mut self.strategy, &*self.replica);
        let pushed = strategy.push(clock, gradients, samples, None, replica);
        let mut pushed = pushed.await.map_err(|error| failed(&error))?;
        pushed
            .acknowledged()
            .await
            .map_err(|error| failed(&error))?;
        self.step += 1;
        Ok(())
    }

    async fn prepare(&self, step: u64) -> Prepared {
        let start = step % self.batches * self.batch;
        let positions = Positions {
            data_epoch: 0,
            start,
            end: start + self.batch,
        };
        self.replica.prepare(positions).await
    }

    async fn pulls(&mut self, stop: &AtomicBool) -> Result<Turn, CommandError> {
        let mut seconds = Vec::new();
        while !stop.load(Ordering::Relaxed) {
            let mut batch = self.prepare(self.step + seconds.len() as u64).await;
            // Reading the batch is no part of the pull.
            batch.wants().await;
            let began = Instant::now();
            let (clock, replica) = (Clock(self.step), &*self.replica);
            let pulled = self.strategy.pull(clock, &mut batch, replica);
            pulled.await.map_err(|error| failed(&error))?;
            seconds.push(began.elapsed().as_secs_f64());
        }
        seconds.sort_unstable_by(f64::total_cmp);
        let place = seconds.len() * 999 / 1000;
        Ok(Turn {
            slow_pull_seconds: seconds.get(place).copied(),
            ..Turn::default()
        })
    }

    async fn steps(&mut self, time: Duration) -> Result<Turn, CommandError> {
        let began = Instant::now();
        let (mut steps, mut rows) = (0u32, 0);
        let mut batch = self.prepare(self.step).await;
        let mut next = self.prepare(self.step + 1).await;
        while began.elapsed() < time {
            let clock = Clock(self.step);
            let wants = batch.wants().await;
            let distinct = wants.iter().filter_map(Want::rows);
            rows += 2 * distinct.map(|rows| rows.ids.len()).max().unwrap_or(0);
            let pulled = self.strategy.pull(clock, &mut batch, &*self.replica).await;
            pulled.map_err(|error| failed(&error))?;
            let step = Step { clock, rank: 0 };
            let computed = self.replica.compute(batch.positions(), step).await?;
            let (strategy, replica) = (&mut self.strategy, &*self.replica);
            let gradients = computed.gradients;
            let pushed = strategy.push(clock, gradients, self.batch, Some(&mut next), replica);
            let mut pushed = pushed.await.map_err(|error| failed(&error))?;
            pushed
                .acknowledged()
                .await
                .map_err(|error| failed(&error))?;
            steps += 1;
            self.step += 1;
            batch = std::mem::replace(&mut next, self.prepare(self.step + 1).await);
        }
        let seconds = began.elapsed().as_secs_f64();
        Ok(Turn {
            steps_per_second: f64::from(steps) / seconds,
            rows_per_second: rows as f64 / seconds,
            slow_pull_seconds: None,
        })
    }
}

/// Returns the number of batches in the data of a job.
fn batches(job: &Job) -> u64 {
    let samples = job.data.options.get("samples");
    let samples = samples.and_then(|samples| samples.as_integer());
    samples.unwrap_or_default() as u64 / u64::from(job.batch_size)
}

/// Returns the replica of a kind.
async fn replica(kind: Kind, mut job: Job) -> Result<Box<dyn Replica>, CommandError> {
    if kind != Kind::Deepfm {
        SQUARES.clone_into(&mut job.model.name);
    }
    let batch = u64::from(job.batch_size);
    let registry = Registry::builtin().model::<Squares>(SQUARES);
    let model = ModelReplica::start(Arc::new(job.clone()), registry, Device::Cpu).await?;
    if kind != Kind::Communication {
        return Ok(Box::new(model));
    }
    let (count, mut batches) = (batches(&job), Vec::new());
    for number in 0..count {
        let positions = Positions {
            data_epoch: 0,
            start: number * batch,
            end: (number + 1) * batch,
        };
        let mut prepared = model.prepare(positions).await;
        let rows = prepared.wants().await.iter().find_map(|want| match want {
            Want::Rows(rows) => Some(Arc::clone(rows)),
            _ => None,
        });
        batches.extend(rows);
    }
    let description = model.description().clone();
    Ok(Box::new(Rotating::new(description, batches)))
}
