//! Jobs without servers: workers that form rings, make steps together, die and come back.

use std::collections::BTreeMap;

use shared_proto::ids::Epoch;
use shared_proto::job::StrategyName;
use shared_proto::refusal::Refusal;

use super::super::ring::Joined;
use super::super::{StoreTask, ledger::Split, saving::Failure};
use super::checkpoints::place;
use super::*;

mod cases;
mod groups;
mod random;
mod saved;
mod status;

/// Samples of a worker's step.
const BATCH: u64 = 5;

/// The samples of each step that values are made of: the data epoch and the positions, all ranks' together.
type Steps = Vec<(u32, u64, u64)>;

/// A worker of the model, with the samples that its values are made of.
#[derive(Clone, Debug)]
struct Worker {
    task: Task,
    ring: Epoch,
    clock: Clock,
    /// The ring in which it got its values, or made its newest step.
    values_ring: Epoch,
    /// `None` before it has values.
    values: Option<Steps>,
    /// The steps that it has made and not reported, all of one split.
    unreported: u64,
    /// The newest checkpoint for which it has copied its values.
    copied: Option<u64>,
    /// The steps that it was told to make, with the first position of the next one, and the number of ranks.
    held: Option<(Split, u64, u64)>,
}

/// A cluster without servers, and its workers.
struct Rings {
    scene: Scene,
    workers: Vec<Worker>,
    names: u32,
    evaluated: Vec<u32>,
    /// Workers that were evicted, and still have their values.
    evicted: Vec<Worker>,
    has_checkpoints: bool,
    /// The values that were copied for a checkpoint, and the worker that writes them.
    copies: BTreeMap<u64, (Task, Steps)>,
    /// The checkpoints that are whole.
    whole: BTreeMap<u64, Steps>,
}

fn job(workers: u32) -> Job {
    let mut job = Job::default();
    (job.epochs, job.batch_size) = (2, BATCH as u32);
    (job.strategy.name, job.strategy.mode) = (StrategyName::MultiWorkerMirrored, Mode::Sync);
    job.cluster.workers = Some(workers);
    (job.cluster.lease_seconds, job.cluster.stall_seconds) = (10.0, 60.0);
    job
}

impl Rings {
    /// Workers that have formed their first ring.
    fn new(workers: u32) -> Self {
        let mut rings = Self::empty(workers);
        for _ in 0..workers {
            rings.start();
        }
        rings.join_all();
        rings
    }

    fn empty(workers: u32) -> Self {
        let scene = Scene {
            cluster: Cluster::new(job(workers)),
            now: Instant::now(),
            sequence: 0,
        };
        Self {
            scene,
            workers: Vec::new(),
            names: 0,
            evaluated: Vec::new(),
            evicted: Vec::new(),
            has_checkpoints: false,
            copies: BTreeMap::new(),
            whole: BTreeMap::new(),
        }
    }

    /// Workers that have formed their first ring, and have written the first checkpoint.
    fn with_checkpoints(workers: u32) -> Self {
        let mut rings = Self::empty(workers);
        let job = &mut rings.scene.cluster.job;
        job.checkpoint.every_steps = Some(2);
        rings.scene.cluster = Cluster::new(job.clone()).with_checkpoints(place(), 0);
        rings.has_checkpoints = true;
        for _ in 0..workers {
            rings.start();
        }
        rings.join_all();
        rings.work(0);
        assert!(rings.write(true), "the first checkpoint is ordered");
        rings
    }

    /// Lets another coordinator continue.
    fn resume(&mut self) {
        let resumed = self.scene.resumed();
        self.scene.cluster = match self.has_checkpoints {
            true => resumed.with_checkpoints(place(), 0),
            false => resumed,
        };
    }

    /// The worker that has copied its values for a checkpoint reports that it has written them, or could not. Returns whether
    /// the checkpoint is whole.
    fn write(&mut self, succeeds: bool) -> bool {
        let Some(order) = self.scene.cluster.refresh_view().checkpoint else {
            return false;
        };
        let Some((writer, values)) = self.copies.get(&order.number).cloned() else {
            return false;
        };
        if !self.workers.iter().any(|worker| worker.task == writer) {
            return false;
        }
        let error = if succeeds { "" } else { "no room" };
        let report = wire::CheckpointReport {
            number: order.number,
            error: error.to_owned(),
            ..wire::CheckpointReport::default()
        };
        let now = self.scene.now;
        self.scene.cluster.shard_saved(now, writer, report);
        match self.scene.cluster.take_store_task() {
            Some(StoreTask::Write(manifest, _)) => {
                assert_eq!(manifest.number, order.number);
                assert_eq!(manifest.clock as usize, values.len());
                let written: Result<(), Failure> = Ok(());
                let whole = self
                    .scene
                    .cluster
                    .manifest_written(now, order.number, written);
                if whole {
                    self.whole.insert(order.number, values);
                }
                whole
            }
            _ => false,
        }
    }

