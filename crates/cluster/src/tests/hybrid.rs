//! Jobs of the strategy `hybrid` in sync mode: workers of a ring have the dense values, two servers stage rows and apply them when a
//! step is committed. Whoever dies, each sample is once in the values and once in the rows of each server.

use std::collections::BTreeMap;

use shared_proto::blocks::Source;
use shared_proto::ids::Epoch;
use shared_proto::job::StrategyName;
use shared_proto::table::TableSpec;
use shared_proto::view::Commit;

use super::super::evaluations::Evaluation;
use super::super::ledger::Split;
use super::super::ring::Joined;
use super::super::{ModelSpecs, StoreTask};
use super::checkpoints::place;
use super::*;

mod cases;
mod random;
mod servers;

/// Samples of a worker's step.
const BATCH: u64 = 5;
const SERVERS: usize = 2;

/// Positions of a data epoch.
type Samples = (u32, u64, u64);

/// A worker, with the samples of each step that its dense values are made of, all ranks' together.
#[derive(Clone, Debug)]
struct Worker {
    task: Task,
    name: String,
    ring: Epoch,
    clock: Clock,
    values_ring: Epoch,
    values: Option<Vec<Samples>>,
    /// The steps that it was told to make: the split, the first position of the next one, its rank and the ranks.
    held: Option<(Split, u64, u64, u64)>,
    /// The split of a step that it has made and not reported.
    unreported: Option<u64>,
    copied: Option<u64>,
    /// The clock before the step of which its gradient was left out.
    skipped: Option<Clock>,
}

/// A server, with the samples that its rows are made of.
#[derive(Clone, Debug)]
struct Server {
    task: Task,
    source: Epoch,
    rows: Vec<Samples>,
    staged: BTreeMap<Task, (Clock, Samples)>,
    committed: Option<Commit>,
    /// Its part of each checkpoint.
    saved: BTreeMap<u64, Vec<Samples>>,
}

/// What a checkpoint has: dense values, and the rows of each server.
type Saved = (Vec<Samples>, Vec<Vec<Samples>>);

struct Hybrid {
    scene: Scene,
    workers: Vec<Worker>,
    servers: Vec<Option<Server>>,
    names: u32,
    copies: BTreeMap<u64, (Task, u32, Vec<Samples>)>,
    whole: BTreeMap<u64, Saved>,
}

impl Hybrid {
    /// Workers that have formed their first ring, and a first checkpoint.
    fn new(workers: u32) -> Self {
        let mut job = Job::default();
        (job.epochs, job.batch_size) = (2, BATCH as u32);
        (job.strategy.name, job.strategy.mode) = (StrategyName::Hybrid, Mode::Sync);
        (job.cluster.workers, job.cluster.ps) = (Some(workers), Some(SERVERS as u32));
        (job.cluster.lease_seconds, job.cluster.stall_seconds) = (10.0, 60.0);
        job.checkpoint.every_steps = Some(2);
        let scene = Scene {
            cluster: Cluster::new(job).with_checkpoints(place(), 0),
            now: Instant::now(),
            sequence: 0,
        };
        let mut hybrid = Self {
            scene,
            workers: Vec::new(),
            servers: vec![None; SERVERS],
            names: 0,
            copies: BTreeMap::new(),
            whole: BTreeMap::new(),
        };
        for server in 0..SERVERS {
            hybrid.start_server(server);
        }
        for _ in 0..workers {
            hybrid.start();
        }
        hybrid.join_all();
        hybrid.work(0);
        hybrid.follow();
        assert!(hybrid.write(), "the first checkpoint is ordered");
        hybrid
    }

    fn register(&mut self, name: &str) -> Task {
        let task = self.scene.join(Role::Worker, name);
        let model = ModelSpecs {
            variables: vec![VariableSpec {
                name: "w".to_owned(),
                shape: vec![4],
                ..VariableSpec::default()
            }],
            tables: vec![TableSpec {
                name: "t".to_owned(),
                buckets: 4,
                ..TableSpec::default()
            }],
        };
        let cluster = &mut self.scene.cluster;
        let registered = cluster.register_variables(self.scene.now, task, model, data(SAMPLES, 7));
        assert_eq!(registered.unwrap(), Initialization::Done);
        task
    }

    fn start(&mut self) {
        let name = format!("w{}", self.names);
        self.names += 1;
        let task = self.register(&name);
        self.workers.push(Worker {
            task,
            name,
            ring: Epoch(0),
            clock: Clock(0),
            values_ring: Epoch(0),
            values: None,
            held: None,
            unreported: None,
            copied: None,
            skipped: None,
        });
    }

