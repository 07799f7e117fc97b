//! Leases, time-outs, and the state that a member keeps when it registers again.

use super::*;
use crate::Record;

impl Scene {
    fn is_live(&self, task: Task) -> bool {
        self.cluster.durable.members[&task.id].is_alive()
    }

    fn left(&mut self) -> usize {
        let records = self.cluster.take_records().into_iter();
        records
            .filter(|record| matches!(record, Record::Left { .. }))
            .count()
    }
}

#[test]
fn only_servers_and_workers_with_an_identity_register() {
    let mut scene = Scene::new(Mode::Async, Some(1), 1);
    for (role, identity) in [
        (Role::Coordinator, "c"),
        (Role::Worker, ""),
        (Role::Coordinator, ""),
    ] {
        let request = wire::RegisterRequest {
            identity: identity.to_owned(),
            ..wire::RegisterRequest::default()
        };
        let refused = scene.cluster.register(scene.now, role, request);
        assert_eq!(refused.unwrap_err().reason, Reason::Malformed, "{role:?}");
    }
}

#[test]
fn a_worker_that_registers_again_keeps_what_it_has_done_and_begins_a_new_clock() {
    let (mut scene, tasks) = Scene::training(Mode::Async, 1);
    scene.finish_with(tasks[0], |request| {
        request.loss_sum = 0.5;
        request.times = Some(wire::StepTimes {
            wait: 2.0,
            ..wire::StepTimes::default()
        });
    });
    let again = scene.join(Role::Worker, "w0");
    let progress = &scene.cluster.durable.members[&again.id].progress;
    assert_eq!((progress.samples, progress.steps), (5, 1));
    assert_eq!((progress.times.wait, progress.loss), (2.0, 0.5));
    assert_eq!((progress.clock, progress.pushes), (Clock(0), 0));
    assert_eq!(scene.cluster.summary(scene.now).workers, 1);
}

#[test]
fn a_lease_ends_after_its_time_and_not_at_it() {
    let (mut scene, tasks) = Scene::training(Mode::Async, 1);
    let server = scene.server();
    scene.cluster.heartbeat(scene.now, tasks[0]);
    scene.pass(10, &[server]);
    assert!(scene.is_live(tasks[0]));
    scene.pass(1, &[server]);
    assert!(!scene.is_live(tasks[0]));
    let fault_counts = scene.cluster.fault_counts();
    assert_eq!(
        (fault_counts.lost_workers, fault_counts.lost_servers),
        (1, 0)
    );
}

#[test]
fn silent_servers_and_workers_are_counted_apart_and_not_once_the_job_is_over() {
    for over in [false, true] {
        let (mut scene, servers, worker) = Scene::with_checkpoints(2);
        let second = scene.join(Role::Worker, "second");
        if over {
            scene.cluster.fail(scene.now, "no power".to_owned());
        }
        scene.pass(11, &[servers[0], second]);
        assert!(!scene.is_live(worker) && !scene.is_live(servers[1]));
        scene.pass(11, &[second]);
        let fault_counts = scene.cluster.fault_counts();
        let expected = if over { (0, 0) } else { (1, 2) };
        assert_eq!(
            (fault_counts.lost_workers, fault_counts.lost_servers),
            expected
        );
    }
}

#[test]
fn a_pause_of_the_coordinator_counts_against_nobody_if_it_is_longer_than_half_a_lease() {
    let (mut scene, tasks) = Scene::training(Mode::Async, 1);
    let everybody = [tasks[0], scene.server()];
    scene.pass(1, &everybody);
    // Six of ten seconds of the lease: the member is as good as before.
    scene.now += Duration::from_secs(6);
    scene.cluster.tick(scene.now);
    scene.pass(10, &[]);
    assert!(scene.is_live(tasks[0]));
    scene.pass(1, &[]);
    assert!(!scene.is_live(tasks[0]));

    // Five seconds may be the network's fault as well.
    let (mut scene, tasks) = Scene::training(Mode::Async, 1);
    let everybody = [tasks[0], scene.server()];
    scene.pass(1, &everybody);
    scene.now += Duration::from_secs(5);
    scene.cluster.tick(scene.now);
    scene.pass(6, &[]);
    assert!(!scene.is_live(tasks[0]));
}

#[test]
fn a_worker_has_the_whole_stall_time_to_finish_a_step() {
    for mode in [Mode::Sync, Mode::Bounded] {
        let (mut scene, tasks) = Scene::training(mode, 1);
        scene.split(tasks[0]);
        let everybody = [tasks[0], scene.server()];
        scene.pass(60, &everybody);
        assert!(scene.is_live(tasks[0]), "{mode:?}");
        scene.pass(1, &everybody);
        assert!(!scene.is_live(tasks[0]), "{mode:?}");
        assert_eq!(scene.cluster.fault_counts().lost_workers, 1);
    }
}

