//! Evaluations that are due, in progress or done when a coordinator restarts or the job goes back.

use shared_proto::job::{Job, Plateau};

use super::*;
use crate::evaluations::DIGEST_BYTES;

/// A sync job that orders its second checkpoint with the last step of epoch 0.
fn at_the_end_of_an_epoch() -> (Scene, Task, Task) {
    let (mut scene, servers, worker) = Scene::before_the_first_in(Mode::Sync, 1);
    scene.work(worker);
    scene.save(&servers, "");
    for _ in 0..7 {
        scene.finish(worker);
    }
    scene.pass(31, &[servers[0], worker]);
    scene.finish(worker);
    (scene, servers[0], worker)
}

#[test]
fn an_evaluation_that_was_due_in_a_checkpoint_is_due_again_when_the_job_goes_back_to_it() {
    for at_work in [false, true] {
        let (mut scene, server, worker) = at_the_end_of_an_epoch();
        let evaluate = Work::Evaluate {
            data_epoch: 0,
            save_model: false,
        };
        if at_work {
            // The first try fails, and the next is ordered while the worker evaluates.
            scene.save(&[server], "no room");
            assert_eq!(scene.work(worker).0, evaluate);
            scene.pass(10, &[server, worker]);
        }
        scene.save(&[server], "");
        assert_eq!(scene.work(worker).0, evaluate);
        scene.report(worker, 0).unwrap();
        assert_eq!(scene.cluster.durable.evaluations.done.len(), 1);

        let server = scene.join(Role::Ps, "ps0");
        scene.restored_without_losses(server);
        assert_eq!(scene.cluster.durable.evaluations.done.len(), 0);
        let worker = scene.join(Role::Worker, "w");
        scene.variables(worker);
        assert_eq!(scene.work(worker).0, evaluate, "at work: {at_work}");
    }
}

#[test]
fn an_evaluation_that_no_worker_has_taken_is_due_after_a_restart() {
    let (mut scene, server, worker) = at_the_end_of_an_epoch();
    scene.save(&[server], "");
    scene.restart();
    assert!(matches!(
        scene.work(worker).0,
        Work::Evaluate { data_epoch: 0, .. }
    ));
}

#[test]
fn results_outlive_a_restart_with_all_that_they_say() {
    let (mut scene, _) = Scene::training(Mode::Async, 1);
    scene.cluster.add_evaluation(wire::EvaluationReport {
        data_epoch: 3,
        samples: 7,
        metrics: [
            ("loss".to_owned(), 0.5),
            ("accuracy".to_owned(), f64::INFINITY),
        ]
        .into(),
        model_sha256: vec![1, 2, 3].into(),
    });
    let before = scene.cluster.status(scene.now).evaluations;
    scene.restart();
    assert_eq!(scene.cluster.status(scene.now).evaluations, before);
}

/// Trains an epoch, and reports this value of a metric.
fn evaluated(scene: &mut Scene, worker: Task, metric: &str, value: f64) {
    let (data_epoch, save_model) = train_to_evaluation(scene, worker);
    let digest = if save_model { DIGEST_BYTES } else { 0 };
    let report = wire::EvaluationReport {
        data_epoch,
        metrics: [("loss".to_owned(), 0.5), (metric.to_owned(), value)].into(),
        model_sha256: vec![7; digest].into(),
        ..wire::EvaluationReport::default()
    };
    let origin = scene.origin(worker, Clock(0));
    scene.cluster.evaluated(scene.now, &origin, report).unwrap();
}

/// Trains until the worker is to evaluate a data epoch. Returns it, and whether the model is to be saved.
fn train_to_evaluation(scene: &mut Scene, worker: Task) -> (u32, bool) {
    loop {
        match scene.work(worker).0 {
            Work::Split(_) => drop(scene.finish(worker)),
            Work::Evaluate {
                data_epoch,
                save_model,
            } => return (data_epoch, save_model),
            other => panic!("{other:?}"),
        }
    }
}

fn monitored(toml: &str) -> (Scene, Task) {
    let mut scene = Scene::new(Mode::Bounded, Some(1), 1);
    let job = Job::from_toml(toml).unwrap();
    (scene.cluster.job.early_stopping, scene.cluster.job.best) = (job.early_stopping, job.best);
    scene.cluster.job.plateau = job.plateau;
    scene.cluster.job.epochs = 20;
    scene.join(Role::Ps, "ps");
    let worker = scene.join(Role::Worker, "w");
    scene.variables(worker);
    scene.cluster.finish_initialization(worker).unwrap();
    (scene, worker)
}