    fn kill(&mut self, worker: usize) {
        let killed = self.workers.remove(worker);
        let leave = wire::LeaveRequest::default();
        self.scene
            .cluster
            .leave(self.scene.now, killed.task, &leave);
    }

    fn origin(&mut self, worker: usize) -> Origin {
        let Worker {
            task, ring, clock, ..
        } = self.workers[worker];
        self.scene.origin_in_ring(task, ring, clock)
    }

    /// Asks for a ring. A worker that is evicted registers again, and keeps its values.
    fn ask(&mut self, worker: usize) -> Option<wire::Ring> {
        let origin = self.origin(worker);
        let asker = &self.workers[worker];
        let values_ring = asker.values.as_ref().map_or(0, |_| asker.values_ring.0);
        let request = wire::JoinRingRequest {
            values_ring,
            skipped: asker.skipped.map(|clock| clock.0),
            ..wire::JoinRingRequest::default()
        };
        let cluster = &mut self.scene.cluster;
        // As the service does before each call.
        let admitted = cluster.admit(&origin);
        let joined = admitted.and_then(|()| cluster.join_ring(self.scene.now, &origin, &request));
        match joined {
            Ok(Joined::Ring(ring)) => Some(ring),
            Ok(_) => None,
            Err(refusal) => {
                assert_eq!(refusal.reason, Reason::Fenced);
                let name = self.workers[worker].name.clone();
                self.workers[worker].task = self.register(&name);
                self.workers[worker].ring = Epoch(0);
                None
            }
        }
    }

    /// Lets all workers join rings until they are in one.
    fn join_all(&mut self) {
        for _ in 0..20 {
            self.follow();
            let rings: Vec<_> = (0..self.workers.len())
                .map(|worker| self.ask(worker))
                .collect();
            let Some(ring) = rings.iter().flatten().max_by_key(|ring| ring.number) else {
                continue;
            };
            let newest = ring.number;
            if ring.members.len() < self.workers.len()
                || newest != self.scene.cluster.durable.epoch().0
            {
                continue;
            }
            self.take(&ring.clone());
            let regroup = (0..self.workers.len()).any(|w| self.work(w) == Work::Regroup);
            if !regroup {
                return self.follow();
            }
        }
        panic!("no ring: {}", self.scene.cluster.missing());
    }

    /// Lets all workers take the values of a ring.
    fn take(&mut self, ring: &wire::Ring) {
        let members: Vec<Task> = ring
            .members
            .iter()
            .map(|member| member.task.as_ref().unwrap().try_into().unwrap())
            .collect();
        let source = members[ring.source as usize];
        let values = match &ring.checkpoint {
            Some(from) => {
                assert_eq!(from.shard as usize, SERVERS);
                let report = wire::RestoreReport {
                    shard: from.shard,
                    epoch: ring.number,
                    ..wire::RestoreReport::default()
                };
                let cluster = &mut self.scene.cluster;
                cluster.shard_restored(self.scene.now, source, &report);
                self.whole[&from.number].0.clone()
            }
            None => {
                let mut workers = self.workers.iter();
                let source = workers.find(|worker| worker.task == source).unwrap();
                source.values.clone().unwrap_or_default()
            }
        };
        assert_eq!(values.len() as u64, ring.clock, "the values of this clock");
        for worker in &mut self.workers {
            if !ring.broadcast && worker.task != source {
                assert_eq!(worker.values.clone().unwrap_or_default(), values);
            }
            worker.values = Some(values.clone());
            (worker.ring, worker.clock) = (Epoch(ring.number), Clock(ring.clock));
            worker.values_ring = worker.ring;
            (worker.unreported, worker.held) = (None, None);
        }
    }

    fn work(&mut self, worker: usize) -> Work {
        let origin = self.origin(worker);
        let copied = self.workers[worker].copied;
        let cluster = &mut self.scene.cluster;
        let work = cluster.lease_work(self.scene.now, &origin, copied).0;
        let asker = &mut self.workers[worker];
        match work {
            Work::CopyValues { number, shard, .. } => {
                asker.copied = Some(number);
                let values = asker.values.clone().unwrap_or_default();
                self.copies.insert(number, (asker.task, shard, values));
                self.work(worker)
            }
            Work::Evaluate { data_epoch, .. } => {
                let task = asker.task;
                self.scene.report(task, data_epoch).unwrap();
                self.work(worker)
            }
            Work::Shared {
                split, rank, ranks, ..
            } => {
                asker.held = Some((split, split.start, rank.into(), ranks.into()));
                work
            }
            _ => work,
        }
    }

