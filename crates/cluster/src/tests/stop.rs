//! Jobs that are ended early.

use super::*;

#[test]
fn a_stopped_job_hands_out_no_more_data_and_evaluates_what_it_has() {
    for mode in [Mode::Sync, Mode::Bounded, Mode::Async] {
        let (mut scene, tasks) = Scene::training(mode, 2);
        for task in &tasks {
            scene.split(*task);
        }
        scene.cluster.stop("flambeau").unwrap();
        // Workers finish the data that they hold.
        for task in &tasks {
            while let (Work::Split(_), _) = scene.work(*task) {
                scene.finish(*task);
            }
        }
        let done = scene.cluster.durable.done().1;
        assert!(done > 0 && done < 2 * SAMPLES, "{mode:?}: {done}");
        let works = tasks.iter().map(|task| (*task, scene.work(*task).0));
        let works: Vec<_> = works.collect();
        let evaluator = works.iter().find_map(|(task, work)| match work {
            Work::Evaluate {
                data_epoch: epoch,
                save_model,
                ..
            } => Some((*task, *epoch, *save_model)),
            _ => None,
        });
        let (task, epoch, save_model) = evaluator.unwrap_or_else(|| panic!("{mode:?}: {works:?}"));
        assert!(save_model, "{mode:?}");
        scene.report(task, epoch).unwrap();
        assert_eq!(scene.cluster.refresh_view().phase, JobPhase::Done);
        let summary = scene.cluster.summary(scene.now);
        assert!(summary.stopped && summary.error.is_empty());
    }
}

#[test]
fn a_worker_that_dies_with_data_does_not_keep_a_stopped_job_from_ending() {
    let (mut scene, tasks) = Scene::training(Mode::Async, 2);
    for task in &tasks {
        scene.split(*task);
    }
    scene.cluster.stop("flambeau").unwrap();
    let leave = wire::LeaveRequest::default();
    scene.cluster.leave(scene.now, tasks[1], &leave);
    while let (Work::Split(_), _) = scene.work(tasks[0]) {
        scene.finish(tasks[0]);
    }
    let work = scene.work(tasks[0]).0;
    assert!(
        matches!(
            work,
            Work::Evaluate {
                save_model: true,
                ..
            }
        ),
        "{work:?}"
    );
}

#[test]
fn a_job_that_has_not_begun_cannot_be_stopped_nor_can_another() {
    let mut scene = Scene::new(Mode::Async, Some(1), 1);
    let refused = scene.cluster.stop("flambeau").unwrap_err();
    assert_eq!(refused.reason, Reason::NotInitialized);
    let (mut scene, _) = Scene::training(Mode::Async, 1);
    let refused = scene.cluster.stop("other").unwrap_err();
    assert_eq!(refused.reason, Reason::ForeignJob);
}

#[test]
fn a_job_that_is_stopped_within_a_sync_step_orders_no_checkpoint_before_the_steps_end() {
    let (mut scene, tasks) = Scene::training(Mode::Sync, 2);
    scene.cluster.saving.place = Some(super::checkpoints::place());
    let server = scene.server();
    scene.finish(tasks[0]);
    scene.finish(tasks[1]);
    scene.write(&[server], "");
    // A checkpoint is due while the step is open.
    scene.pass(31, &[server, tasks[0], tasks[1]]);
    scene.finish(tasks[0]);
    assert!(scene.cluster.durable.training.step.is_some());
    scene.cluster.stop("flambeau").unwrap();
    assert_eq!(scene.cluster.refresh_view().checkpoint, None);
    scene.finish(tasks[1]);
    scene.pass(1, &[server, tasks[0], tasks[1]]);
    assert!(scene.cluster.refresh_view().checkpoint.is_some());
}

#[test]
fn a_job_whose_data_is_done_ends_as_it_would_have() {
    let (mut scene, tasks) = Scene::training(Mode::Async, 1);
    let worker = tasks[0];
    loop {
        match scene.work(worker).0 {
            Work::Split(_) => drop(scene.finish(worker)),
            Work::Evaluate {
                data_epoch: epoch,
                save_model,
                ..
            } => {
                if save_model {
                    scene.cluster.stop("flambeau").unwrap();
                }
                scene.report(worker, epoch).unwrap();
            }
            Work::Done => break,
            other => panic!("{other:?}"),
        }
    }
    assert!(!scene.cluster.summary(scene.now).stopped);
}

#[test]
fn a_job_that_is_stopped_in_its_last_checkpoint_stays_stopped_when_it_goes_back() {
    let (mut scene, tasks) = Scene::training(Mode::Sync, 1);
    scene.cluster.saving.place = Some(super::checkpoints::place());
    let (server, worker) = (scene.server(), tasks[0]);
    scene.finish(worker);
    scene.write(&[server], "");
    let done = scene.cluster.durable.done();
    loop {
        match scene.work(worker).0 {
            Work::Split(_) => drop(scene.finish(worker)),
            Work::Evaluate { save_model, .. } if save_model => break,
            Work::Evaluate {
                data_epoch: epoch, ..
            } => scene.report(worker, epoch).unwrap(),
            other => panic!("{other:?}"),
        }
    }
    scene.cluster.stop("flambeau").unwrap();
    // Its server starts again, and the job goes back to the checkpoint.
    scene.join(Role::Ps, "ps");
    assert_eq!(scene.cluster.durable.done(), done);
    let work = scene.work(worker).0;
    assert!(!matches!(work, Work::Split(_)), "{work:?}");
}

#[test]
fn a_repeated_stop_and_one_of_a_job_that_is_over_change_nothing() {
    let (mut scene, _) = Scene::training(Mode::Async, 1);
    scene.cluster.stop("flambeau").unwrap();
    let changes = scene.cluster.changes();
    scene.cluster.stop("flambeau").unwrap();
    assert_eq!(scene.cluster.changes(), changes);

    let (mut scene, _) = Scene::training(Mode::Async, 1);
    scene.cluster.fail(scene.now, "no power".to_owned());
    scene.cluster.stop("flambeau").unwrap();
    assert!(!scene.cluster.summary(scene.now).stopped);
}

#[test]
fn a_stop_outlives_the_coordinator() {
    let (mut scene, tasks) = Scene::training(Mode::Async, 1);
    let changes = scene.cluster.changes();
    scene.cluster.stop("flambeau").unwrap();
    assert_ne!(scene.cluster.changes().urgent, changes.urgent);
    scene.restart();
    while let (Work::Split(_), _) = scene.work(tasks[0]) {
        scene.finish(tasks[0]);
    }
    assert!(scene.cluster.durable.done().1 < 2 * SAMPLES);
    assert!(scene.cluster.summary(scene.now).stopped);
}

#[test]
fn a_job_that_is_stopped_while_no_worker_holds_data_is_evaluated_at_once() {
    for mode in [Mode::Bounded, Mode::Async] {
        let (mut scene, tasks) = Scene::training(mode, 1);
        let (split, _) = scene.split(tasks[0]);
        for _ in 0..(split.end - split.start).div_ceil(5) {
            scene.finish(tasks[0]);
        }
        scene.cluster.stop("flambeau").unwrap();
        let evaluate = Work::Evaluate {
            data_epoch: 0,
            save_model: true,
        };
        assert_eq!(scene.work(tasks[0]).0, evaluate, "{mode:?}");
    }
}
