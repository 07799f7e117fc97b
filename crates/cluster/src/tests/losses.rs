//! Scenarios in which a shard moves: the steps that count, and the losses that are reported.

use super::*;
use crate::Record;

impl Scene {
    /// A scene with two servers and a worker that trains in async mode. The first checkpoint is written.
    fn in_async_mode() -> (Self, Vec<Task>, Task) {
        let (mut scene, servers, worker) = Self::with_checkpoints(2);
        scene.work(worker);
        (scene, servers, worker)
    }

    /// Another process takes shard 0. The restored blocks have `taken` pushes of the worker.
    fn move_shard(&mut self, worker: Task, taken: u64) -> Task {
        let server = self.join(Role::Ps, "ps0");
        let map = self.cluster.shard_map().unwrap();
        let blocks = map.blocks_of(0).count() as u64;
        let report = wire::RestoreReport {
            shard: 0,
            epoch: map.shards[0].source.epoch.0,
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
    assert_eq!(scene.cluster.durable.done(), (0, 0));
    origin.epoch = scene.cluster.durable.epoch();
    scene
        .cluster
        .finish_step(scene.now, &origin, &request)
        .unwrap();
    assert_eq!(scene.cluster.durable.done(), (1, 5));
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
    // It leaves. The losses that it has reported are not derived again.
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
        // Another move of the shard loses no more of its updates.
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
fn a_checkpoint_that_was_only_ordered_covers_nobody() {
    let (mut scene, _, worker) = Scene::in_async_mode();
    scene.finish(worker);
    scene.join(Role::Worker, "w");
    scene.now += Duration::from_secs(60);
    scene.cluster.tick(scene.now);
    assert!(scene.cluster.refresh_view().checkpoint.is_some());
    scene.move_shard(worker, 0);
    assert_eq!(scene.cluster.lost_updates(), 1);
}

#[test]
fn losses_of_two_workers_on_a_shard_are_told_apart() {
    let (mut scene, _, worker) = Scene::in_async_mode();
    let other = scene.join(Role::Worker, "x");
    scene.finish(worker);
    scene.finish(worker);
    scene.finish(other);
    // The blocks have the first push of one worker, and nothing of the other.
    scene.move_shard(worker, 1);
    scene.join(Role::Worker, "w");
    assert_eq!(scene.cluster.lost_updates(), 1);
    scene.join(Role::Worker, "x");
    assert_eq!(scene.cluster.lost_updates(), 2);
}

#[test]
fn what_a_worker_has_not_reported_when_it_dies_is_derived() {
    let (mut scene, _, worker) = Scene::in_async_mode();
    for _ in 0..3 {
        scene.finish(worker);
    }
    scene.move_shard(worker, 1);
    scene.lost(worker, 1).unwrap();
    scene.join(Role::Worker, "w");
    assert_eq!(scene.lost_records(), [1, 1]);
}

#[test]
fn what_was_said_before_a_checkpoint_is_not_said_again_after_it() {
    for dies_before in [true, false] {
        let (mut scene, servers, worker) = Scene::in_async_mode();
        for _ in 0..3 {
            scene.finish(worker);
        }
        let server = scene.move_shard(worker, 1);
        scene.lost(worker, 2).unwrap();
        // The checkpoint is ordered before the worker dies, so it need not have all of its pushes.
        scene.pass(31, &[server, servers[1], worker]);
        if dies_before {
            scene.join(Role::Worker, "w");
        }
        scene.save(&[server, servers[1]], "");
        scene.move_shard(worker, 1);
        if !dies_before {
            scene.join(Role::Worker, "w");
        }
        assert_eq!(scene.cluster.lost_updates(), 2);
    }
}

#[test]
fn a_life_is_forgotten_once_all_checkpoints_that_are_kept_have_it() {
    let (mut scene, servers, worker) = Scene::in_async_mode();
    scene.finish(worker);
    let next = scene.join(Role::Worker, "w");
    let lives = |scene: &Scene| {
        let saved = serde_json::to_value(scene.cluster.snapshot(scene.now)).unwrap();
        saved["losses"]["lives"].as_array().unwrap().len()
    };
    for _ in 0..=scene.cluster.job().checkpoint.keep {
        assert_eq!(lives(&scene), 1);
        scene.finish(next);
        scene.pass(31, &[servers[0], servers[1], next]);
        scene.save(&servers, "");
    }
    assert_eq!(lives(&scene), 0);
}

#[test]
fn in_sync_mode_nothing_is_lost_when_the_job_goes_back() {
    let (mut scene, servers, worker) = Scene::before_the_first_in(Mode::Sync, 1);
    scene.save(&servers, "");
    scene.finish(worker);
    let server = scene.join(Role::Ps, "ps0");
    let report = wire::RestoreReport {
        shard: 0,
        epoch: scene.cluster.shard_map().unwrap().shards[0].source.epoch.0,
        ..wire::RestoreReport::default()
    };
    scene.cluster.shard_restored(scene.now, server, &report);
    assert_eq!(scene.cluster.durable.done(), (0, 0));
    assert_eq!(scene.cluster.lost_updates(), 0);
}

#[test]
fn a_report_of_losses_counts_once_and_in_order() {
    let (mut scene, _, worker) = Scene::in_async_mode();
    scene.finish(worker);
    let earlier = scene.origin(worker, Clock(3));
    let origin = scene.origin(worker, Clock(3));
    let report = wire::LostReport {
        shard: 0,
        updates: 2,
        ..wire::LostReport::default()
    };
    for _ in 0..2 {
        scene.cluster.lost(scene.now, &origin, &report).unwrap();
    }
    let refused = scene.cluster.lost(scene.now, &earlier, &report);
    assert_eq!(refused.unwrap_err().reason, Reason::OutOfOrder);
    assert_eq!(scene.cluster.lost_updates(), 2);
}

#[test]
fn a_worker_loses_at_most_a_step_beyond_its_clock_on_each_block() {
    let (mut scene, _, worker) = Scene::in_async_mode();
    scene.finish(worker);
    // At clock 3 it may have pushed four times to the block of shard 0. Shard 1 has no block.
    let refused = scene.lost(worker, 5).unwrap_err();
    assert_eq!(refused.reason, Reason::Malformed);
    let origin = scene.origin(worker, Clock(3));
    let elsewhere = wire::LostReport {
        shard: 1,
        updates: 1,
        ..wire::LostReport::default()
    };
    let refused = scene.cluster.lost(scene.now, &origin, &elsewhere);
    assert_eq!(refused.unwrap_err().reason, Reason::Malformed);
    let nothing = wire::LostReport {
        updates: 0,
        ..elsewhere
    };
    let origin = scene.origin(worker, Clock(3));
    let refused = scene.cluster.lost(scene.now, &origin, &nothing);
    assert_eq!(refused.unwrap_err().reason, Reason::Malformed);
    scene.lost(worker, 4).unwrap();
    assert_eq!(scene.cluster.lost_updates(), 4);
}

#[test]
fn losses_that_cannot_be_are_refused() {
    let (mut scene, _, worker) = Scene::in_async_mode();
    scene.finish(worker);
    assert_eq!(
        scene.lost(worker, u64::MAX).unwrap_err().reason,
        Reason::Malformed
    );
    let backwards = wire::LostReport {
        updates: 1,
        first_step: 1,
        last_step: 0,
        ..wire::LostReport::default()
    };
    let origin = scene.origin(worker, Clock(1));
    let refused = scene.cluster.lost(scene.now, &origin, &backwards);
    assert_eq!(refused.unwrap_err().reason, Reason::Malformed);
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
        data_epoch: epochs - 1,
        save_model: true,
    };
    assert_eq!(scene.work(worker).0, again);
    // The result of the earlier evaluation does not end the job.
    scene.report(worker, epochs - 1).unwrap();
    assert_eq!(scene.cluster.refresh_view().phase, JobPhase::Training);
    assert!(scene.cluster.refresh_view().checkpoint.is_some());
}

#[test]
fn a_loss_that_a_worker_has_not_reported_when_the_job_ends_counts_once() {
    for lost_first in [2, 3] {
        let (mut scene, _, worker) = Scene::in_async_mode();
        for _ in 0..3 {
            scene.finish(worker);
        }
        scene.move_shard(worker, 0);
        let last = 3 - lost_first;
        if last > 0 {
            scene.lost(worker, last).unwrap();
        }
        scene
            .cluster
            .fail(scene.now, "the power is gone".to_owned());
        assert_eq!(scene.cluster.summary(scene.now).lost_updates, 3);
        // Its report is late.
        scene.lost(worker, lost_first).unwrap();
        assert_eq!(scene.cluster.lost_updates(), 3);
        assert_eq!(scene.lost_records().iter().sum::<u64>(), 3);
    }
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
    assert_eq!(scene.cluster.durable.done(), (0, 0));
}

#[test]
fn what_an_ended_worker_has_pushed_is_known_for_as_long_as_a_kept_checkpoint_lacks_it() {
    let mut losses = crate::losses::Losses::default();
    let task = Scene::training(Mode::Async, 1).1[0];
    let nobody = |_: Task| false;
    losses.written(3, 3, nobody);
    losses.written(4, 3, nobody);
    losses.ends(task, 7);
    // Five checkpoints fail, then one is whole: 3, 4 and 10 are kept.
    losses.ordered(5);
    losses.written(10, 3, nobody);
    assert_eq!(losses.ended(), 1, "4 may still have to be loaded");
    losses.written(11, 3, nobody);
    assert_eq!(losses.ended(), 1);
    losses.written(12, 3, nobody);
    assert_eq!(losses.ended(), 0);
}

#[test]
fn what_is_known_of_ended_workers_is_bounded_without_checkpoints_too() {
    let mut losses = crate::losses::Losses::default();
    let mut task = Scene::training(Mode::Async, 1).1[0];
    for _ in 0..5000 {
        task.generation = task.generation.next();
        losses.ends(task, 1);
    }
    assert_eq!(losses.ended(), 4096);
}