    /// Returns a worker's next step: all ranks' samples, and its own. `None` if it has none, or waits for a commit.
    fn next_step(&mut self, worker: usize) -> Option<(u64, Samples, Samples)> {
        if self.scene.cluster.refresh_view().min_clock < self.workers[worker].clock {
            return None;
        }
        let current = |held: &(Split, u64, u64, u64)| {
            let (split, start, rank, ranks) = *held;
            let within = |position: u64| split.end.min(position);
            let end = within(start + BATCH * ranks);
            let own = (
                within(start + BATCH * rank),
                within(start + BATCH * (rank + 1)),
            );
            let of = |(from, to)| (split.data_epoch, from, to);
            (start < end).then_some((split.id, of((start, end)), of(own)))
        };
        if let Some(step) = self.workers[worker].held.as_ref().and_then(current) {
            return Some(step);
        }
        self.work(worker);
        self.workers[worker].held.as_ref().and_then(current)
    }

    /// Lets some of the workers stage their rows of the next step. Returns the step if all have.
    fn stage(&mut self, which: &[bool]) -> Option<(u64, Samples)> {
        self.follow();
        let mut step = None;
        let mut all = self.servers.iter().all(Option::is_some);
        for worker in 0..self.workers.len() {
            let next = self.next_step(worker);
            let Some((split, samples, own)) = next.filter(|_| which[worker % which.len()]) else {
                all = false;
                continue;
            };
            let Worker { task, clock, .. } = self.workers[worker];
            for server in self.servers.iter_mut().flatten() {
                server.staged.insert(task, (clock, own));
            }
            let same = step.is_none_or(|known| known == (split, samples));
            assert!(same, "all make the same step");
            step = Some((split, samples));
        }
        step.filter(|_| all)
    }

    /// All workers stage the rows of the next step. Some of them then have the sum of all gradients, and report it or not.
    fn step(&mut self, which: &[bool], reports: bool) {
        self.report();
        let Some((split, samples)) = self.stage(&[true]) else {
            return;
        };
        for worker in 0..self.workers.len() {
            if !which[worker % which.len()] {
                continue;
            }
            let made = &mut self.workers[worker];
            made.values.get_or_insert_default().push(samples);
            made.clock = made.clock.next();
            made.unreported = Some(split);
            if let Some((_, position, ..)) = &mut made.held {
                *position = samples.2;
            }
        }
        if reports {
            self.report();
        }
    }

    /// All workers report the steps that they have made.
    fn report(&mut self) {
        for worker in 0..self.workers.len() {
            let Some(split) = self.workers[worker].unreported.take() else {
                continue;
            };
            let origin = self.origin(worker);
            let request = wire::FinishStepRequest {
                split,
                steps: 1,
                samples: BATCH,
                receipts: self.scene.receipts(origin.task, origin.clock),
                ..wire::FinishStepRequest::default()
            };
            let cluster = &mut self.scene.cluster;
            cluster
                .finish_step(self.scene.now, &origin, &request)
                .unwrap();
        }
        self.follow();
    }

    /// Makes steps until the job is done. Checks the values and the rows.
    fn finish(&mut self) {
        for _ in 0..200 {
            if self.scene.cluster.ended() {
                break;
            }
            self.step(&[true], true);
            self.write();
            let mut alive: Vec<Task> = self.workers.iter().map(|worker| worker.task).collect();
            alive.extend(self.servers.iter().flatten().map(|server| server.task));
            self.scene.pass(1, &alive);
        }
        let phase = self.scene.cluster.durable.outcome.phase;
        assert_eq!(phase, JobPhase::Done, "{}", self.scene.cluster.missing());
        let values = self.workers[0].values.clone().unwrap();
        let counted = counts(&values);
        assert_eq!(counted.len() as u64, 2 * SAMPLES);
        assert!(counted.values().all(|times| *times == 1), "{values:?}");
        for worker in &self.workers {
            assert_eq!(worker.values.as_ref(), Some(&values));
        }
        for server in self.servers.iter().flatten() {
            assert_eq!(counts(&server.rows), counted, "{:?}", server.rows);
        }
        assert_eq!(
            self.scene.cluster.durable.done(),
            (values.len() as u64, 2 * SAMPLES)
        );
    }

    fn resume(&mut self) {
        self.scene.cluster = self.scene.resumed().with_checkpoints(place(), 0);
    }
}

/// Returns how often each sample is there.
fn counts(all: &[Samples]) -> BTreeMap<(u32, u64), u32> {
    let mut counts = BTreeMap::new();
    for (data_epoch, start, end) in all {
        for position in *start..*end {
            *counts.entry((*data_epoch, position)).or_default() += 1;
        }
    }
    counts
}
