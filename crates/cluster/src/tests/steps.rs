//! Finished steps and evaluations: how they are counted, and the records of them.

use super::*;
use crate::Record;

impl Scene {
    fn pushes(&self, task: Task) -> u64 {
        self.cluster.durable.members[&task.id].progress.pushes
    }
}

#[test]
fn a_finish_that_comes_late_is_refused() {
    let (mut scene, tasks) = Scene::training(Mode::Async, 1);
    let (split, clock) = scene.split(tasks[0]);
    let late = scene.step(tasks[0], clock.next(), split.id, split.start + 5);
    scene.finish(tasks[0]);
    let refused = scene.cluster.finish_step(scene.now, &late.0, &late.1);
    assert_eq!(refused.unwrap_err().reason, Reason::OutOfOrder);
    assert_eq!(scene.cluster.durable.done(), (1, 5));
}

#[test]
fn in_sync_mode_a_worker_that_skips_a_step_does_not_contribute_to_it() {
    let (mut scene, tasks) = Scene::training(Mode::Sync, 2);
    scene.finish_with(tasks[0], |request| request.skipped = 1);
    scene.finish(tasks[1]);
    let commit = scene.cluster.refresh_view().commit.clone().unwrap();
    assert_eq!(commit.contributors, [(tasks[1], 5)]);
    assert_eq!((scene.pushes(tasks[0]), scene.pushes(tasks[1])), (0, 1));
    assert_eq!(scene.cluster.summary(scene.now).skipped_steps, 1);
}

#[test]
fn a_step_with_a_limit_is_committed_once_the_servers_know_its_norm() {
    let (mut scene, tasks) = Scene::training(Mode::Sync, 2);
    let server = scene.cluster.durable.servers()[0];
    scene.cluster.job.clip_norm = Some(2.0);
    scene.finish(tasks[0]);
    assert_eq!(scene.cluster.refresh_view().measured, None);
    scene.finish(tasks[1]);
    let measured = scene.cluster.refresh_view().measured.clone().unwrap();
    assert_eq!(measured.contributors, [(tasks[0], 5), (tasks[1], 5)]);
    // No evaluation comes before the commit.
    scene.cluster.durable.evaluations.due.push_back(0);
    assert!(matches!(scene.work(tasks[0]).0, Work::Idle(_)));
    scene.cluster.durable.evaluations.due.clear();
    // Another coordinator process has the step measured again.
    let mut resumed = scene.resumed();
    assert_eq!(resumed.refresh_view().measured, Some(measured.clone()));

    let epoch = scene.cluster.durable.epoch().0;
    let right = wire::NormReport {
        shard: 0,
        epoch,
        step: measured.step.0,
        squares: 64.0,
        samples: 10,
    };
    let impossible = wire::NormReport {
        squares: -1.0,
        ..right
    };
    let refused = scene.cluster.measured(scene.now, server, &impossible);
    assert_eq!(refused.unwrap_err().reason, Reason::Malformed);
    for (task, report) in [
        (server, wire::NormReport { shard: 1, ..right }),
        (server, wire::NormReport { step: 7, ..right }),
        // Of other contributors.
        (
            server,
            wire::NormReport {
                samples: 5,
                ..right
            },
        ),
        (
            server,
            wire::NormReport {
                epoch: epoch + 1,
                ..right
            },
        ),
        (tasks[0], right),
    ] {
        scene.cluster.measured(scene.now, task, &report).unwrap();
        assert_eq!(scene.cluster.refresh_view().commit, None);
    }
    scene.cluster.measured(scene.now, server, &right).unwrap();
    let view = scene.cluster.refresh_view().clone();
    let commit = view.commit.unwrap();
    assert_eq!((commit.step, commit.clip_factor), (Clock(0), Some(0.25)));
    assert_eq!(view.measured, None);

    // A norm within the limit is no factor.
    scene.finish(tasks[0]);
    scene.finish(tasks[1]);
    let within = wire::NormReport {
        step: 1,
        squares: 4.0,
        ..right
    };
    scene.cluster.measured(scene.now, server, &within).unwrap();
    let commit = scene.cluster.refresh_view().commit.clone().unwrap();
    assert_eq!((commit.step, commit.clip_factor), (Clock(1), None));

    // A mean that is NaN is no reason to wait: the update shows it.
    scene.finish(tasks[0]);
    scene.finish(tasks[1]);
    let nan = wire::NormReport {
        step: 2,
        squares: f64::NAN,
        ..right
    };
    scene.cluster.measured(scene.now, server, &nan).unwrap();
    let commit = scene.cluster.refresh_view().commit.clone().unwrap();
    assert_eq!((commit.step, commit.clip_factor), (Clock(2), None));
}

