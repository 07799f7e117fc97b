//! Single cases.

use super::*;
use crate::members::Standing;

#[test]
fn a_ring_trains_to_the_end_of_the_data() {
    for workers in [1, 2, 3] {
        let mut rings = Rings::new(workers);
        assert!(rings.scene.cluster.shard_map().is_err());
        rings.finish();
        let steps = 2 * SAMPLES.div_ceil(BATCH * u64::from(workers));
        assert_eq!(rings.scene.cluster.durable.done().0, steps);
    }
}

#[test]
fn a_step_that_none_has_made_is_made_again_with_the_same_data() {
    let mut rings = Rings::new(3);
    rings.step(&rings.all(), true);
    let (_, abandoned) = rings.next_step(0).unwrap();
    rings.kill(1);
    assert_eq!(rings.work(0), Work::Regroup);
    rings.join_all();
    let (_, again) = rings.next_step(0).unwrap();
    assert_eq!((again.0, again.1), (abandoned.0, abandoned.1));
    rings.finish();
}

#[test]
fn a_step_that_one_has_made_is_made_by_all() {
    let mut rings = Rings::new(3);
    // It has the sum, and its report is lost.
    rings.step(&[2], false);
    rings.kill(0);
    rings.join_all();
    assert_eq!(rings.workers[0].clock, Clock(1));
    assert_eq!(rings.scene.cluster.durable.done(), (1, 3 * BATCH));
    rings.finish();
}

#[test]
fn a_step_that_only_a_dead_worker_has_made_does_not_count() {
    let mut rings = Rings::new(3);
    rings.step(&[1], true);
    rings.kill(1);
    rings.finish_with_no_step_counted();
}

#[test]
fn a_step_counts_only_once_others_have_it() {
    let mut rings = Rings::new(3);
    rings.step(&[2], true);
    rings.kill(0);
    let ring = rings.form();
    assert_eq!((ring.clock, ring.source, ring.broadcast), (1, 1, true));
    // The only worker with the step dies before another has taken its values.
    rings.take(&ring, &[]);
    rings.enter(&ring);
    rings.kill(1);
    rings.finish_with_no_step_counted();
}

#[test]
fn values_with_an_abandoned_step_do_not_count() {
    let mut rings = Rings::new(3);
    rings.step(&[2], false);
    rings.evict(2);
    rings.join_all();
    rings.step(&rings.all(), true);
    // All have one step now, and the worker that comes back has another one than the others.
    rings.come_back();
    let ring = rings.form();
    assert_eq!((ring.clock, ring.broadcast), (1, true));
    rings.take(&ring, &rings.all());
    rings.join_all();
    rings.finish();
}

#[test]
fn a_newcomer_takes_the_values_of_the_others() {
    let mut rings = Rings::new(2);
    rings.step(&rings.all(), true);
    let newcomer = rings.start();
    assert!(matches!(rings.ask(newcomer, None), Ok(Joined::Pending(_))));
    assert!(
        rings
            .scene
            .cluster
            .missing()
            .contains("worker-0 has not joined"),
        "{}",
        rings.scene.cluster.missing()
    );
    rings.join_all();
    assert_eq!(rings.workers[newcomer].clock, Clock(1));
    rings.finish();
}

#[test]
fn a_worker_that_asks_twice_gets_the_same_ring() {
    let mut rings = Rings::new(2);
    let late = rings.workers[0].clone();
    rings.workers[0].ring = Epoch(0);
    let Ok(Joined::Ring(ring)) = rings.ask(0, None) else {
        panic!("its answer was lost, and the ring still stands");
    };
    assert_eq!(Epoch(ring.number), late.ring);
    // A member that asks with the number of the ring has lost a link of it.
    rings.workers[0].ring = late.ring;
    assert!(matches!(rings.ask(0, None), Ok(Joined::Pending(_))));
    rings.join_all();
    assert!(rings.workers[0].ring > late.ring);
    rings.finish();
}

#[test]
fn two_workers_that_cannot_reach_each_other_are_parted() {
    let mut rings = Rings::new(3);
    let (one, other) = (rings.workers[0].task, rings.workers[2].task);
    for _ in 0..2 {
        assert!(matches!(rings.ask(0, Some(other)), Ok(Joined::Pending(_))));
        rings.ask(1, None).unwrap();
        match rings.ask(2, Some(one)) {
            Ok(Joined::Ring(ring)) => rings.take(&ring, &rings.all()),
            other => assert_eq!(other.unwrap_err().reason, Reason::Fenced),
        }
    }
    let member = rings.scene.cluster.durable.member(other.id).unwrap();
    assert!(!member.is_alive());
    let why = "another worker cannot reach it".to_owned();
    assert_eq!(member.standing, Standing::Gone(why));
    rings.workers.remove(2);
    rings.join_all();
    rings.finish();
}

#[test]
fn a_job_fails_when_all_values_are_lost() {
    let mut rings = Rings::new(2);
    rings.step(&rings.all(), true);
    rings.kill(0);
    rings.kill(0);
    let newcomer = rings.start();
    assert_eq!(rings.ask(newcomer, None), Ok(Joined::Ended));
    let error = &rings.scene.cluster.durable.outcome.error;
    assert!(
        error.contains("all workers with the values are gone"),
        "{error}"
    );
}

