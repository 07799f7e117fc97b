//! Scenarios: calls at given times, and the decisions of the cluster.

use std::time::{Duration, Instant};

use shared_proto::blocks::{PlacedShard, Source, VariableSpec};
use shared_proto::ids::{Clock, Epoch, Origin, Role, RunNumber, Sequence, Task};
use shared_proto::job::{Job, Mode};
use shared_proto::refusal::Reason;
use shared_proto::view::JobPhase;
use shared_proto::wire;

use super::{Cluster, Durable, Initialization, Turn, Work, WorkerData};

mod bounds;
mod capacity;
mod checkpoints;
mod drain;
mod durable;
mod evaluations;
mod fault_counts;
mod finished;
mod hybrid;
mod increments;
mod late;
mod leases;
mod lineage;
mod losses;
mod members;
mod models;
mod numbers;
mod recovery;
mod ring;
mod rise;
mod status;
mod steps;
mod stop;
mod summary;
mod turn;
mod unable;
mod work;

const SAMPLES: u64 = 40;

/// A cluster with a clock that tests advance.
struct Scene {
    cluster: Cluster,
    now: Instant,
    sequence: u64,
}

fn data(training_samples: u64, evaluation_samples: u64) -> WorkerData {
    WorkerData {
        training_samples,
        evaluation_samples,
        digest: Vec::new(),
    }
}

impl Scene {
    fn new(mode: Mode, ps: Option<u32>, workers: u32) -> Self {
        let mut job = Job::default();
        (job.epochs, job.batch_size) = (2, 5);
        (job.strategy.mode, job.strategy.staleness) = (mode, 1);
        (job.cluster.ps, job.cluster.workers) = (ps, Some(workers));
        (job.cluster.lease_seconds, job.cluster.stall_seconds) = (10.0, 60.0);
        Self {
            cluster: Cluster::new(job),
            now: Instant::now(),
            sequence: 0,
        }
    }

    /// A scene with a server and workers that train.
    fn training(mode: Mode, workers: u32) -> (Self, Vec<Task>) {
        let mut scene = Self::new(mode, Some(1), workers);
        let tasks = scene.begin();
        (scene, tasks)
    }

    /// Lets a server and the job's workers join, and begins the training. Returns the workers.
    fn begin(&mut self) -> Vec<Task> {
        self.join(Role::Ps, "ps");
        let workers = self.cluster.job.workers();
        let tasks: Vec<Task> = (0..workers)
            .map(|index| self.join(Role::Worker, &format!("w{index}")))
            .collect();
        assert_eq!(self.variables(tasks[0]), Initialization::Yours);
        self.cluster.finish_initialization(tasks[0]).unwrap();
        for task in &tasks {
            self.work(*task);
        }
        tasks
    }

    /// Returns the state as another process reads it and checks it.
    fn read_back(&self) -> Durable {
        let stored = serde_json::to_vec(&self.cluster.snapshot(self.now)).unwrap();
        let durable: Durable = serde_json::from_slice(&stored).unwrap();
        assert_eq!(durable.check(), Ok(()));
        durable
    }

    /// Returns the cluster of another coordinator that resumes from this one's state.
    fn resumed(&self) -> Cluster {
        let job = self.cluster.job().clone();
        Cluster::resume(job, self.read_back(), self.now)
    }

    fn join(&mut self, role: Role, identity: &str) -> Task {
        let request = wire::RegisterRequest {
            identity: identity.to_owned(),
            address: identity.to_owned(),
            ..wire::RegisterRequest::default()
        };
        self.cluster.register(self.now, role, request).unwrap()
    }

    fn variables(&mut self, task: Task) -> Initialization {
        let specs = vec![VariableSpec {
            name: "w".to_owned(),
            shape: vec![4],
            ..VariableSpec::default()
        }];
        let cluster = &mut self.cluster;
        cluster
            .register_variables(self.now, task, specs, data(SAMPLES, 7))
            .unwrap()
    }