#[test]
fn an_evaluator_that_does_nothing_is_evicted_and_another_evaluates() {
    let (mut scene, tasks) = Scene::training(Mode::Bounded, 1);
    while let (Work::Split(_), _) = scene.work(tasks[0]) {
        scene.finish(tasks[0]);
    }
    let server = scene.server();
    scene.pass(61, &[tasks[0], server]);
    assert!(!scene.is_live(tasks[0]));
    let other = scene.join(Role::Worker, "other");
    scene.variables(other);
    assert!(matches!(
        scene.work(other).0,
        Work::Evaluate { data_epoch: 0, .. }
    ));
}

#[test]
fn before_training_nobody_is_evicted_for_doing_nothing() {
    let mut scene = Scene::new(Mode::Bounded, Some(1), 2);
    scene.join(Role::Ps, "ps");
    let worker = scene.join(Role::Worker, "w");
    scene.variables(worker);
    scene.cluster.finish_initialization(worker).unwrap();
    scene.work(worker);
    let everybody = [worker, scene.server()];
    scene.pass(100, &everybody);
    assert!(scene.is_live(worker));
}

#[test]
fn while_a_shard_has_no_server_or_loads_no_worker_is_blamed() {
    let (mut scene, servers, worker) = Scene::with_checkpoints(1);
    scene.split(worker);
    let leave = wire::LeaveRequest::default();
    scene.cluster.leave(scene.now, servers[0], &leave);
    scene.pass(70, &[worker]);
    assert!(scene.is_live(worker));
    let again = scene.join(Role::Ps, "ps0");
    scene.pass(70, &[worker, again]);
    assert!(scene.is_live(worker));
    scene.restored_without_losses(again);
    scene.pass(61, &[worker, again]);
    assert!(!scene.is_live(worker));
}

#[test]
fn a_pause_of_the_coordinator_also_lengthens_the_wait_for_workers_that_were_evicted() {
    let (mut scene, servers, worker) = Scene::before_the_first_in(Mode::Sync, 1);
    scene.work(worker);
    scene.save(&servers, "");
    let other = scene.join(Role::Worker, "other");
    scene.variables(other);
    let server = scene.join(Role::Ps, "ps0");
    scene.restored_without_losses(server);
    let again = scene.join(Role::Worker, "w");
    scene.variables(again);
    scene.pass(1, &[server, again]);
    scene.now += Duration::from_secs(30);
    scene.cluster.tick(scene.now);
    scene.pass(5, &[server, again]);
    let (work, _) = scene.work(again);
    assert!(matches!(work, Work::Idle(_)), "{work:?}");
    scene.pass(5, &[server, again]);
    scene.split(again);
}

#[test]
fn after_a_restart_the_min_clock_follows_what_workers_say_of_themselves() {
    for mode in [Mode::Bounded, Mode::Sync] {
        let (mut scene, tasks) = Scene::training(mode, 1);
        let origin = scene.origin(tasks[0], Clock(5));
        // A coordinator that has not restarted knows better.
        scene.cluster.catch_up_clock(&origin);
        assert_eq!(scene.cluster.refresh_view().min_clock, Clock(0));
        scene.restart();
        scene.cluster.catch_up_clock(&origin);
        let heard = if mode == Mode::Sync {
            Clock(0)
        } else {
            Clock(5)
        };
        assert_eq!(scene.cluster.refresh_view().min_clock, heard);
        let earlier = scene.origin(tasks[0], Clock(3));
        scene.cluster.catch_up_clock(&earlier);
        assert_eq!(
            scene.cluster.durable.members[&tasks[0].id].progress.clock,
            heard
        );
    }
}

#[test]
fn each_end_of_a_member_has_one_line() {
    let (mut scene, tasks) = Scene::training(Mode::Async, 2);
    let leave = wire::LeaveRequest::default();
    for _ in 0..2 {
        scene.cluster.leave(scene.now, tasks[1], &leave);
    }
    assert_eq!(scene.left(), 1);
}

#[test]
fn what_may_be_lost_and_what_must_be_kept_are_counted_apart() {
    let (mut scene, tasks) = Scene::training(Mode::Async, 2);
    scene.split(tasks[0]);
    let before = scene.cluster.changes();
    // The step is done again if it is forgotten.
    scene.finish(tasks[0]);
    let after = scene.cluster.changes();
    assert!(after.others > before.others);
    scene.join(Role::Worker, "new");
    let joined = scene.cluster.changes();
    assert!(joined.urgent > after.urgent);
    // A heartbeat changes nothing that is stored.
    scene.cluster.heartbeat(scene.now, tasks[0]);
    assert_eq!(scene.cluster.changes(), joined);
}