#[test]
fn a_worker_that_holds_up_a_ring_is_evicted_alone() {
    let mut rings = Rings::new(3);
    rings.step(&[0, 2], false);
    for waits in [0, 2] {
        let on = vec![rings.workers[1].task.into()];
        rings
            .scene
            .cluster
            .waiting(rings.scene.now, rings.workers[waits].task, on);
    }
    let tasks: Vec<Task> = rings.workers.iter().map(|worker| worker.task).collect();
    rings.scene.pass(62, &tasks);
    let alive: Vec<bool> = tasks
        .iter()
        .map(|task| {
            rings
                .scene
                .cluster
                .durable
                .member(task.id)
                .unwrap()
                .is_alive()
        })
        .collect();
    assert_eq!(alive, [true, false, true]);
}

#[test]
fn impossible_values_and_foreign_calls_are_refused() {
    let mut rings = Rings::new(2);
    rings.workers[0].unreported = 1;
    assert_eq!(
        rings.report(0, 99),
        Ok(()),
        "a report without a new step changes nothing"
    );
    rings.workers[0].clock = Clock(1);
    assert_eq!(rings.report(0, 99).unwrap_err().reason, Reason::NotLeased);

    let (mut scene, workers) = Scene::training(Mode::Sync, 1);
    let origin = scene.origin(workers[0], Clock(0));
    let asked = scene
        .cluster
        .join_ring(scene.now, &origin, &wire::JoinRingRequest::default());
    assert_eq!(asked.unwrap_err().reason, Reason::Malformed);
}

#[test]
fn a_late_request_does_not_join_the_next_ring() {
    let mut rings = Rings::new(2);
    let late = rings.origin(0);
    rings.join_all();
    rings.step(&rings.all(), true);
    let broken = rings.ask(1, None).unwrap();
    assert!(matches!(broken, Joined::Pending(_)));
    let cluster = &mut rings.scene.cluster;
    let joined = cluster.join_ring(rings.scene.now, &late, &wire::JoinRingRequest::default());
    assert!(matches!(joined, Ok(Joined::Pending(_))), "{joined:?}");
    let missing = cluster.missing_in_ring();
    assert!(missing.contains("has not joined"), "{missing}");
    rings.join_all();
    assert_eq!(rings.workers[0].clock, Clock(1));
}

#[test]
fn a_stored_ring_that_is_impossible_is_refused() {
    let mut rings = Rings::new(2);
    rings.step(&rings.all(), true);
    let stored = rings.scene.read_back();
    assert_eq!(stored.check(), Ok(()));
    let mut value = serde_json::to_value(&stored).unwrap();
    value["ring"]["source"] = 7.into();
    let wrong: Durable = serde_json::from_value(value).unwrap();
    assert_eq!(wrong.check(), Err("rank 7 of 2 has the values".to_owned()));
}

#[test]
fn a_member_that_others_have_lost_is_left_out_before_its_lease_ends() {
    let mut rings = Rings::new(3);
    rings.step(&rings.all(), true);
    // It has a step more, and is silent.
    rings.step(&[2], false);
    let silent = rings.workers.remove(2);
    for worker in rings.all() {
        assert!(matches!(
            rings.ask(worker, Some(silent.task)),
            Ok(Joined::Pending(_))
        ));
    }
    let alive: Vec<Task> = rings.workers.iter().map(|worker| worker.task).collect();
    rings.scene.pass(1, &[&alive[..], &[silent.task]].concat());
    rings.join_all();
    rings.step(&rings.all(), true);
    let known = rings.scene.cluster.durable.member(silent.task.id);
    assert!(known.unwrap().is_alive(), "its lease goes on");
    // It is alive after all, with a step that the others have made with other samples.
    rings.workers.push(silent);
    rings.join_all();
    rings.finish();
}

#[test]
fn a_member_that_nobody_has_lost_is_waited_for() {
    let mut rings = Rings::new(3);
    rings.step(&rings.all(), true);
    let late = rings.workers.remove(2);
    let other = rings.workers[1].task;
    for worker in rings.all() {
        rings.ask(worker, Some(other)).unwrap();
    }
    let all: Vec<Task> = rings.workers.iter().map(|worker| worker.task).collect();
    rings.scene.pass(5, &[&all[..], &[late.task]].concat());
    assert!(matches!(rings.ask(0, Some(other)), Ok(Joined::Pending(_))));
    rings.workers.push(late);
    rings.join_all();
    rings.finish();
}

#[test]
fn late_steps_are_counted_apart_and_have_no_loss() {
    let mut rings = Rings::new(2);
    rings.step(&rings.all(), false);
    let split = rings.workers[0].held.unwrap().0.id;
    let origin = rings.origin(0);
    let report = |steps, late, samples| wire::FinishStepRequest {
        split,
        steps,
        late,
        samples,
        loss_sum: 2.5,
        ..wire::FinishStepRequest::default()
    };
    let refused = |rings: &mut Rings, request, part: &str| {
        let (now, cluster) = (rings.scene.now, &mut rings.scene.cluster);
        let refusal = cluster.finish_step(now, &origin, &request).unwrap_err();
        assert!(refusal.message.contains(part), "{refusal}");
        assert_eq!(refusal.reason, Reason::Malformed);
    };
    refused(&mut rings, report(1, 1, 0), "the job has no backup workers");
    rings.scene.cluster.job.strategy.backup_workers = Some(1);
    refused(&mut rings, report(1, 2, 0), "is late in 2 of 1 steps");
    refused(
        &mut rings,
        report(1, 1, BATCH),
        "has 5 samples of steps in which it is late",
    );
    let (now, cluster) = (rings.scene.now, &mut rings.scene.cluster);
    cluster.finish_step(now, &origin, &report(1, 1, 0)).unwrap();
    let summary = cluster.summary(now);
    assert_eq!((summary.late_steps, summary.skipped_steps), (1, 0));
    assert_eq!(cluster.observed.recent.loss_sum, 0.0);
}
