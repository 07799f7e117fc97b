//! The counts of lost processes.

use shared_proto::ids::TaskId;

use super::*;

#[test]
fn a_worker_that_another_process_replaces_is_counted_and_one_that_has_left_is_not() {
    let (mut scene, tasks) = Scene::training(Mode::Async, 2);
    scene.join(Role::Worker, "w0");
    assert_eq!(scene.cluster.fault_counts().lost_workers, 1);

    let leave = wire::LeaveRequest::default();
    scene.cluster.leave(scene.now, tasks[1], &leave);
    scene.join(Role::Worker, "w1");
    assert_eq!(scene.cluster.fault_counts().lost_workers, 1);
}

#[test]
fn a_worker_that_registers_again_is_not_lost() {
    let (mut scene, tasks) = Scene::training(Mode::Async, 1);
    let register = |scene: &mut Scene, process, attempt| {
        let request = wire::RegisterRequest {
            identity: "w0".to_owned(),
            process,
            attempt,
            ..wire::RegisterRequest::default()
        };
        scene
            .cluster
            .register(scene.now, Role::Worker, request)
            .unwrap()
    };
    // It takes the place of a process of which no number is known.
    let first = register(&mut scene, 7, 1);
    assert!(first.generation > tasks[0].generation);
    assert_eq!(scene.cluster.fault_counts().lost_workers, 1);
    scene.work(first);
    let second = register(&mut scene, 7, 2);
    assert!(second.generation > first.generation);
    assert_eq!(scene.cluster.fault_counts().lost_workers, 1);
    scene.work(second);
    register(&mut scene, 8, 1);
    assert_eq!(scene.cluster.fault_counts().lost_workers, 2);
}

#[test]
fn a_recovery_is_counted_for_the_server_that_was_gone() {
    let (mut scene, servers, _) = Scene::with_checkpoints(2);
    let spare = scene.join(Role::Ps, "spare");
    let counted = |scene: &Scene| -> Vec<(TaskId, u64)> { scene.cluster.recoveries().collect() };
    let [first, second, third] = [servers[0].id, servers[1].id, spare.id];
    assert_eq!(counted(&scene), [(first, 0), (second, 0), (third, 0)]);

    // The spare takes the shard over.
    let leave = wire::LeaveRequest::default();
    scene.cluster.leave(scene.now, servers[0], &leave);
    assert_eq!(counted(&scene), [(first, 1), (second, 0), (third, 0)]);

    // The other server starts again.
    scene.join(Role::Ps, "ps1");
    assert_eq!(counted(&scene), [(first, 1), (second, 1), (third, 0)]);
}

#[test]
fn a_worker_that_registers_twice_before_it_asks_for_work_is_not_counted() {
    let (mut scene, _) = Scene::training(Mode::Async, 1);
    for _ in 0..2 {
        scene.join(Role::Worker, "new");
    }
    assert_eq!(scene.cluster.fault_counts().lost_workers, 0);
}
