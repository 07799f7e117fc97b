//! Scenarios: calls at given times, and the decisions of the cluster.

use std::time::{Duration, Instant};

use shared_proto::blocks::{Source, VariableSpec};
use shared_proto::ids::{Clock, Origin, Role, RunId, Sequence, Task};
use shared_proto::job::{Job, Mode};
use shared_proto::refusal::Reason;
use shared_proto::view::JobPhase;
use shared_proto::wire;

use super::{Cluster, Initialization, Work, WorkerData};

mod bounds;
mod capacity;
mod checkpoints;
mod drain;
mod evaluations;
mod fault_counts;
mod finished;
mod late;
mod leases;
mod lineage;
mod losses;
mod models;
mod numbers;
mod recovery;
mod saved;
mod status;
mod steps;
mod stop;
mod summary;
mod unable;

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
        scene.join(Role::Ps, "ps");
        let tasks: Vec<Task> = (0..workers)
            .map(|index| scene.join(Role::Worker, &format!("w{index}")))
            .collect();
        assert_eq!(scene.variables(tasks[0]), Initialization::Yours);
        scene.cluster.finish_initialization(tasks[0]).unwrap();
        for task in &tasks {
            scene.work(*task);
        }
        (scene, tasks)
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
        }];
        let cluster = &mut self.cluster;
        cluster
            .register_variables(self.now, task, specs, data(SAMPLES, 7))
            .unwrap()
    }

    fn work(&mut self, task: Task) -> (Work, Clock) {
        self.cluster.lease_work(self.now, task)
    }

    fn split(&mut self, task: Task) -> (crate::splits::Split, Clock) {
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
        let shards = self.cluster.servers().len() as u32;
        (0..shards).map(receipt).collect()
    }

    /// Returns the origin of the next call of a member that has the newest shard map.
    fn origin(&mut self, task: Task, clock: Clock) -> Origin {
        self.sequence += 1;
        Origin {
            job: "flambeau".to_owned(),
            run: RunId::default(),
            task,
            epoch: self.cluster.epoch(),
            clock,
            sequence: Sequence(self.sequence),
        }
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

    /// Returns the addresses of the shards.
    fn addresses(&self) -> Vec<String> {
        let shards = &self.cluster.shard_map().unwrap().shards;
        shards.iter().map(|shard| shard.address.clone()).collect()
    }

    /// Returns the sources of the shards.
    fn sources(&self) -> Vec<Source> {
        let shards = &self.cluster.shard_map().unwrap().shards;
        shards.iter().map(|shard| shard.source.clone()).collect()
    }

    fn server(&self) -> Task {
        self.cluster.live(Role::Ps).next().unwrap().task
    }

    fn report(
        &mut self,
        task: Task,
        data_epoch: u32,
    ) -> Result<(), shared_proto::refusal::Refusal> {
        let report = wire::EvaluationReport {
            data_epoch,
            metrics: [("loss".to_owned(), 0.5)].into(),
            ..wire::EvaluationReport::default()
        };
        let origin = self.origin(task, Clock(0));
        self.cluster.evaluated(self.now, &origin, report)
    }
}

#[test]
fn the_map_is_cut_when_the_jobs_servers_are_there_and_later_ones_are_spares() {
    let mut scene = Scene::new(Mode::Async, Some(2), 1);
    let worker = scene.join(Role::Worker, "w");
    scene.join(Role::Ps, "a");
    assert!(
        matches!(scene.variables(worker), Initialization::Pending(why) if why.contains("1 of 2"))
    );
    scene.join(Role::Ps, "b");
    assert_eq!(scene.variables(worker), Initialization::Yours);
    scene.join(Role::Ps, "c");
    assert_eq!(scene.addresses(), ["a", "b"]);
}

#[test]
fn without_a_number_of_servers_the_map_waits_until_none_has_joined_for_three_seconds() {
    let mut scene = Scene::new(Mode::Async, None, 1);
    let worker = scene.join(Role::Worker, "w");
    assert!(matches!(
        scene.variables(worker),
        Initialization::Pending(_)
    ));
    scene.join(Role::Ps, "a");
    let servers = [worker, scene.server()];
    scene.pass(2, &servers);
    scene.join(Role::Ps, "b");
    scene.pass(2, &servers);
    assert!(matches!(
        scene.variables(worker),
        Initialization::Pending(_)
    ));
    scene.pass(1, &servers);
    assert_eq!(scene.variables(worker), Initialization::Yours);
    assert_eq!(scene.cluster.shard_map().unwrap().shards.len(), 2);
}

#[test]
fn a_restarted_process_supersedes_its_earlier_life() {
    let (mut scene, tasks) = Scene::training(Mode::Async, 2);
    let (held, _) = scene.split(tasks[0]);
    let again = scene.join(Role::Worker, "w0");
    assert_eq!((again.id, again.generation.0), (tasks[0].id, 2));
    let (origin, _) = scene.step(tasks[0], Clock(1), held.id, held.end);
    assert_eq!(
        scene.cluster.admit(&origin).unwrap_err().reason,
        Reason::Superseded
    );
    // Its data is handed out again.
    let (next, _) = scene.split(again);
    assert_eq!((next.start, next.end), (held.start, held.end));
}

