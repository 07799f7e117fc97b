//! The state stays small, however long a job runs and however many members come and go.

use super::*;
use crate::cluster::Place;

/// Returns the size of the state in bytes.
fn size(scene: &Scene) -> usize {
    let saved = scene.cluster.save_all(scene.now);
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
    let place = Place {
        location: "here".to_owned(),
        probe: "run".to_owned(),
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
    assert!(scene.cluster.members.contains_key(&server.id));
    assert_eq!(
        scene.cluster.evaluations.done.last().unwrap().data_epoch,
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
            let saved = scene.cluster.save_all(scene.now);
            let text = serde_json::to_string(&saved).unwrap();
            let job = scene.cluster.job().clone();
            let saved = serde_json::from_str(&text).unwrap();
            scene.cluster = Cluster::resume(job, saved, scene.now);
        }
    }
    assert!(!scene.cluster.members.contains_key(&early.id));
    let back = scene.join(Role::Worker, "worker-00000");
    assert!(given.insert(back.id));
    assert!(
        back.generation > early.generation,
        "{back:?} after {early:?}"
    );
    // Its late calls are refused all the same.
    let origin = Origin {
        job: "flambeau".to_owned(),
        run: RunId::default(),
        task: early,
        epoch: scene.cluster.epoch(),
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
    scene.cluster.shard_reports.insert(spare.id, report);
    let before = scene.cluster.summary(scene.now);
    for task in tasks.iter().chain([&spare]) {
        scene
            .cluster
            .leave(scene.now, *task, &wire::LeaveRequest::default());
    }
    for turn in 0..200 {
        epoch(&mut scene, turn);
    }
    assert!(!scene.cluster.members.contains_key(&spare.id));
    let after = scene.cluster.summary(scene.now);
    assert_eq!(after.workers, before.workers);
    assert_eq!(after.max_clock_lead, 4);
    assert_eq!(
        after.mean_gradient_staleness,
        before.mean_gradient_staleness
    );
    // The server of a shard is never forgotten: it gets it again under its identity.
    assert!(scene.cluster.members.values().any(|m| m.identity == "ps"));
}
