//! The state stays small, however long a job runs and however many members come and go.

use super::*;
use crate::CheckpointPlace;

/// Returns the size of the state in bytes.
fn size(scene: &Scene) -> usize {
    let saved = scene.cluster.snapshot(scene.now);
    serde_json::to_vec(&saved).unwrap().len()
}

/// Adds an evaluation, and a worker with an identity of its own that joins and leaves.
fn epoch(scene: &mut Scene, epoch: u32) -> Task {
    scene.cluster.add_evaluation(wire::EvaluationReport {
        data_epoch: epoch,
        samples: 1000,
        metrics: [
            ("loss".to_owned(), 1.0 / f64::from(epoch + 3)),
            ("accuracy".to_owned(), 1.0 - 1.0 / f64::from(epoch + 3)),
        ]
        .into(),
        ..wire::EvaluationReport::default()
    });
    let task = scene.join(Role::Worker, &format!("worker-{epoch:05}"));
    scene
        .cluster
        .leave(scene.now, task, &wire::LeaveRequest::default());
    scene.now += Duration::from_millis(1);
    task
}

#[test]
fn the_state_stays_as_small_as_it_was() {
    let mut scene = Scene::new(Mode::Async, Some(1), 1);
    let place = CheckpointPlace {
        location: "here".to_owned(),
        run_id: "run".to_owned(),
    };
    scene.cluster = scene.cluster.with_checkpoints(place, 0);
    let server = scene.join(Role::Ps, "ps");
    let mut sizes = Vec::new();
    for turn in 0..4_400 {
        epoch(&mut scene, turn);
        if turn % 400 == 399 {
            sizes.push(size(&scene));
        }
    }
    // Only the digits of numbers have grown.
    let (first, last) = (sizes[0], sizes[sizes.len() - 1]);
    assert!(last < first + first / 10, "{sizes:?}");
    assert!(last < 64 << 10, "{sizes:?}");
    // The live members and the newest evaluation are still known.
    assert!(scene.cluster.durable.members.contains_key(&server.id));
    assert_eq!(
        scene
            .cluster
            .durable
            .evaluations
            .done
            .last()
            .unwrap()
            .data_epoch,
        4_399
    );
}

#[test]
fn no_index_is_given_twice_and_no_generation_falls() {
    let mut scene = Scene::new(Mode::Async, Some(1), 1);
    let early = epoch(&mut scene, 0);
    let early = {
        // Its generation is high when it is forgotten.
        let mut task = early;
        for _ in 0..5 {
            task = scene.join(Role::Worker, "worker-00000");
        }
        assert_eq!((task.id, task.generation.0), (early.id, 6));
        scene
            .cluster
            .leave(scene.now, task, &wire::LeaveRequest::default());
        task
    };
    let mut given = std::collections::BTreeSet::from([early.id]);
    for turn in 1..300 {
        let task = epoch(&mut scene, turn);
        assert!(given.insert(task.id), "{task} was given out before");
        if turn % 50 == 0 {
            // A restarted coordinator continues the indices.
            scene.cluster = scene.resumed();
        }
    }
    assert!(!scene.cluster.durable.members.contains_key(&early.id));
    let back = scene.join(Role::Worker, "worker-00000");
    assert!(given.insert(back.id));
    assert!(
        back.generation > early.generation,
        "{back:?} after {early:?}"
    );
    // Its late calls are refused all the same.
    let origin = Origin {
        job: "flambeau".to_owned(),
        run: RunNumber::default(),
        task: early,
        epoch: scene.cluster.durable.epoch(),
        clock: Clock(0),
        sequence: Sequence(1),
    };
    let refused = scene.cluster.admit(&origin).unwrap_err();
    assert_eq!(refused.reason, Reason::Fenced);
}

