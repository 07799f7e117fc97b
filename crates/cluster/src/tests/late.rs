//! Registrations that arrive twice, or late.

use super::*;
use shared_proto::refusal::Refusal;

impl Scene {
    fn registers(&mut self, process: u64, attempt: u32) -> Result<Task, Refusal> {
        let request = wire::RegisterRequest {
            identity: "w".to_owned(),
            process,
            attempt,
            ..wire::RegisterRequest::default()
        };
        self.cluster.register(self.now, Role::Worker, request)
    }

    fn is_member(&self, task: Task) -> bool {
        let origin = Origin {
            job: "flambeau".to_owned(),
            run: RunNumber::default(),
            task,
            epoch: self.cluster.durable.epoch(),
            clock: Clock(0),
            sequence: Sequence(1),
        };
        self.cluster.admit(&origin).is_ok()
    }
}

#[test]
fn a_registration_that_comes_twice_is_answered_with_the_same_task_and_a_full_lease() {
    let mut scene = Scene::new(Mode::Async, Some(1), 1);
    let task = scene.registers(7, 1).unwrap();
    scene.pass(9, &[]);
    assert_eq!(scene.registers(7, 1).unwrap(), task);
    scene.pass(9, &[]);
    assert!(scene.is_member(task));
}

#[test]
fn a_late_registration_does_not_supersede_its_own_sender() {
    let mut scene = Scene::new(Mode::Async, Some(1), 1);
    let first = scene.registers(7, 1).unwrap();
    // Its lease ends, and it registers again; then the copy of its first call arrives.
    scene.pass(11, &[]);
    let second = scene.registers(7, 2).unwrap();
    assert!(second.generation > first.generation);
    let late = scene.registers(7, 1).unwrap_err();
    assert_eq!(late.reason, Reason::OutOfOrder);
    assert!(scene.is_member(second));
}

#[test]
fn a_copy_of_the_newest_registration_changes_nothing_once_its_lease_has_ended() {
    let mut scene = Scene::new(Mode::Async, Some(1), 1);
    let first = scene.registers(7, 1).unwrap();
    scene.pass(11, &[]);
    let late = scene.registers(7, 1).unwrap_err();
    assert_eq!(late.reason, Reason::OutOfOrder);
    assert!(!scene.is_member(first));
    // The process itself registers with a new number.
    let second = scene.registers(7, 2).unwrap();
    assert!(second.generation > first.generation && scene.is_member(second));
}

#[test]
fn a_process_that_was_superseded_cannot_take_its_identity_back() {
    let mut scene = Scene::new(Mode::Async, Some(1), 1);
    let first = scene.registers(7, 1).unwrap();
    let second = scene.registers(8, 1).unwrap();
    assert!(!scene.is_member(first));
    // The late call is refused after a restart of the coordinator too.
    scene.cluster = scene.resumed();
    let late = scene.registers(7, 2).unwrap_err();
    assert_eq!(late.reason, Reason::Superseded);
    assert!(scene.is_member(second));
    // The second registers again as it likes.
    assert!(scene.registers(8, 2).is_ok());
}
