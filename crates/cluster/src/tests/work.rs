//! Clocks, leased work, steps of sync mode, and evaluations, from lease to commit.

use super::*;

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
    assert_eq!(scene.cluster.durable.outcome.phase, JobPhase::Training);
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
        while scene.cluster.durable.outcome.phase == JobPhase::Training {
            for task in &tasks {
                match scene.work(*task).0 {
                    Work::Split(_) => drop(scene.finish(*task)),
                    Work::Evaluate {
                        data_epoch: epoch,
                        save_model,
                        ..
                    } => {
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
                    other => assert!(matches!(other, Work::Idle(_) | Work::Done)),
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
        Work::Evaluate { data_epoch: 0, .. }
    ));
}

#[test]
fn who_evaluates_waits_for_nobody_where_nobody_has_data() {
    let (mut scene, tasks) = Scene::training(Mode::Bounded, 2);
    let (ahead, behind) = (tasks[0], tasks[1]);
    while scene.split(ahead).0.data_epoch == 0 {
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