#[test]
fn what_the_forgotten_have_done_stays_in_the_summary() {
    let (mut scene, tasks) = Scene::training(Mode::Async, 2);
    for task in &tasks {
        scene.finish(*task);
    }
    let report = wire::ShardReport {
        updates: 10,
        staleness_sum: 30,
        max_clock_lead: 4,
        ..wire::ShardReport::default()
    };
    let spare = scene.join(Role::Ps, "spare");
    // It has held a shard once.
    scene
        .cluster
        .observed
        .shard_reports
        .insert(spare.id, report);
    let before = scene.cluster.summary(scene.now);
    for task in tasks.iter().chain([&spare]) {
        scene
            .cluster
            .leave(scene.now, *task, &wire::LeaveRequest::default());
    }
    for turn in 0..200 {
        epoch(&mut scene, turn);
    }
    assert!(!scene.cluster.durable.members.contains_key(&spare.id));
    let after = scene.cluster.summary(scene.now);
    assert_eq!(after.workers, before.workers);
    assert_eq!(after.max_clock_lead, 4);
    assert_eq!(
        after.mean_gradient_staleness,
        before.mean_gradient_staleness
    );
    // The server of a shard is never forgotten: it gets it again under its identity.
    assert!(
        scene
            .cluster
            .durable
            .members
            .values()
            .any(|m| m.identity == "ps")
    );
}

#[test]
fn an_index_stays_taken_when_its_worker_is_forgotten_while_others_come_back() {
    let mut scene = Scene::new(Mode::Async, Some(1), 1);
    let leaves = |scene: &mut Scene, task: Task| {
        scene.now += Duration::from_millis(1);
        scene.cluster.heartbeat(scene.now, task);
        let leave = wire::LeaveRequest::default();
        scene.cluster.leave(scene.now, task, &leave);
    };
    let early: Vec<Task> = (0..70)
        .map(|index| scene.join(Role::Worker, &format!("early-{index}")))
        .collect();
    let last = scene.join(Role::Worker, "last");
    leaves(&mut scene, last);
    for task in &early {
        leaves(&mut scene, *task);
    }
    scene.join(Role::Worker, "early-69");
    assert!(!scene.cluster.durable.members.contains_key(&last.id));
    let next = scene.join(Role::Worker, "next");
    assert!(next.id.index > last.id.index, "{next} after {last}");
}

#[test]
fn the_server_of_a_shard_is_known_however_many_members_leave_after_it() {
    let (mut scene, servers, _) = Scene::with_checkpoints(1);
    scene
        .cluster
        .leave(scene.now, servers[0], &wire::LeaveRequest::default());
    for turn in 0..100 {
        epoch(&mut scene, turn);
    }
    let again = scene.join(Role::Ps, "ps0");
    assert_eq!(again.id, servers[0].id);
    assert_eq!(scene.cluster.durable.servers(), [again]);
}

#[test]
fn losses_of_workers_that_are_gone_for_good_are_forgotten() {
    let (mut scene, servers, worker) = Scene::with_checkpoints(1);
    scene.finish(worker);
    let origin = scene.origin(worker, Clock(1));
    let report = wire::LostReport {
        updates: 1,
        ..wire::LostReport::default()
    };
    scene.cluster.lost(scene.now, &origin, &report).unwrap();
    let found = |scene: &Scene| {
        let saved = serde_json::to_value(scene.cluster.snapshot(scene.now)).unwrap();
        saved["losses"]["found"].as_array().unwrap().len()
    };
    assert_eq!(found(&scene), 1);
    let other = scene.join(Role::Worker, "other");
    scene.variables(other);
    scene
        .cluster
        .leave(scene.now, worker, &wire::LeaveRequest::default());
    // A checkpoint that is kept may lack its pushes.
    assert_eq!(found(&scene), 1);
    for _ in 0..=scene.cluster.job().checkpoint.keep {
        scene.finish(other);
        scene.pass(31, &[servers[0], other]);
        scene.save(&servers, "");
    }
    assert_eq!(found(&scene), 0);
    assert_eq!(scene.cluster.lost_updates(), 1);
}