    /// Starts a worker, up to its first request to join a ring.
    fn start(&mut self) -> usize {
        let task = self.scene.join(Role::Worker, &format!("w{}", self.names));
        self.names += 1;
        assert_eq!(self.scene.variables(task), Initialization::Done);
        self.workers.push(Worker {
            task,
            ring: Epoch(0),
            clock: Clock(0),
            values_ring: Epoch(0),
            values: None,
            unreported: 0,
            copied: None,
            held: None,
        });
        self.workers.len() - 1
    }

    fn origin(&mut self, worker: usize) -> Origin {
        let Worker {
            task, ring, clock, ..
        } = self.workers[worker];
        self.scene.origin_in_ring(task, ring, clock)
    }

    fn ask(&mut self, worker: usize, lost: Option<Task>) -> Result<Joined, Refusal> {
        let origin = self.origin(worker);
        let request = wire::JoinRingRequest {
            origin: None,
            values_ring: match &self.workers[worker].values {
                Some(_) => self.workers[worker].values_ring.0,
                None => 0,
            },
            lost: lost.map(Into::into),
            skipped: None,
        };
        self.scene
            .cluster
            .join_ring(self.scene.now, &origin, &request)
    }

    /// All workers die, and others start.
    fn replace_all(&mut self, others: usize) {
        while !self.workers.is_empty() {
            self.kill(0);
        }
        for _ in 0..others {
            self.start();
        }
    }

    /// Lets all workers join the next ring, take the values that it names, and ask for work.
    fn join_all(&mut self) {
        let ring = self.form();
        self.take(&ring, &self.all());
        self.enter(&ring);
    }

    /// Lets the workers that have taken the values of a ring ask for work.
    fn enter(&mut self, ring: &wire::Ring) {
        for worker in self.all() {
            if self.workers[worker].ring == Epoch(ring.number) {
                self.work(worker);
            }
        }
    }

    /// Lets all workers join the next ring.
    fn form(&mut self) -> wire::Ring {
        let mut ring = None;
        // A newcomer breaks the ring of the others.
        let mut order = self.all();
        order.sort_by_key(|worker| self.workers[*worker].ring);
        // Of several newcomers, one breaks the ring of those before it, which ask again.
        for worker in order.repeat(2) {
            if let Joined::Ring(formed) = self.ask(worker, None).unwrap() {
                ring = Some(formed);
            }
        }
        ring.expect("a ring is formed when the last has joined")
    }

    /// Lets some of the workers take the values of a ring.
    fn take(&mut self, ring: &wire::Ring, which: &[usize]) {
        let tasks: Vec<Task> = ring
            .members
            .iter()
            .map(|member| member.task.as_ref().unwrap().try_into().unwrap())
            .collect();
        let mut live: Vec<Task> = self.workers.iter().map(|worker| worker.task).collect();
        live.sort_by_key(|task| task.id.index);
        assert_eq!(tasks, live, "all live workers are in the ring");
        let source = tasks[ring.source as usize];
        let source = self.workers.iter().find(|worker| worker.task == source);
        let source = source.unwrap().clone();
        let values = match &ring.checkpoint {
            Some(from) => self.load(source.task, ring.number, from),
            None => source.values.unwrap_or_default(),
        };
        assert_eq!(values.len() as u64, ring.clock, "the values of this clock");
        for (index, worker) in self.workers.iter_mut().enumerate() {
            // The source has its values already.
            if !which.contains(&index) && worker.task != source.task {
                continue;
            }
            if !ring.broadcast && worker.task != source.task {
                assert_eq!(worker.values.as_ref(), Some(&values));
            }
            worker.values = Some(values.clone());
            (worker.ring, worker.clock) = (Epoch(ring.number), Clock(ring.clock));
            worker.values_ring = worker.ring;
            (worker.unreported, worker.held) = (0, None);
        }
    }

    /// Lets a worker load the values of a checkpoint.
    fn load(&mut self, task: Task, ring: u64, from: &wire::RingCheckpoint) -> Steps {
        let report = wire::RestoreReport {
            epoch: ring,
            ..wire::RestoreReport::default()
        };
        let now = self.scene.now;
        self.scene.cluster.shard_restored(now, task, &report);
        self.whole[&from.number].clone()
    }

    fn work(&mut self, worker: usize) -> Work {
        let origin = self.origin(worker);
        let copied = self.workers[worker].copied;
        let cluster = &mut self.scene.cluster;
        match cluster.lease_work(self.scene.now, &origin, copied).0 {
            Work::CopyValues { number, .. } => {
                let copier = &mut self.workers[worker];
                copier.copied = Some(number);
                let values = copier.values.clone().unwrap_or_default();
                self.copies.insert(number, (copier.task, values));
                self.work(worker)
            }
            work => work,
        }
    }

