//! Jobs without servers: workers that form rings, make steps together, die and come back.

use std::collections::BTreeMap;

use proptest::prelude::*;
use shared_proto::ids::Epoch;
use shared_proto::job::StrategyName;
use shared_proto::refusal::Refusal;

use super::super::ring::Joined;
use super::*;

/// Samples of a worker's step.
const BATCH: u64 = 5;

/// A worker of the model, with the samples that its values are made of.
#[derive(Clone, Debug)]
struct Worker {
    task: Task,
    ring: Epoch,
    clock: Clock,
    /// The ring in which it got its values, or made its newest step.
    values_ring: Epoch,
    /// The samples of each step that its values have, all ranks' together; none before it has values.
    values: Option<Vec<(u32, u64, u64)>>,
    /// The steps that it has made and not reported, all of one split.
    unreported: u64,
}

/// A cluster without servers, and its workers.
struct Rings {
    scene: Scene,
    workers: Vec<Worker>,
    names: u32,
    evaluated: Vec<u32>,
    /// Workers that were evicted, and still have their values.
    evicted: Vec<Worker>,
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
        });
        self.workers.len() - 1
    }

    fn origin(&mut self, worker: usize) -> Origin {
        let Worker {
            task, ring, clock, ..
        } = self.workers[worker];
        let origin = self.scene.origin(task, clock);
        Origin {
            epoch: ring,
            ..origin
        }
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
        };
        self.scene
            .cluster
            .join_ring(self.scene.now, &origin, &request)
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
        for worker in order {
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
        let values = source.values.unwrap_or_default();
        if self.workers.iter().any(|worker| worker.values.is_some()) {
            assert_eq!(
                source.clock.0, ring.clock,
                "the source has the values of this clock"
            );
        }
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
            worker.unreported = 0;
        }
    }

    fn work(&mut self, worker: usize) -> Work {
        let origin = self.origin(worker);
        let cluster = &mut self.scene.cluster;
        cluster.lease_work(self.scene.now, &origin).0
    }

    /// Returns the samples of the next step, all ranks' together; none if this worker has no step to make.
    fn next_step(&mut self, worker: usize) -> Option<(u64, (u32, u64, u64))> {
        match self.work(worker) {
            Work::Shared { split, rank, ranks } => {
                assert_eq!(ranks as usize, self.workers.len());
                assert!(rank < ranks);
                let made = self.workers[worker].unreported * BATCH * u64::from(ranks);
                let start = split.start + made;
                let end = split.end.min(start + BATCH * u64::from(ranks));
                (start < end).then_some((split.id, (split.data_epoch, start, end)))
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

    /// Makes steps until the job is done, and checks that each sample is in the values once.
    fn finish(&mut self) {
        for _ in 0..200 {
            for worker in self.all() {
                if self.scene.cluster.ended() {
                    break;
                }
                self.step(&[worker], true);
            }
        }
        assert_eq!(self.scene.cluster.durable.outcome.phase, JobPhase::Done);
        assert_eq!(self.evaluated, [0, 1]);
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
        let (steps, samples) = self.scene.cluster.done();
        assert_eq!((steps, samples), (values.len() as u64, 2 * SAMPLES));
    }
}

#[test]
fn a_ring_trains_to_the_end_of_the_data() {
    for workers in [1, 2, 3] {
        let mut rings = Rings::new(workers);
        assert!(rings.scene.cluster.shard_map().is_err());
        rings.finish();
        let steps = 2 * SAMPLES.div_ceil(BATCH * u64::from(workers));
        assert_eq!(rings.scene.cluster.done().0, steps);
    }
}

#[test]
fn a_step_that_none_has_made_is_made_again_with_the_same_data() {
    let mut rings = Rings::new(3);
    rings.step(&rings.all(), true);
    let (_, abandoned) = rings.next_step(0).unwrap();
    rings.kill(1);
    assert_eq!(rings.work(0), Work::Regroup);
    rings.join_all();
    let (_, again) = rings.next_step(0).unwrap();
    assert_eq!((again.0, again.1), (abandoned.0, abandoned.1));
    rings.finish();
}

#[test]
fn a_step_that_one_has_made_is_made_by_all() {
    let mut rings = Rings::new(3);
    // It has the sum, and its report is lost.
    rings.step(&[2], false);
    rings.kill(0);
    rings.join_all();
    assert_eq!(rings.workers[0].clock, Clock(1));
    assert_eq!(rings.scene.cluster.done(), (1, 3 * BATCH));
    rings.finish();
}

#[test]
fn a_step_that_only_a_dead_worker_has_made_does_not_count() {
    let mut rings = Rings::new(3);
    rings.step(&[1], true);
    rings.kill(1);
    rings.join_all();
    assert_eq!(rings.workers[0].clock, Clock(0));
    assert_eq!(rings.scene.cluster.done(), (0, 0));
    rings.finish();
}

#[test]
fn a_step_counts_only_once_others_have_it() {
    let mut rings = Rings::new(3);
    rings.step(&[2], true);
    rings.kill(0);
    let ring = rings.form();
    assert_eq!((ring.clock, ring.source, ring.broadcast), (1, 1, true));
    // The only worker with the step dies before another has taken its values.
    rings.take(&ring, &[]);
    rings.enter(&ring);
    rings.kill(1);
    rings.join_all();
    assert_eq!(rings.workers[0].clock, Clock(0));
    assert_eq!(rings.scene.cluster.done(), (0, 0));
    rings.finish();
}

#[test]
fn values_with_an_abandoned_step_do_not_count() {
    let mut rings = Rings::new(3);
    rings.step(&[2], false);
    rings.evict(2);
    rings.join_all();
    rings.step(&rings.all(), true);
    // All have one step now, and the worker that comes back has another one than the others.
    rings.come_back();
    let ring = rings.form();
    assert_eq!((ring.clock, ring.broadcast), (1, true));
    rings.take(&ring, &rings.all());
    rings.join_all();
    rings.finish();
}

#[test]
fn a_newcomer_takes_the_values_of_the_others() {
    let mut rings = Rings::new(2);
    rings.step(&rings.all(), true);
    let newcomer = rings.start();
    assert!(matches!(rings.ask(newcomer, None), Ok(Joined::Pending(_))));
    assert!(
        rings
            .scene
            .cluster
            .missing()
            .contains("worker-0 has not joined"),
        "{}",
        rings.scene.cluster.missing()
    );
    rings.join_all();
    assert_eq!(rings.workers[newcomer].clock, Clock(1));
    rings.finish();
}

#[test]
fn a_worker_that_asks_twice_gets_the_same_ring() {
    let mut rings = Rings::new(2);
    let late = rings.workers[0].clone();
    rings.workers[0].ring = Epoch(0);
    let Ok(Joined::Ring(ring)) = rings.ask(0, None) else {
        panic!("its answer was lost, and the ring still stands");
    };
    assert_eq!(Epoch(ring.number), late.ring);
    // A member that asks with the number of the ring has lost a link of it.
    rings.workers[0].ring = late.ring;
    assert!(matches!(rings.ask(0, None), Ok(Joined::Pending(_))));
    rings.join_all();
    assert!(rings.workers[0].ring > late.ring);
    rings.finish();
}

#[test]
fn two_workers_that_cannot_reach_each_other_are_parted() {
    let mut rings = Rings::new(3);
    let (one, other) = (rings.workers[0].task, rings.workers[2].task);
    for _ in 0..2 {
        assert!(matches!(rings.ask(0, Some(other)), Ok(Joined::Pending(_))));
        rings.ask(1, None).unwrap();
        match rings.ask(2, Some(one)) {
            Ok(Joined::Ring(ring)) => rings.take(&ring, &rings.all()),
            other => assert_eq!(other.unwrap_err().reason, Reason::Fenced),
        }
    }
    let member = rings.scene.cluster.member(other.id).unwrap();
    assert!(!member.alive);
    assert_eq!(member.gone, "another worker cannot reach it");
    rings.workers.remove(2);
    rings.join_all();
    rings.finish();
}

#[test]
fn a_job_fails_when_all_values_are_lost() {
    let mut rings = Rings::new(2);
    rings.step(&rings.all(), true);
    rings.kill(0);
    rings.kill(0);
    let newcomer = rings.start();
    assert_eq!(rings.ask(newcomer, None), Ok(Joined::Ended));
    let error = &rings.scene.cluster.durable.outcome.error;
    assert!(
        error.contains("all workers with the values are gone"),
        "{error}"
    );
}

#[test]
fn a_worker_that_holds_up_a_ring_is_evicted_alone() {
    let mut rings = Rings::new(3);
    rings.step(&[0, 2], false);
    for waits in [0, 2] {
        let on = vec![rings.workers[1].task.into()];
        rings.scene.cluster.waiting(rings.workers[waits].task, on);
    }
    let tasks: Vec<Task> = rings.workers.iter().map(|worker| worker.task).collect();
    rings.scene.pass(62, &tasks);
    let alive: Vec<bool> = tasks
        .iter()
        .map(|task| rings.scene.cluster.member(task.id).unwrap().alive)
        .collect();
    assert_eq!(alive, [true, false, true]);
}

#[test]
fn impossible_values_and_foreign_calls_are_refused() {
    let mut rings = Rings::new(2);
    rings.workers[0].unreported = 1;
    assert_eq!(
        rings.report(0, 99),
        Ok(()),
        "a report without a new step changes nothing"
    );
    rings.workers[0].clock = Clock(1);
    assert_eq!(rings.report(0, 99).unwrap_err().reason, Reason::NotLeased);

    let (mut scene, workers) = Scene::training(Mode::Sync, 1);
    let origin = scene.origin(workers[0], Clock(0));
    let asked = scene
        .cluster
        .join_ring(scene.now, &origin, &wire::JoinRingRequest::default());
    assert_eq!(asked.unwrap_err().reason, Reason::Malformed);
}

#[test]
fn a_stored_ring_that_is_impossible_is_refused() {
    let mut rings = Rings::new(2);
    rings.step(&rings.all(), true);
    let stored = rings.scene.read_back();
    assert_eq!(stored.check(), Ok(()));
    let mut value = serde_json::to_value(&stored).unwrap();
    value["ring"]["source"] = 7.into();
    let wrong: Durable = serde_json::from_value(value).unwrap();
    assert_eq!(wrong.check(), Err("rank 7 of 2 has the values".to_owned()));
}

/// What happens to a cluster.
#[derive(Clone, Debug)]
enum Event {
    /// Some of the workers make a step, and report it or not.
    Step(Vec<bool>, bool),
    Kill(usize),
    /// A worker is evicted, and keeps its values.
    Evict(usize),
    /// An evicted worker registers again.
    ComeBack,
    /// The next ring is formed, but only some of its members take the values before one dies.
    Half(Vec<bool>, usize),
    Start,
    /// The coordinator starts again with what it has persisted.
    Resume,
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        6 => (prop::collection::vec(any::<bool>(), 4), any::<bool>())
            .prop_map(|(which, report)| Event::Step(which, report)),
        4 => Just(Event::Step(vec![true; 4], true)),
        1 => (0usize..4).prop_map(Event::Kill),
        1 => (0usize..4).prop_map(Event::Evict),
        1 => Just(Event::ComeBack),
        1 => (prop::collection::vec(any::<bool>(), 4), 0usize..4)
            .prop_map(|(which, dies)| Event::Half(which, dies)),
        1 => Just(Event::Start),
        1 => Just(Event::Resume),
    ]
}

proptest! {
    /// After any deaths, joins and restarts, each sample is in the values once, and all workers have the same values.
    #[test]
    fn each_sample_counts_once(events in prop::collection::vec(event(), 0..40)) {
        let mut rings = Rings::new(3);
        for event in events {
            match event {
                Event::Step(which, report) => {
                    // None makes a second step before all have made the first: it lacks their gradients.
                    let behind = rings.workers.iter().map(|worker| worker.clock).min().unwrap();
                    let able: Vec<usize> = rings.all().into_iter()
                        .filter(|i| which[i % which.len()] && rings.workers[*i].clock == behind)
                        .collect();
                    rings.step(&able, report);
                }
                Event::Kill(worker) if rings.workers.len() > 1 => {
                    rings.kill(worker % rings.workers.len());
                    rings.join_all();
                }
                Event::Start if rings.workers.len() < 4 => {
                    if !rings.scene.cluster.ended() {
                        rings.start();
                        rings.join_all();
                    }
                }
                Event::Resume => rings.scene.cluster = rings.scene.resumed(),
                Event::Evict(worker) if rings.workers.len() > 1 => {
                    rings.evict(worker % rings.workers.len());
                    rings.join_all();
                }
                Event::ComeBack if rings.workers.len() < 4 => {
                    rings.come_back();
                    rings.join_all();
                }
                Event::Half(which, dies) if rings.workers.len() > 1 => {
                    let ring = rings.form();
                    let some = rings.all().into_iter().filter(|i| which[i % which.len()]);
                    rings.take(&ring, &some.collect::<Vec<_>>());
                    rings.enter(&ring);
                    rings.kill(dies % rings.workers.len());
                    rings.join_all();
                }
                Event::Kill(_) | Event::Start | Event::Evict(_) | Event::ComeBack | Event::Half(..) => {}
            }
            if rings.scene.cluster.ended() {
                break;
            }
        }
        if !rings.scene.cluster.ended() {
            rings.join_all();
            rings.finish();
        }
    }
}