#[test]
fn a_worker_tells_a_restarted_coordinator_how_often_it_has_pushed() {
    let (mut scene, tasks) = Scene::training(Mode::Async, 1);
    scene.finish(tasks[0]);
    scene.restart();
    let (split, _) = scene.split(tasks[0]);
    // Two steps were finished that the coordinator has forgotten.
    let (origin, mut request) = scene.step(tasks[0], Clock(4), split.id, split.start + 5);
    request.pushes = 4;
    scene
        .cluster
        .finish_step(scene.now, &origin, &request)
        .unwrap();
    assert_eq!(scene.pushes(tasks[0]), 4);
    // It cannot have pushed more often than it has finished steps.
    scene.finish_with(tasks[0], |request| request.pushes = 100);
    assert_eq!(scene.pushes(tasks[0]), 5);
}

#[test]
fn steps_that_take_no_time_have_no_pace() {
    let (mut scene, tasks) = Scene::training(Mode::Async, 1);
    scene.finish(tasks[0]);
    let status = scene.cluster.status(scene.now);
    assert!(status.tasks.iter().all(|row| row.samples_per_second == 0.0));
}

#[test]
fn the_first_call_for_work_is_kept_and_repeated_ones_are_not() {
    let (mut scene, tasks) = Scene::training(Mode::Sync, 2);
    let newcomer = scene.join(Role::Worker, "new");
    scene.variables(newcomer);
    scene.finish(tasks[0]);
    let before = scene.cluster.changes().urgent;
    scene.work(newcomer);
    let after = scene.cluster.changes().urgent;
    assert!(after > before);
    scene.work(newcomer);
    assert_eq!(scene.cluster.changes().urgent, after);
}

#[test]
fn a_result_that_was_taken_may_be_sent_again_after_a_shard_has_moved() {
    let (mut scene, _, worker) = Scene::with_checkpoints(1);
    while let (Work::Split(_), _) = scene.work(worker) {
        scene.finish(worker);
    }
    scene.report(worker, 0).unwrap();
    scene.join(Role::Ps, "ps0");
    scene.report(worker, 0).unwrap();
    assert_eq!(scene.cluster.durable.evaluations.done.len(), 1);
}

#[test]
fn in_a_job_with_a_run_directory_the_last_evaluation_tells_of_its_model() {
    let (mut scene, tasks) = Scene::training(Mode::Async, 1);
    scene.cluster.job.run_dir = Some("run".into());
    let tells = |scene: &mut Scene, data_epoch, digest: usize| {
        let report = wire::EvaluationReport {
            data_epoch,
            samples: 7,
            metrics: [("loss".to_owned(), 0.5)].into(),
            model_sha256: vec![1; digest].into(),
        };
        let origin = scene.origin(tasks[0], Clock(0));
        let told = scene.cluster.evaluated(scene.now, &origin, report);
        told.map(drop).map_err(|refusal| refusal.reason)
    };
    for epoch in 0..2 {
        while let (Work::Split(_), _) = scene.work(tasks[0]) {
            scene.finish(tasks[0]);
        }
        if epoch == 1 {
            for digest in [0, 31] {
                assert_eq!(tells(&mut scene, 1, digest), Err(Reason::Malformed));
            }
            assert_eq!(tells(&mut scene, 1, 32), Ok(()));
        } else {
            assert_eq!(tells(&mut scene, 0, 0), Ok(()));
        }
    }
    assert_eq!(scene.cluster.durable.outcome.phase, JobPhase::Done);
    // Epochs count from 1 in the metrics.
    let records = scene.cluster.take_records().into_iter();
    let lines = records.filter_map(|record| match record {
        Record::Evaluation { epoch, samples, .. } => Some((epoch, samples)),
        _ => None,
    });
    assert_eq!(lines.collect::<Vec<_>>(), [(1, 7), (2, 7)]);
}

#[test]
fn the_view_that_was_made_last_stays_until_the_next_is_made() {
    let (mut scene, tasks) = Scene::training(Mode::Async, 1);
    let made = scene.cluster.refresh_view().clone();
    assert_eq!(made.workers, tasks);
    scene.join(Role::Worker, "new");
    assert_eq!(*scene.cluster.view(), made);
    assert_ne!(*scene.cluster.refresh_view(), made);
}

#[test]
fn an_evaluation_is_reported_by_the_worker_that_holds_it_and_for_its_epoch() {
    let (mut scene, tasks) = Scene::training(Mode::Async, 2);
    while !matches!(scene.work(tasks[0]).0, Work::Evaluate { .. }) {
        for task in &tasks {
            if let (Work::Split(_), _) = scene.work(*task) {
                scene.finish(*task);
            }
        }
    }
    for (task, epoch) in [(tasks[1], 0), (tasks[0], 1)] {
        let refused = scene.report(task, epoch).unwrap_err();
        assert_eq!(refused.reason, Reason::NotLeased, "{task}, {epoch}");
    }
    scene.report(tasks[0], 0).unwrap();
}
