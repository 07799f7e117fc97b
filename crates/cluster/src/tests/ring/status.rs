//! The status of a ring, and its counts.

use super::super::super::ring::Cause;
use super::*;

impl Rings {
    fn status(&self) -> wire::RingStatus {
        self.scene.cluster.status(self.scene.now).ring.unwrap()
    }

    /// Returns the seconds for which others wait for each member, in rank order.
    fn waited_for(&self) -> Vec<Option<f64>> {
        let members = self.status().members.into_iter();
        members.map(|member| member.waited_for).collect()
    }

    fn broken(&self) -> [u64; 6] {
        Cause::ALL.map(|cause| self.scene.cluster.rings().broken(cause))
    }
}

#[test]
fn the_status_says_who_is_waited_for_and_for_how_long() {
    let mut rings = Rings::empty(3);
    for _ in 0..3 {
        rings.start();
    }
    let ring = rings.form();
    rings.take(&ring, &rings.all());
    rings.work(0);
    rings.work(1);
    // All have joined, and one has not taken the values yet.
    rings.scene.now += Duration::from_secs(4);
    assert_eq!(rings.status().stage(), wire::RingStage::Formed);
    assert_eq!(rings.waited_for(), [None, None, Some(4.0)]);
    rings.work(2);
    assert_eq!(rings.status().stage(), wire::RingStage::Settled);
    assert_eq!(rings.waited_for(), [None, None, None]);

    rings.step(&[0, 2], false);
    let slow: wire::Task = rings.workers[1].task.into();
    let (first, last) = (rings.workers[0].task, rings.workers[2].task);
    let first_waits: wire::Task = first.into();
    // The last one waits for the first, and so for the slow one.
    rings
        .scene
        .cluster
        .waiting(rings.scene.now, first, vec![slow]);
    rings.scene.now += Duration::from_secs(2);
    rings
        .scene
        .cluster
        .waiting(rings.scene.now, last, vec![first_waits]);
    rings.scene.now += Duration::from_secs(5);
    // A wait for another one goes on.
    rings
        .scene
        .cluster
        .waiting(rings.scene.now, first, vec![slow]);
    assert_eq!(rings.waited_for(), [None, Some(7.0), None]);
    for task in [first, last] {
        rings
            .scene
            .cluster
            .waiting(rings.scene.now, task, Vec::new());
    }
    assert_eq!(rings.waited_for(), [None, None, None]);
}

/// A worker that was late is behind by several steps, while it waits for one that has made more.
#[test]
fn a_late_worker_that_waits_is_not_waited_for() {
    let mut rings = Rings::new(3);
    rings.step(&[1, 2], true);
    rings.step(&[1], true);
    let (now, behind, ahead) = (
        rings.scene.now,
        rings.workers[0].task,
        rings.workers[1].task,
    );
    let last: wire::Task = rings.workers[2].task.into();
    for waits in [behind, ahead] {
        rings.scene.cluster.waiting(now, waits, vec![last]);
    }
    rings.scene.now += Duration::from_secs(3);
    assert_eq!(rings.waited_for(), [None, None, Some(3.0)]);
}

#[test]
fn the_others_wait_for_the_worker_that_evaluates() {
    let mut rings = Rings::new(2);
    while rings.scene.cluster.durable.done().1 < SAMPLES {
        rings.step(&rings.all(), true);
    }
    assert!(matches!(rings.work(1), Work::Evaluate { .. }));
    assert!(matches!(rings.work(0), Work::Idle(_)));
    assert_eq!(rings.waited_for(), [None, None]);
    rings.scene.now += Duration::from_secs(4);
    assert_eq!(rings.waited_for(), [None, Some(4.0)]);
    rings.scene.report(rings.workers[1].task, 0).unwrap();
    rings.step(&rings.all(), true);
    assert_eq!(rings.waited_for(), [None, None]);
}

#[test]
fn the_others_wait_for_a_worker_that_has_not_reported_its_last_step() {
    let mut rings = Rings::new(3);
    while !matches!(rings.work(0), Work::Idle(_)) {
        rings.step(&[0, 2], true);
        rings.step(&[1], false);
    }
    assert_eq!(rings.waited_for(), [None, None, None]);
    rings.scene.now += Duration::from_secs(3);
    assert_eq!(rings.waited_for(), [None, Some(3.0), None]);
}

