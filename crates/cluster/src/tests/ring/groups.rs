//! Stage groups: workers that hold a model together.

use shared_proto::wire::WorkerFailure;

use super::*;

impl Rings {
    /// Workers that have formed their first ring, in which two hold a model together.
    fn in_groups(workers: u32) -> Self {
        let mut rings = Self::empty(workers);
        let strategy = &mut rings.scene.cluster.job.strategy;
        (strategy.name, strategy.stage_workers) = (StrategyName::ModelParallel, Some(2));
        rings.scene.cluster = Cluster::new(rings.scene.cluster.job.clone());
        for _ in 0..workers {
            rings.start();
        }
        rings.join_all();
        rings
    }

    /// Lets a worker leave because its device has not enough memory.
    fn lacks_memory(&mut self, worker: usize) {
        let task = self.workers.remove(worker).task;
        let request = wire::LeaveRequest {
            error: "out of memory".to_owned(),
            failure: WorkerFailure::Memory.into(),
            ..wire::LeaveRequest::default()
        };
        self.scene.cluster.leave(self.scene.now, task, &request);
    }

    fn is_pending(&mut self, worker: usize) -> bool {
        matches!(self.ask(worker, None), Ok(Joined::Pending(_)))
    }
}

#[test]
fn a_worker_behind_the_last_group_is_spare_and_makes_all_steps() {
    for (workers, ranks) in [(2, 2), (3, 2), (4, 4), (5, 4)] {
        let mut rings = Rings::in_groups(workers);
        let Work::Shared {
            rank, ranks: of, ..
        } = rings.work(workers as usize - 1)
        else {
            panic!("there is work");
        };
        assert_eq!((rank, of), (workers - 1, ranks));
        let status = rings.scene.cluster.status(rings.scene.now).ring.unwrap();
        for (rank, member) in status.members.iter().enumerate() {
            let place = (rank < ranks as usize).then_some(rank as u32 % 2);
            assert_eq!((member.place, member.spare), (place, place.is_none()));
        }
        rings.finish();
        let steps = 2 * SAMPLES.div_ceil(BATCH * u64::from(ranks));
        assert_eq!(rings.scene.cluster.durable.done().0, steps);
    }
}

#[test]
fn a_ring_that_is_smaller_than_a_group_is_not_formed() {
    let mut rings = Rings::in_groups(2);
    rings.step(&rings.all(), true);
    rings.kill(0);
    assert!(rings.is_pending(0));
    let missing = rings.scene.cluster.missing();
    assert_eq!(missing, "1 of the 2 workers of a stage group have joined");
    rings.resume();
    assert!(rings.is_pending(0));
    rings.start();
    rings.join_all();
    rings.finish();
}

/// The worker that is left has all values.
#[test]
fn one_worker_ends_a_job_in_which_no_step_is_left() {
    let mut rings = Rings::in_groups(2);
    let all = 2 * SAMPLES;
    for worker in [0, 1].repeat(20) {
        if rings.scene.cluster.durable.done().1 < all {
            rings.step(&[worker], true);
        }
    }
    assert_eq!(rings.evaluated, [0], "the last evaluation is left");
    rings.kill(1);
    rings.join_all();
    rings.finish();
}

#[test]
fn one_worker_ends_a_job_that_is_stopped() {
    let mut rings = Rings::in_groups(2);
    rings.step(&rings.all(), true);
    rings.step(&[0], false);
    let done = rings.scene.cluster.durable.done();
    rings.kill(1);
    assert!(rings.is_pending(0));
    let name = rings.scene.cluster.job.name.clone();
    rings.scene.cluster.stop(&name).unwrap();
    rings.join_all();
    for _ in 0..5 {
        rings.step(&[0], true);
        rings.scene.pass(1, &[rings.workers[0].task]);
    }
    let phase = rings.scene.cluster.durable.outcome.phase;
    assert_eq!(phase, JobPhase::Done, "{}", rings.scene.cluster.missing());
    // It has made a step that the other has not reported.
    let (steps, samples) = rings.scene.cluster.durable.done();
    assert_eq!((steps, samples), (done.0 + 1, done.1 + 2 * BATCH));
}

#[test]
fn a_job_fails_once_too_few_workers_can_work() {
    let mut rings = Rings::in_groups(3);
    rings.step(&rings.all(), true);
    rings.lacks_memory(2);
    rings.join_all();
    rings.lacks_memory(1);
    assert!(rings.is_pending(0));
    let left = [rings.workers[0].task];
    rings.scene.pass(55, &left);
    assert!(!rings.scene.cluster.ended());
    rings.scene.pass(10, &left);
    assert!(rings.scene.cluster.failed_without_members());
    let error = rings.scene.cluster.status(rings.scene.now).error;
    let few = "fewer than 2 workers could work for 60 s (cluster.stall_seconds), and a stage group needs 2 (strategy.stage_workers)";
    assert!(
        error.contains(few) && error.contains("out of memory"),
        "{error}"
    );
}

#[test]
fn a_member_without_which_a_group_is_not_whole_is_waited_for() {
    let mut rings = Rings::in_groups(2);
    rings.step(&rings.all(), true);
    let silent = rings.workers.remove(1);
    assert!(matches!(
        rings.ask(0, Some(silent.task)),
        Ok(Joined::Pending(_))
    ));
    let both = [rings.workers[0].task, silent.task];
    rings.scene.pass(5, &both);
    assert!(rings.is_pending(0));
    let missing = rings.scene.cluster.missing();
    assert!(
        missing.contains("has not joined the next ring"),
        "{missing}"
    );
    rings.workers.push(silent);
    rings.join_all();
    rings.finish();
}