#[test]
fn a_job_stops_once_its_metric_has_not_improved_for_so_many_evaluations() {
    let (mut scene, worker) =
        monitored("[early_stopping]\nmetric = \"accuracy\"\npatience = 2\nmin_delta = 0.01");
    // Neither NaN nor too small a change is an improvement; a restart forgets nothing.
    for value in [0.5, 0.505, 0.6, f64::NAN] {
        evaluated(&mut scene, worker, "accuracy", value);
        assert!(!scene.cluster.durable.training.stopping, "{value}");
        scene.restart();
    }
    evaluated(&mut scene, worker, "accuracy", 0.4);
    let last = scene.work(worker).0;
    assert!(
        matches!(
            last,
            Work::Evaluate {
                save_model: true,
                ..
            }
        ),
        "{last:?}"
    );
    evaluated(&mut scene, worker, "accuracy", 0.4);
    assert!(scene.cluster.durable.checkpoints.ending());
    let summary = scene.cluster.summary(scene.now);
    assert!(!summary.stopped);
    let why = "accuracy has not improved for 2 evaluations; the best was 0.6000 in epoch 3";
    assert_eq!(summary.stopped_early, why);
}

#[test]
fn the_learning_rate_falls_with_the_evaluation_and_outlives_a_restart() {
    let (mut scene, worker) = monitored("[plateau]\npatience = 2\nfactor = 0.5\n");
    let factor = |scene: &mut Scene| scene.cluster.refresh_view().learning_rate_factor;
    // The loss is the same each time, so only the first evaluation is an improvement.
    for expected in [1.0, 1.0, 0.5, 0.5, 0.25] {
        evaluated(&mut scene, worker, "accuracy", 0.5);
        assert_eq!(factor(&mut scene), expected);
        scene.restart();
        assert_eq!(factor(&mut scene), expected);
        let status = scene.cluster.status(scene.now);
        assert_eq!(status.learning_rate_factor, Some(expected));
    }
}

#[test]
fn a_learning_rate_goes_back_to_that_of_the_checkpoint_with_the_job() {
    let (mut scene, server, _) = at_the_end_of_an_epoch();
    scene.cluster.job.plateau = Some(Plateau::default());
    scene.save(&[server], "");
    scene.cluster.lower_learning_rate(0.25);
    let server = scene.join(Role::Ps, "ps0");
    scene.restored_without_losses(server);
    assert_eq!(scene.cluster.learning_rate_factor(), 1.0);
}

#[test]
fn an_early_stop_is_decided_again_after_going_back_and_a_cancel_is_not_forgotten() {
    for cancelled in [false, true] {
        let (mut scene, server, _) = at_the_end_of_an_epoch();
        scene.save(&[server], "");
        // The evaluations that have led to it come after the checkpoint.
        let training = &mut scene.cluster.durable.training;
        (training.stopping, training.stopped_early) = (true, "no improvement".to_owned());
        if cancelled {
            scene.cluster.stop("flambeau").unwrap();
        }
        let server = scene.join(Role::Ps, "ps0");
        scene.restored_without_losses(server);
        assert_eq!(scene.cluster.durable.training.stopping, cancelled);
        assert!(scene.cluster.durable.training.stopped_early.is_empty());
    }
}

#[test]
fn the_last_evaluation_of_a_pass_that_was_evaluated_before_ends_the_job() {
    let (mut scene, worker) = monitored("");
    scene.cluster.job.run_dir = Some("run".into());
    for _ in 0..19 {
        evaluated(&mut scene, worker, "accuracy", 0.5);
    }
    while let (Work::Split(_), _) = scene.work(worker) {
        scene.finish(worker);
    }
    // The same worker has evaluated the same pass, before another one had done its data.
    scene.cluster.durable.evaluations.reported = Some((19, worker));
    assert!(!scene.cluster.ended());
    evaluated(&mut scene, worker, "accuracy", 0.5);
    assert!(scene.cluster.ended() || scene.cluster.durable.checkpoints.ending());
}

#[test]
fn a_job_that_monitors_a_metric_it_does_not_measure_fails_and_names_those_it_has() {
    let (mut scene, worker) = monitored("[best]\nmetric = \"auc\"");
    evaluated(&mut scene, worker, "accuracy", 0.5);
    let error = scene.cluster.summary(scene.now).error;
    assert!(
        error.contains("best.metric") && error.contains("accuracy, loss"),
        "{error}"
    );
}

#[test]
fn a_job_that_wants_it_is_evaluated_at_its_end_alone() {
    let (mut scene, worker) = monitored("evaluations = \"last\"");
    scene.cluster.job.evaluations = shared_proto::job::Evaluations::Last;
    assert_eq!(train_to_evaluation(&mut scene, worker), (19, true));
}