#[test]
fn a_member_of_another_run_is_told_to_register_again() {
    let (mut scene, tasks) = Scene::training(Mode::Async, 2);
    let mut origin = scene.origin(tasks[0], Clock(0));
    origin.run = RunId(5);
    // Like the state of an earlier release, the scene has no run number, so none is compared.
    assert_eq!(scene.cluster.admit(&origin), Ok(()));
    scene.cluster = scene.cluster.with_run(RunId(7));
    let refused = scene.cluster.admit(&origin).unwrap_err();
    assert_eq!(refused.reason, Reason::Fenced);
    assert!(refused.message.contains("another run"), "{refused}");
    for run in [0, 7] {
        origin.run = RunId(run);
        assert_eq!(scene.cluster.admit(&origin), Ok(()));
    }
    let saved = scene.cluster.save_all(scene.now);
    assert_eq!(saved.run(), Some(format!("{:016x}", 7)));
}

#[test]
fn initialising_is_leased_to_one_life_and_passes_on_when_that_ends() {
    let mut scene = Scene::new(Mode::Async, Some(1), 1);
    scene.join(Role::Ps, "ps");
    let (first, second) = (scene.join(Role::Worker, "x"), scene.join(Role::Worker, "y"));
    assert_eq!(scene.variables(first), Initialization::Yours);
    assert!(matches!(
        scene.variables(second),
        Initialization::Pending(_)
    ));
    let server = scene.server();
    scene.pass(11, &[second, server]);
    assert_eq!(scene.variables(second), Initialization::Yours);
    assert!(scene.cluster.finish_initialization(first).is_err());
    scene.cluster.finish_initialization(second).unwrap();
    assert!(scene.cluster.refresh_view().initialized);
}

#[test]
fn the_min_clock_is_that_of_the_slowest_with_data_and_never_falls() {
    let (mut scene, tasks) = Scene::training(Mode::Bounded, 3);
    for _ in 0..2 {
        scene.finish(tasks[0]);
    }
    scene.finish(tasks[1]);
    let view = scene.cluster.refresh_view();
    assert_eq!(
        (view.min_clock, view.slowest.clone()),
        (Clock(0), vec![tasks[2]])
    );
    // The slowest dies: the others are not held back by it any more.
    let others = [tasks[0], tasks[1], scene.server()];
    scene.pass(11, &others);
    let view = scene.cluster.refresh_view();
    assert_eq!(
        (view.min_clock, view.slowest.clone()),
        (Clock(1), vec![tasks[1]])
    );
    // A worker that joins begins at the min clock.
    let joiner = scene.join(Role::Worker, "late");
    assert_eq!(scene.split(joiner).1, Clock(1));
    assert_eq!(scene.cluster.refresh_view().min_clock, Clock(1));
}

#[test]
fn a_worker_that_lives_but_does_not_move_is_evicted_and_those_it_held_up_are_not() {
    let (mut scene, tasks) = Scene::training(Mode::Bounded, 2);
    for _ in 0..2 {
        scene.finish(tasks[0]);
    }
    let everybody = [tasks[0], tasks[1], scene.server()];
    scene.pass(61, &everybody);
    assert_eq!(scene.cluster.refresh_view().workers, [tasks[0]]);
}

#[test]
fn a_step_is_committed_when_all_have_finished_or_left_with_those_who_finished() {
    let (mut scene, tasks) = Scene::training(Mode::Sync, 3);
    scene.finish(tasks[2]);
    scene.finish(tasks[0]);
    assert!(scene.cluster.refresh_view().commit.is_none());
    let others = [tasks[0], tasks[2], scene.server()];
    scene.pass(11, &others);
    let commit = scene.cluster.refresh_view().commit.clone().unwrap();
    assert_eq!(commit.step, Clock(0));
    assert_eq!(
        commit.contributors,
        [(tasks[0], 5), (tasks[2], 5)],
        "in rank order"
    );
    // The next step is made without it, with its data first.
    let (split, clock) = scene.split(tasks[0]);
    assert_eq!((split.start, split.end, clock), (5, 10, Clock(1)));
}

#[test]
fn a_part_that_is_not_whole_or_not_of_the_open_step_is_refused() {
    let (mut scene, tasks) = Scene::training(Mode::Sync, 1);
    let (split, clock) = scene.split(tasks[0]);
    for (clock, position) in [
        (clock.next(), split.start),
        (clock.next(), split.start + 1),
        (clock, split.end),
    ] {
        let (origin, request) = scene.step(tasks[0], clock, split.id, position);
        assert!(
            scene
                .cluster
                .finish_step(scene.now, &origin, &request)
                .is_err()
        );
        assert!(scene.cluster.refresh_view().commit.is_none());
    }
    scene.finish(tasks[0]);
    assert!(scene.cluster.refresh_view().commit.is_some());
}