    fn work(&mut self, task: Task) -> (Work, Clock) {
        let origin = self.origin(task, Clock(0));
        self.cluster.lease_work(self.now, &origin, None)
    }

    fn split(&mut self, task: Task) -> (super::ledger::Split, Clock) {
        match self.work(task) {
            (Work::Split(split), clock) => (split, clock),
            (other, _) => panic!("{task} has {other:?}"),
        }
    }

    /// Finishes one step of the split that the task holds.
    fn finish(&mut self, task: Task) -> Clock {
        let (split, clock) = self.split(task);
        let position = split.end.min(split.start + 5);
        let (origin, request) = self.step(task, clock.next(), split.id, position);
        self.cluster
            .finish_step(self.now, &origin, &request)
            .unwrap();
        clock.next()
    }

    fn step(
        &mut self,
        task: Task,
        clock: Clock,
        split: u64,
        position: u64,
    ) -> (Origin, wire::FinishStepRequest) {
        let origin = self.origin(task, clock);
        let request = wire::FinishStepRequest {
            split,
            position,
            steps: 1,
            samples: 5,
            receipts: self.receipts(task, clock),
            ..wire::FinishStepRequest::default()
        };
        (origin, request)
    }

    /// Returns the receipts of the step before a clock.
    fn receipts(&self, task: Task, clock: Clock) -> Vec<wire::ShardReceipt> {
        let key = self.cluster.receipt_key();
        let step = Clock(clock.0.saturating_sub(1));
        let receipt = |shard| wire::ShardReceipt {
            shard,
            receipt: key.receipt(shard, task, step).to_vec().into(),
        };
        let shards = self.cluster.durable.servers().len() as u32;
        (0..shards).map(receipt).collect()
    }

    /// Returns the origin of the next call of a member that has the newest shard map.
    fn origin(&mut self, task: Task, clock: Clock) -> Origin {
        self.sequence += 1;
        Origin {
            job: "flambeau".to_owned(),
            run: RunNumber::default(),
            task,
            epoch: self.cluster.durable.epoch(),
            clock,
            sequence: Sequence(self.sequence),
        }
    }

    fn origin_in_ring(&mut self, task: Task, ring: Epoch, clock: Clock) -> Origin {
        let mut origin = self.origin(task, clock);
        origin.epoch = ring;
        origin
    }

    /// Lets time pass while these members send heartbeats.
    fn pass(&mut self, seconds: u64, alive: &[Task]) {
        for _ in 0..seconds {
            self.now += Duration::from_secs(1);
            for task in alive {
                self.cluster.heartbeat(self.now, *task);
            }
            self.cluster.tick(self.now);
        }
    }

    /// Returns the addresses of the shards; an empty one for a lost server.
    fn addresses(&self) -> Vec<String> {
        let shards = &self.cluster.shard_map().unwrap().shards;
        let address = |shard: &PlacedShard| shard.server.address().unwrap_or_default().to_owned();
        shards.iter().map(address).collect()
    }

    /// Returns the sources of the shards.
    fn sources(&self) -> Vec<Source> {
        let shards = &self.cluster.shard_map().unwrap().shards;
        shards.iter().map(|shard| shard.source.clone()).collect()
    }

    fn server(&self) -> Task {
        self.cluster.durable.live(Role::Ps).next().unwrap().task
    }

    /// Reports an evaluation.
    fn report(
        &mut self,
        task: Task,
        data_epoch: u32,
    ) -> Result<(), shared_proto::refusal::Refusal> {
        self.report_counts(task, data_epoch).map(drop)
    }

    /// Reports an evaluation. Returns whether it counts.
    fn report_counts(
        &mut self,
        task: Task,
        data_epoch: u32,
    ) -> Result<bool, shared_proto::refusal::Refusal> {
        let report = wire::EvaluationReport {
            data_epoch,
            metrics: [("loss".to_owned(), 0.5)].into(),
            ..wire::EvaluationReport::default()
        };
        let origin = self.origin(task, Clock(0));
        self.cluster.evaluated(self.now, &origin, report)
    }
}