    /// Returns the samples of the next step, all ranks' together; `None` if this worker has no step to make. It asks for work
    /// only once it has made and reported all steps that it was told to make.
    fn next_step(&mut self, worker: usize) -> Option<(u64, (u32, u64, u64))> {
        let current = |(split, start, ranks): (Split, u64, u64)| {
            let end = split.end.min(start + BATCH * ranks);
            (start < end).then_some((split.id, (split.data_epoch, start, end)))
        };
        let asker = &self.workers[worker];
        if let Some(step) = asker.held.and_then(current) {
            return Some(step);
        }
        if asker.unreported > 0 {
            return None;
        }
        match self.work(worker) {
            Work::Shared {
                split, rank, ranks, ..
            } => {
                let groups = self.scene.cluster.job.strategy.stage_groups();
                let members = self.workers.len() as u64;
                assert_eq!(u64::from(ranks), groups.computing(members));
                // The others are spare.
                assert!(rank < ranks || ranks < members as u32);
                let held = (split, split.start, u64::from(ranks));
                self.workers[worker].held = Some(held);
                current(held)
            }
            Work::Evaluate { data_epoch, .. } => {
                self.evaluated.push(data_epoch);
                let task = self.workers[worker].task;
                self.scene.report(task, data_epoch).unwrap();
                None
            }
            Work::Idle(_) | Work::Done => None,
            other => panic!("{other:?}"),
        }
    }

    /// Lets some of the workers make the next step, each of which then has the sum of all gradients. `report`: they also report.
    fn step(&mut self, which: &[usize], report: bool) {
        for worker in which {
            let Some((split, samples)) = self.next_step(*worker) else {
                continue;
            };
            let made = &mut self.workers[*worker];
            made.values.get_or_insert_default().push(samples);
            made.clock = made.clock.next();
            made.unreported += 1;
            if let Some((_, position, _)) = &mut made.held {
                *position = samples.2;
            }
            if report {
                self.report(*worker, split).unwrap();
            }
        }
    }

    fn report(&mut self, worker: usize, split: u64) -> Result<(), Refusal> {
        let origin = self.origin(worker);
        let steps = self.workers[worker].unreported;
        let request = wire::FinishStepRequest {
            split,
            steps,
            samples: steps * BATCH,
            ..wire::FinishStepRequest::default()
        };
        let cluster = &mut self.scene.cluster;
        cluster.finish_step(self.scene.now, &origin, &request)?;
        self.workers[worker].unreported = 0;
        Ok(())
    }

    fn all(&self) -> Vec<usize> {
        (0..self.workers.len()).collect()
    }

    /// Evicts a worker, which keeps its values.
    fn evict(&mut self, worker: usize) {
        let evicted = self.kill(worker);
        self.evicted.push(evicted);
    }

    /// Lets an evicted worker register again, with its values.
    fn come_back(&mut self) {
        if let Some(evicted) = self.evicted.pop() {
            let again = self.start();
            let task = self.workers[again].task;
            self.workers[again] = Worker {
                task,
                ring: Epoch(0),
                unreported: 0,
                copied: None,
                held: None,
                ..evicted
            };
        }
    }

    fn kill(&mut self, worker: usize) -> Worker {
        let killed = self.workers.remove(worker);
        let leave = wire::LeaveRequest::default();
        self.scene
            .cluster
            .leave(self.scene.now, killed.task, &leave);
        killed
    }

    /// Joins all workers, checks that no step counts, and finishes the job.
    fn finish_with_no_step_counted(&mut self) {
        self.join_all();
        assert_eq!(self.workers[0].clock, Clock(0));
        assert_eq!(self.scene.cluster.durable.done(), (0, 0));
        self.finish();
    }

    /// Makes steps until the job is done, and checks that each sample is in the values once.
    fn finish(&mut self) {
        for _ in 0..200 {
            for worker in self.all() {
                if self.scene.cluster.ended() {
                    break;
                }
                self.step(&[worker], true);
                self.write(true);
            }
            let alive: Vec<Task> = self.workers.iter().map(|worker| worker.task).collect();
            self.scene.pass(1, &alive);
        }
        let phase = self.scene.cluster.durable.outcome.phase;
        assert_eq!(phase, JobPhase::Done, "{}", self.scene.cluster.missing());
        let evaluated = &self.scene.cluster.durable.evaluations.done;
        let evaluated: Vec<u32> = evaluated.iter().map(|done| done.data_epoch).collect();
        assert_eq!(evaluated, [0, 1]);
        if !self.has_checkpoints {
            assert_eq!(self.evaluated, [0, 1], "each one is made once");
        }
        let mut seen = BTreeMap::<(u32, u64), u32>::new();
        let values = self.workers[0].values.clone().unwrap();
        for (data_epoch, start, end) in &values {
            for position in *start..*end {
                *seen.entry((*data_epoch, position)).or_default() += 1;
            }
        }
        assert_eq!(seen.len() as u64, 2 * SAMPLES);
        assert!(seen.values().all(|times| *times == 1), "{values:?}");
        for worker in &self.workers {
            assert_eq!(
                worker.values.as_ref(),
                Some(&values),
                "all have the same values"
            );
        }
        let (steps, samples) = self.scene.cluster.durable.done();
        assert_eq!((steps, samples), (values.len() as u64, 2 * SAMPLES));
    }
}
