//! Servers that are about to stop.

use super::*;

impl Scene {
    fn order(&mut self) -> Option<u64> {
        self.cluster
            .refresh_view()
            .checkpoint
            .map(|order| order.number)
    }

    fn drains(&mut self, server: Task) -> bool {
        self.cluster.drain(self.now, server)
    }
}

#[test]
fn a_server_may_leave_once_a_checkpoint_ordered_for_it_is_whole() {
    let (mut scene, servers, _) = Scene::with_checkpoints(1);
    assert!(!scene.drains(servers[0]));
    assert_eq!(scene.order(), Some(1));
    scene.save(&servers, "");
    assert!(scene.drains(servers[0]));
}

#[test]
fn a_server_that_is_killed_while_it_drains_is_saved_anew_the_next_time() {
    let (mut scene, servers, worker) = Scene::with_checkpoints(1);
    assert!(!scene.drains(servers[0]));
    scene.save(&servers, "");
    // It is killed before it leaves, and comes back within its lease.
    let again = scene.join(Role::Ps, "ps0");
    scene.restored_without_losses(again);
    scene.finish(worker);
    assert!(!scene.drains(again), "the first checkpoint lacks a step");
    assert_eq!(scene.order(), Some(2));
}

#[test]
fn in_sync_mode_steps_go_on_after_a_server_was_killed_while_it_drained() {
    let (mut scene, tasks) = Scene::training(Mode::Sync, 1);
    scene.cluster.saving.place = Some(super::checkpoints::place());
    let server = scene.server();
    scene.drains(server);
    scene.finish(tasks[0]);
    assert!(matches!(scene.work(tasks[0]).0, Work::Idle(why) if why.contains("ps-0")));
    scene
        .cluster
        .leave(scene.now, server, &wire::LeaveRequest::default());
    assert!(scene.cluster.draining.is_empty());
}

#[test]
fn two_servers_that_stop_together_leave_after_one_checkpoint_that_has_both() {
    let (mut scene, servers, _) = Scene::with_checkpoints(2);
    assert!(!scene.drains(servers[0]));
    assert_eq!(scene.order(), Some(1));
    // The second server is told to stop while the checkpoint for the first is being written.
    assert!(!scene.drains(servers[1]));
    scene.write(&servers, "");
    assert!(
        !scene.drains(servers[0]),
        "the other's shard may have taken more since"
    );
    assert_eq!(scene.order(), Some(2));
    scene.save(&servers, "");
    assert!(scene.drains(servers[0]) && scene.drains(servers[1]));
}

#[test]
fn a_server_that_stops_does_not_wait_until_a_failed_checkpoint_is_tried_again() {
    let (mut scene, servers, worker) = Scene::with_checkpoints(1);
    scene.finish(worker);
    scene.pass(31, &[servers[0], worker]);
    scene.save(&servers, "no answer");
    assert_eq!(scene.order(), None);
    scene.drains(servers[0]);
    assert_eq!(scene.order(), Some(2));
}

#[test]
fn a_server_may_go_once_a_checkpoint_has_its_shard() {
    let (mut scene, servers, worker) = Scene::with_checkpoints(2);
    scene.finish(worker);
    assert!(!scene.cluster.drain(scene.now, servers[0]));
    let order = scene.cluster.refresh_view().checkpoint;
    assert!(order.is_some());
    // A repeated call gets the same answer.
    assert!(!scene.cluster.drain(scene.now, servers[0]));
    assert_eq!(scene.cluster.refresh_view().checkpoint, order);
    scene.save(&servers, "");
    assert!(scene.cluster.drain(scene.now, servers[0]));
}

#[test]
fn a_checkpoint_that_was_ordered_before_is_not_enough() {
    let (mut scene, servers, worker) = Scene::with_checkpoints(2);
    scene.finish(worker);
    scene.pass(31, &[servers[0], servers[1], worker]);
    assert!(!scene.cluster.drain(scene.now, servers[0]));
    scene.save(&servers, "");
    assert!(!scene.cluster.drain(scene.now, servers[0]));
    scene.save(&servers, "");
    assert!(scene.cluster.drain(scene.now, servers[0]));
}

#[test]
fn a_checkpoint_that_failed_lets_no_server_go() {
    let (mut scene, servers, worker) = Scene::with_checkpoints(2);
    let everybody = [servers[0], servers[1], worker];
    scene.finish(worker);
    assert!(!scene.cluster.drain(scene.now, servers[0]));
    scene.save(&servers, "there is no room");
    assert!(!scene.cluster.drain(scene.now, servers[0]));
    scene.pass(10, &everybody);
    scene.save(&servers, "");
    assert!(scene.cluster.drain(scene.now, servers[0]));
}

#[test]
fn a_server_without_values_that_can_be_saved_may_go_at_once() {
    let (mut scene, _, _) = Scene::with_checkpoints(1);
    let spare = scene.join(Role::Ps, "spare");
    assert!(scene.cluster.drain(scene.now, spare));

    let (mut scene, _) = Scene::training(Mode::Async, 1);
    let server = scene.cluster.durable.servers()[0];
    assert!(scene.cluster.drain(scene.now, server));

    let mut scene = Scene::new(Mode::Async, Some(1), 1);
    let server = scene.join(Role::Ps, "ps");
    assert!(scene.cluster.drain(scene.now, server));
}

#[test]
fn in_sync_mode_no_step_is_planned_while_a_server_is_about_to_stop() {
    let (mut scene, servers, worker) = Scene::before_the_first_in(Mode::Sync, 1);
    scene.work(worker);
    scene.save(&servers, "");
    scene.split(worker);
    assert!(!scene.cluster.drain(scene.now, servers[0]));
    // The step that is being made is not part of a checkpoint yet.
    assert_eq!(scene.cluster.refresh_view().checkpoint, None);
    scene.finish(worker);
    assert!(scene.cluster.refresh_view().checkpoint.is_some());
    assert!(matches!(scene.work(worker), (Work::Idle(_), _)));
    scene.save(&servers, "");
    assert!(scene.cluster.drain(scene.now, servers[0]));
    scene
        .cluster
        .leave(scene.now, servers[0], &wire::LeaveRequest::default());
    assert!(!scene.cluster.draining.contains_key(&servers[0].id));
}

#[test]
fn a_checkpoint_for_a_server_that_stops_is_ordered_anew_when_another_server_returns() {
    let (mut scene, servers, worker) = Scene::with_checkpoints(2);
    scene.work(worker);
    let returns = |scene: &mut Scene| {
        let source = &scene.cluster.shard_map().unwrap().shards[1].source;
        let generation = scene.cluster.durable.servers()[1].generation.0;
        let holding = wire::Holding {
            shard: 1,
            source_epoch: source.epoch.0,
            generation,
        };
        let request = wire::RegisterRequest {
            identity: "ps1".to_owned(),
            address: "ps1".to_owned(),
            holding: Some(holding),
            ..wire::RegisterRequest::default()
        };
        scene
            .cluster
            .register(scene.now, Role::Ps, request)
            .unwrap()
    };
    assert!(!scene.drains(servers[0]));
    assert_eq!(scene.order(), Some(1));
    let other = returns(&mut scene);
    assert_eq!(scene.order(), None);
    // The next checkpoint is ordered at once, not only when one is due.
    scene.pass(1, &[servers[0], other, worker]);
    assert_eq!(scene.order(), Some(2));
    scene.save(&[servers[0], other], "");
    assert!(scene.drains(servers[0]));
    // A checkpoint that is whole counts, whatever happens afterwards.
    returns(&mut scene);
    assert!(scene.drains(servers[0]));
}
