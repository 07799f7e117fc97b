//! Scenarios in which a shard moves: what counts from then on, and what is reported lost.

use super::*;
use crate::record::Record;

impl Scene {
    /// Two servers and a worker that trains in async mode; the first checkpoint is written.
    fn in_async_mode() -> (Self, Vec<Task>, Task) {
        let (mut scene, servers, worker) = Self::with_checkpoints(2);
        scene.work(worker);
        (scene, servers, worker)
    }

    /// Another process takes shard 0, whose blocks have taken so many pushes of the worker.
    fn move_shard(&mut self, worker: Task, taken: u64) -> Task {
        let server = self.join(Role::Ps, "ps0");
        let map = self.cluster.shard_map().unwrap();
        let blocks = map.blocks_of(0).count() as u64;
        let report = wire::RestoreReport {
            shard: 0,
            epoch: map.sources[0].epoch.0,
            watermarks: vec![wire::Watermark {
                task: Some(worker.into()),
                taken,
                blocks,
            }],
            ..wire::RestoreReport::default()
        };
        self.cluster.shard_restored(self.now, server, &report);
        server
    }

    fn lost(&mut self, task: Task, updates: u64) -> Result<(), shared_proto::refusal::Refusal> {
        let origin = self.origin(task, Clock(3));
        let report = wire::LostReport {
            shard: 0,
            updates,
            ..wire::LostReport::default()
        };
        self.cluster.lost(self.now, &origin, &report)
    }

    fn lost_records(&mut self) -> Vec<u64> {
        let records = self.cluster.take_records().into_iter();
        let lost = records.filter_map(|record| match record {
            Record::Lost { updates, .. } => Some(updates),
            _ => None,
        });
        lost.collect()
    }
}

#[test]
fn a_step_that_a_replaced_server_has_taken_does_not_count_until_its_worker_has_moved() {
    let (mut scene, _, worker) = Scene::in_async_mode();
    let (split, clock) = scene.split(worker);
    let (mut origin, request) = scene.step(worker, clock.next(), split.id, split.start + 5);
    scene.move_shard(worker, 0);
    let refused = scene
        .cluster
        .finish_step(scene.now, &origin, &request)
        .unwrap_err();
    assert_eq!(refused.reason, Reason::StaleEpoch);
    assert_eq!(scene.cluster.done(), (0, 0));
    origin.epoch = scene.cluster.epoch();
    scene
        .cluster
        .finish_step(scene.now, &origin, &request)
        .unwrap();
    assert_eq!(scene.cluster.done(), (1, 5));
}

#[test]
fn losses_of_a_worker_that_lives_are_its_own_to_report() {
    let (mut scene, _, worker) = Scene::in_async_mode();
    for _ in 0..3 {
        scene.finish(worker);
    }
    scene.move_shard(worker, 1);
    assert_eq!(scene.cluster.lost_updates(), 0);
    scene.lost(worker, 2).unwrap();
    assert_eq!(scene.lost_records(), [2]);
    // It leaves; what it has reported is not derived once more.
    scene
        .cluster
        .leave(scene.now, worker, &wire::LeaveRequest::default());
    assert_eq!(scene.cluster.lost_updates(), 2);
}

#[test]
fn a_worker_and_a_server_that_die_together_lose_nothing_unsaid() {
    for worker_first in [true, false] {
        let (mut scene, _, worker) = Scene::in_async_mode();
        for _ in 0..3 {
            scene.finish(worker);
        }
        if worker_first {
            scene.join(Role::Worker, "w");
            scene.move_shard(worker, 1);
        } else {
            scene.move_shard(worker, 1);
            scene.join(Role::Worker, "w");
        }
        assert_eq!(scene.lost_records(), [2]);
        assert_eq!(scene.cluster.lost_updates(), 2);
        // Another move of the shard loses no more of it, and nothing of what a later checkpoint has.
        scene.move_shard(worker, 1);
        assert_eq!(scene.cluster.lost_updates(), 2);
    }
}

#[test]
fn a_life_that_was_over_before_the_checkpoint_has_lost_nothing() {
    let (mut scene, servers, worker) = Scene::in_async_mode();
    scene.finish(worker);
    scene.join(Role::Worker, "w");
    scene.now += Duration::from_secs(60);
    scene.cluster.tick(scene.now);
    scene.save(&servers, "");
    // The mark of the dead worker is not in the blocks any more.
    scene.move_shard(worker, 0);
    assert_eq!(scene.cluster.lost_updates(), 0);
}

#[test]
fn losses_that_cannot_be_are_refused() {
    let (mut scene, _, worker) = Scene::in_async_mode();
    scene.finish(worker);
    assert_eq!(
        scene.lost(worker, u64::MAX).unwrap_err().reason,
        Reason::Malformed
    );
    let origin = Origin {
        sequence: Sequence(0),
        ..scene.origin(worker, Clock(1))
    };
    let report = wire::LostReport::default();
    let refused = scene.cluster.lost(scene.now, &origin, &report);
    assert_eq!(refused.unwrap_err().reason, Reason::OutOfOrder);
    assert_eq!(scene.cluster.lost_updates(), 0);
}

#[test]
fn a_server_that_dies_in_the_last_checkpoint_has_the_model_evaluated_again() {
    let (mut scene, _, worker) = Scene::in_async_mode();
    let epochs = 2;
    for epoch in 0..epochs {
        while let (Work::Split(_), _) = scene.work(worker) {
            scene.finish(worker);
        }
        scene.report(worker, epoch).unwrap();
    }
    assert!(matches!(scene.work(worker), (Work::Idle(_), _)));
    scene.move_shard(worker, 0);
    let again = Work::Evaluate {
        epoch: epochs - 1,
        save_model: true,
    };
    assert_eq!(scene.work(worker).0, again);
    // The result of the evaluation before does not end the job.
    scene.report(worker, epochs - 1).unwrap();
    assert_eq!(scene.cluster.refresh_view().phase, JobPhase::Training);
    assert!(scene.cluster.refresh_view().checkpoint.is_some());
}

#[test]
fn numbers_that_cannot_be_true_are_refused() {
    let (mut scene, _, worker) = Scene::in_async_mode();
    let (split, clock) = scene.split(worker);
    let good = scene.step(worker, clock.next(), split.id, split.start + 5);
    let wrong: [fn(&mut wire::FinishStepRequest); 4] = [
        |request| request.steps = 0,
        |request| request.steps = 6,
        |request| request.skipped = 2,
        |request| {
            request.times = Some(wire::StepTimes {
                pull: f64::NAN,
                ..wire::StepTimes::default()
            });
        },
    ];
    for make_wrong in wrong {
        let (mut origin, mut request) = good.clone();
        make_wrong(&mut request);
        origin.clock = Clock(clock.0 + request.steps);
        let refused = scene.cluster.finish_step(scene.now, &origin, &request);
        assert_eq!(
            refused.unwrap_err().reason,
            Reason::Malformed,
            "{request:?}"
        );
    }
    let (mut origin, request) = good;
    origin.sequence = Sequence(0);
    let refused = scene.cluster.finish_step(scene.now, &origin, &request);
    assert_eq!(refused.unwrap_err().reason, Reason::OutOfOrder);
    assert_eq!(scene.cluster.done(), (0, 0));
}