#[test]
fn the_others_wait_for_the_worker_that_copies_its_values() {
    let mut rings = Rings::with_checkpoints(2);
    while rings.scene.cluster.refresh_view().checkpoint.is_none() {
        rings.step(&rings.all(), true);
    }
    rings.scene.now += Duration::from_secs(2);
    assert_eq!(rings.waited_for(), [Some(2.0), None]);
    rings.work(0);
    assert_eq!(rings.waited_for(), [None, None]);
}

/// The stall time-out does not count while a checkpoint is written, but others wait all the same.
#[test]
fn the_others_wait_for_the_evaluator_while_a_checkpoint_is_written() {
    let mut rings = Rings::with_checkpoints(2);
    while !matches!(rings.work(1), Work::Evaluate { .. }) {
        rings.step(&rings.all(), true);
    }
    rings.work(0);
    assert!(rings.scene.cluster.refresh_view().checkpoint.is_some());
    let tasks: Vec<Task> = rings.workers.iter().map(|worker| worker.task).collect();
    rings.scene.pass(3, &tasks);
    assert_eq!(rings.waited_for(), [None, Some(3.0)]);
}

#[test]
fn the_copier_names_the_worker_that_does_not_help_it() {
    let mut rings = Rings::with_checkpoints(3);
    rings.scene.cluster.job.strategy.optimizer_copies = Some(1);
    while rings.scene.cluster.refresh_view().checkpoint.is_none() {
        rings.step(&rings.all(), true);
    }
    rings.scene.now += Duration::from_secs(5);
    assert_eq!(rings.waited_for(), [Some(5.0), None, None]);
    let (now, copier) = (rings.scene.now, rings.workers[0].task);
    let helper: wire::Task = rings.workers[2].task.into();
    rings.scene.cluster.waiting(now, copier, vec![helper]);
    rings.scene.now += Duration::from_secs(2);
    assert_eq!(rings.waited_for(), [None, None, Some(2.0)]);
    // The copier was stopped before it reported that its wait is over.
    let helper = rings.workers[2].task;
    rings
        .scene
        .cluster
        .waiting(now, helper, vec![copier.into()]);
    assert_eq!(rings.waited_for(), [Some(7.0), None, None]);
}

#[test]
fn a_ring_that_is_being_formed_waits_for_those_that_have_not_joined() {
    let mut rings = Rings::new(2);
    rings.step(&rings.all(), true);
    let before = rings.status();
    let lost = rings.workers[1].task;
    rings.ask(0, Some(lost)).unwrap();
    rings.scene.now += Duration::from_secs(3);
    let status = rings.status();
    assert_eq!(status.stage(), wire::RingStage::Forming);
    assert_eq!(
        (status.number, status.seconds),
        (before.number + 1, Some(3.0))
    );
    let joined: Vec<bool> = status.members.iter().map(|member| member.joined).collect();
    assert_eq!(joined, [true, false]);
    assert_eq!(rings.waited_for(), [None, Some(3.0)]);
    assert_eq!(rings.scene.cluster.ring_figures().members, 0);
}

#[test]
fn rings_that_break_are_counted_by_their_cause() {
    let mut rings = Rings::new(3);
    rings.step(&rings.all(), true);
    assert_eq!(rings.broken(), [0; 6]);
    let newcomer = rings.start();
    let _ = rings.ask(newcomer, None);
    rings.join_all();
    rings.step(&rings.all(), true);
    assert_eq!(rings.broken(), [1, 0, 0, 0, 0, 0]);
    let lost = rings.workers[1].task;
    let _ = rings.ask(0, Some(lost));
    rings.join_all();
    rings.step(&rings.all(), true);
    assert_eq!(rings.broken(), [1, 1, 0, 0, 0, 0]);
    rings.scene.now += Duration::from_secs(1);
    rings.kill(3);
    let names: Vec<String> = rings.status().broken.into_iter().map(|b| b.cause).collect();
    assert_eq!(names, ["newcomer", "link", "gone"]);
    let took = rings.scene.cluster.rings().took_after(0).count();
    assert_eq!(took, 2, "the third is not formed yet");
}

#[test]
fn a_job_with_servers_has_no_ring() {
    let (scene, _) = Scene::training(Mode::Sync, 1);
    assert_eq!(scene.cluster.status(scene.now).ring, None);
}
