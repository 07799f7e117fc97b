//! Reports of finished steps: their checks, the workers that may send them, and the parts that survive a restart of the
//! coordinator.

use shared_proto::ids::Generation;

use super::*;

#[test]
fn a_sync_step_needs_the_receipt_of_each_shard_that_has_blocks() {
    let (mut scene, servers, worker) = Scene::before_the_first_in(Mode::Sync, 2);
    scene.work(worker);
    scene.save(&servers, "");
    // Shard 1 has no block.
    let (split, clock) = scene.split(worker);
    let (origin, mut request) = scene.step(worker, clock.next(), split.id, split.end);
    request.receipts.truncate(1);
    let finished = scene.cluster.finish_step(scene.now, &origin, &request);
    finished.unwrap();

    let (split, clock) = scene.split(worker);
    let (origin, mut request) = scene.step(worker, clock.next(), split.id, split.end);
    request.receipts.remove(0);
    let finished = scene.cluster.finish_step(scene.now, &origin, &request);
    let refusal = finished.unwrap_err();
    assert_eq!(refusal.reason, Reason::Malformed);
    assert!(refusal.message.contains("receipt of shard 0"), "{refusal}");
    let refusal = scene.cluster.admit(&origin).unwrap_err();
    assert_eq!(refusal.reason, Reason::Fenced);
}

#[test]
fn a_sync_step_that_is_skipped_needs_no_receipt() {
    let (mut scene, servers, worker) = Scene::before_the_first_in(Mode::Sync, 1);
    scene.work(worker);
    scene.save(&servers, "");
    let (split, clock) = scene.split(worker);
    let (origin, mut request) = scene.step(worker, clock.next(), split.id, split.end);
    request.receipts.clear();
    request.skipped = 1;
    let finished = scene.cluster.finish_step(scene.now, &origin, &request);
    finished.unwrap();
    assert_eq!(scene.cluster.durable.done().0, 1);
}

#[test]
fn whoever_is_no_member_is_told_why() {
    let (mut scene, workers) = Scene::training(Mode::Async, 1);
    let origin = scene.origin(workers[0], Clock(0));
    assert_eq!(scene.cluster.admit(&origin), Ok(()));
    let foreign = Origin {
        job: "another".to_owned(),
        ..origin.clone()
    };
    let why = |scene: &Scene, origin: &Origin, part: &str| {
        let refusal = scene.cluster.admit(origin).unwrap_err();
        assert!(refusal.message.contains(part), "{refusal}");
        refusal.reason
    };
    assert_eq!(why(&scene, &foreign, "another"), Reason::ForeignJob);
    let of = |generation| Origin {
        task: Task {
            generation: Generation(generation),
            ..workers[0]
        },
        ..origin.clone()
    };
    assert_eq!(why(&scene, &of(2), "generation 2"), Reason::Fenced);
    let again = scene.join(Role::Worker, "w0");
    let superseded = "superseded by generation 2";
    assert_eq!(why(&scene, &of(1), superseded), Reason::Superseded);
    assert_eq!(scene.cluster.admit(&of(2)), Ok(()));
    scene
        .cluster
        .leave(scene.now, again, &wire::LeaveRequest::default());
    assert_eq!(why(&scene, &of(2), "it has left"), Reason::Fenced);
}

#[test]
fn evaluations_outlive_a_coordinator() {
    let (mut scene, _, worker) = Scene::with_checkpoints(1);
    while let (Work::Split(_), _) = scene.work(worker) {
        scene.finish(worker);
    }
    let evaluate = Work::Evaluate {
        data_epoch: 0,
        save_model: false,
    };
    assert_eq!(scene.work(worker).0, evaluate);
    scene.restart();
    assert_eq!(scene.work(worker).0, evaluate);
    assert_eq!(scene.report_counts(worker, 0), Ok(true));
    scene.restart();
    // A repeated report is accepted, and counts once.
    assert_eq!(scene.report_counts(worker, 0), Ok(true));
    let done = scene.cluster.durable.evaluations.done.iter();
    let done: Vec<_> = done.map(|report| report.data_epoch).collect();
    assert_eq!(done, [0]);
}

#[test]
fn a_step_of_data_that_the_worker_does_not_hold_is_refused_and_the_worker_stays() {
    let (mut scene, tasks) = Scene::training(Mode::Async, 2);
    let (split, clock) = scene.split(tasks[0]);
    let other = scene.split(tasks[1]).0;
    for id in [other.id, split.id + 100] {
        let (origin, mut request) = scene.step(tasks[0], clock, id, split.end);
        // Its numbers do not matter.
        request.steps = 0;
        let refused = scene.cluster.finish_step(scene.now, &origin, &request);
        assert_eq!(refused.unwrap_err().reason, Reason::NotLeased);
        assert_eq!(scene.cluster.admit(&origin), Ok(()));
    }
    assert_eq!(scene.cluster.durable.done(), (0, 0));
}

#[test]
fn a_step_may_have_a_single_sample_and_may_be_skipped() {
    let (mut scene, tasks) = Scene::training(Mode::Async, 1);
    let (split, clock) = scene.split(tasks[0]);
    let (origin, mut request) = scene.step(tasks[0], clock.next(), split.id, split.start + 1);
    (request.steps, request.skipped) = (1, 1);
    let finished = scene.cluster.finish_step(scene.now, &origin, &request);
    finished.unwrap();
    assert_eq!(scene.cluster.durable.done(), (1, 1));
    assert_eq!(scene.cluster.summary(scene.now).skipped_steps, 1);
}