#[test]
fn a_stop_of_the_coordinator_itself_ends_no_lease() {
    let (mut scene, tasks) = Scene::training(Mode::Async, 1);
    scene.pass(1, &[tasks[0], scene.server()]);
    scene.now += Duration::from_secs(3600);
    scene.cluster.tick(scene.now);
    assert_eq!(scene.cluster.refresh_view().workers, tasks);
    assert_eq!(scene.cluster.phase, JobPhase::Training);
}

#[test]
fn who_finished_and_then_died_still_counts() {
    let (mut scene, tasks) = Scene::training(Mode::Sync, 2);
    scene.finish(tasks[1]);
    let others = [tasks[0], scene.server()];
    scene.pass(11, &others);
    scene.finish(tasks[0]);
    let commit = scene.cluster.refresh_view().commit.clone().unwrap();
    assert_eq!(commit.contributors, [(tasks[0], 5), (tasks[1], 5)]);
}

#[test]
fn a_step_that_all_have_left_is_made_anew() {
    let (mut scene, tasks) = Scene::training(Mode::Sync, 1);
    let (lost, _) = scene.split(tasks[0]);
    let again = scene.join(Role::Worker, "w0");
    let (split, clock) = scene.split(again);
    assert_eq!(
        (split.start, split.end, clock),
        (lost.start, lost.end, Clock(0))
    );
    assert!(scene.cluster.refresh_view().commit.is_none());
}

#[test]
fn a_finish_sent_again_counts_once_and_work_asked_for_again_is_the_same() {
    let (mut scene, tasks) = Scene::training(Mode::Async, 1);
    let (split, clock) = scene.split(tasks[0]);
    assert_eq!(scene.split(tasks[0]), (split, clock));
    let (origin, request) = scene.step(tasks[0], Clock(1), split.id, split.start + 5);
    for _ in 0..2 {
        scene
            .cluster
            .finish_step(scene.now, &origin, &request)
            .unwrap();
    }
    assert_eq!(scene.cluster.summary(scene.now).samples, 5);
    assert_eq!(scene.split(tasks[0]).0.start, split.start + 5);
    let (origin, request) = scene.step(tasks[0], Clock(9), split.id, split.end);
    let refused = scene
        .cluster
        .finish_step(scene.now, &origin, &request)
        .unwrap_err();
    assert_eq!(refused.reason, Reason::FutureClock);
}

#[test]
fn each_epoch_ends_with_an_evaluation_and_the_last_one_ends_the_job() {
    for mode in [Mode::Sync, Mode::Async] {
        let (mut scene, tasks) = Scene::training(mode, 2);
        let mut evaluations = Vec::new();
        while scene.cluster.phase == JobPhase::Training {
            for task in &tasks {
                match scene.work(*task).0 {
                    Work::Split(_) => drop(scene.finish(*task)),
                    Work::Evaluate { epoch, save_model } => {
                        if mode == Mode::Sync {
                            // No worker trains meanwhile.
                            for other in tasks.iter().filter(|t| *t != task) {
                                assert!(matches!(scene.work(*other).0, Work::Idle(_)));
                            }
                        }
                        evaluations.push((epoch, save_model));
                        scene.report(*task, epoch).unwrap();
                        // The worker sends the report again, because the answer may have been lost.
                        scene.report(*task, epoch).unwrap();
                    }
                    Work::Idle(_) | Work::Done => {}
                }
            }
        }
        assert_eq!(evaluations, [(0, false), (1, true)]);
        assert_eq!(scene.cluster.refresh_view().phase, JobPhase::Done);
        assert_eq!(scene.cluster.summary(scene.now).samples, 2 * SAMPLES);
        assert_eq!(scene.work(tasks[0]).0, Work::Done);
    }
}

#[test]
fn an_evaluation_passes_on_when_its_worker_dies() {
    let (mut scene, tasks) = Scene::training(Mode::Sync, 2);
    while !matches!(scene.work(tasks[0]).0, Work::Evaluate { .. }) {
        for task in &tasks {
            scene.finish(*task);
        }
    }
    assert!(matches!(scene.work(tasks[1]).0, Work::Idle(_)));
    let others = [tasks[1], scene.server()];
    scene.pass(11, &others);
    assert!(matches!(
        scene.work(tasks[1]).0,
        Work::Evaluate { epoch: 0, .. }
    ));
}

#[test]
fn who_evaluates_waits_for_nobody_where_nobody_has_data() {
    let (mut scene, tasks) = Scene::training(Mode::Bounded, 2);
    let (ahead, behind) = (tasks[0], tasks[1]);
    while scene.split(ahead).0.epoch == 0 {
        scene.finish(ahead);
    }
    // Both finish what they hold, and the one that is ahead asks first what comes next.
    for task in [behind, ahead] {
        let split = scene.split(task).0;
        for _ in 0..(split.end - split.start).div_ceil(5) {
            scene.finish(task);
        }
    }
    let (Work::Evaluate { .. }, clock) = scene.work(ahead) else {
        panic!("no evaluation is due");
    };
    assert!(matches!(scene.work(behind).0, Work::Split(_)));
    assert!(scene.cluster.refresh_view().min_clock < clock);
    let server = scene.server();
    scene.pass(11, &[ahead, server]);
    assert_eq!(scene.cluster.refresh_view().min_clock, clock);
}
