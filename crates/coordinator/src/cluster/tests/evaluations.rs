//! Evaluations that are due, in progress or done when a coordinator restarts or the job goes back.

use super::*;

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
