//! The state that a coordinator has after a restart.

use serde_json::Value;

use super::*;

impl Scene {
    /// Returns the state as it is stored, less the number of starts, which differs by definition.
    fn stored(&self) -> Value {
        let mut stored = serde_json::to_value(self.cluster.snapshot(self.now)).unwrap();
        stored["run"].as_object_mut().unwrap().remove("starts");
        stored
    }
}

/// A scene in which the stored fields of a worker differ from those of a new one.
fn busy() -> (Scene, Task) {
    let (mut scene, servers, worker) = Scene::with_checkpoints(1);
    for _ in 0..2 {
        scene.finish_with(worker, |request| {
            request.loss_sum = 0.5;
            request.times = Some(wire::StepTimes {
                pull: 1.0,
                compute: 2.0,
                push: 3.0,
                wait: 4.0,
            });
        });
    }
    let origin = scene.origin(worker, Clock(2));
    let report = wire::LostReport {
        updates: 1,
        ..wire::LostReport::default()
    };
    scene.cluster.lost(scene.now, &origin, &report).unwrap();
    let gone = scene.join(Role::Worker, "gone");
    scene
        .cluster
        .leave(scene.now, gone, &wire::LeaveRequest::default());
    scene.pass(31, &[servers[0], worker]);
    scene.save(&servers, "");
    (scene, worker)
}

#[test]
fn a_restart_loses_nothing_of_what_is_stored() {
    let (mut scene, worker) = busy();
    let before = scene.stored();
    let members = before["members"].as_array().unwrap();
    let of_worker = members.iter().find(|m| m[1] == "w").unwrap();
    let progress = of_worker.as_array().unwrap().last().unwrap();
    // Every field differs from that of a new member, so each comparison can fail.
    for value in progress.as_array().unwrap() {
        let of_new = match value {
            Value::Bool(_) => Value::Bool(false),
            _ => Value::from(0),
        };
        assert_ne!(*value, of_new, "{progress}");
    }
    // Pull, compute, push, wait.
    let times = serde_json::json!([2.0, 4.0, 6.0, 8.0]);
    assert!(progress.as_array().unwrap().contains(&times), "{progress}");

    scene.restart();
    assert_eq!(scene.stored(), before);
    assert_eq!(scene.cluster.starts(), 2);
    // The worker continues with the split that it held.
    scene.finish(worker);
    assert_eq!(scene.cluster.durable.done(), (3, 15));
}

#[test]
fn a_worker_may_have_come_further_than_a_restarted_coordinator_knows() {
    let (mut scene, worker) = busy();
    scene.restart();
    let (split, clock) = scene.split(worker);
    let ahead = Clock(clock.0 + 3);
    let (origin, request) = scene.step(worker, ahead, split.id, split.start + 5);
    scene
        .cluster
        .finish_step(scene.now, &origin, &request)
        .unwrap();
    // From then on it counts as before.
    let (split, clock) = scene.split(worker);
    assert_eq!(clock, ahead);
    let (origin, request) = scene.step(worker, Clock(clock.0 + 3), split.id, split.end);
    let refused = scene.cluster.finish_step(scene.now, &origin, &request);
    assert_eq!(refused.unwrap_err().reason, Reason::FutureClock);
}

#[test]
fn each_life_of_a_coordinator_has_views_newer_than_all_before() {
    let (mut scene, tasks) = Scene::training(Mode::Async, 1);
    let mut newest = scene.cluster.refresh_view().number;
    for _ in 0..3 {
        scene.restart();
        // It publishes many views, of which some reach no member before it dies.
        for _ in 0..2 {
            scene.finish(tasks[0]);
            let number = scene.cluster.refresh_view().number;
            assert!(number > newest, "{number:?} after {newest:?}");
            newest = number;
        }
    }
}

#[test]
fn the_time_of_training_goes_on_over_a_restart_without_the_time_in_between() {
    let (mut scene, tasks) = Scene::training(Mode::Async, 1);
    let server = scene.server();
    scene.pass(5, &[tasks[0], server]);
    let durable = scene.read_back();
    scene.now += Duration::from_secs(100);
    let job = scene.cluster.job().clone();
    scene.cluster = Cluster::resume(job, durable, scene.now);
    assert_eq!(scene.cluster.seconds(scene.now), 5.0);
    scene.pass(2, &[tasks[0], server]);
    assert_eq!(scene.cluster.seconds(scene.now), 7.0);
    // Without a step since, the rate is that of the time before.
    assert!(scene.cluster.summary(scene.now).samples_per_second.abs() < f64::EPSILON);

    // Before training has begun no time counts.
    let mut scene = Scene::new(Mode::Async, Some(1), 1);
    scene.join(Role::Ps, "ps");
    scene.restart();
    scene.pass(5, &[]);
    assert_eq!(scene.cluster.seconds(scene.now), 0.0);
}

#[test]
fn a_run_is_known_by_the_store_of_its_checkpoints_and_otherwise_by_its_number() {
    let (scene, _) = Scene::training(Mode::Async, 1);
    let id = |cluster: Cluster| cluster.snapshot(scene.now).run.id();
    let cluster = || Cluster::new(scene.cluster.job().clone());
    assert_eq!(id(cluster()), None);
    let numbered = id(cluster().with_run_number(RunNumber(0xab)));
    assert_eq!(numbered, Some("00000000000000ab".to_owned()));
    let place = crate::CheckpointPlace {
        location: "here".to_owned(),
        run_id: "probe".to_owned(),
    };
    let stored = cluster()
        .with_run_number(RunNumber(0xab))
        .with_checkpoints(place, 0);
    assert_eq!(id(stored), Some("probe".to_owned()));
}

#[test]
fn a_state_whose_parts_do_not_fit_is_refused() {
    let (scene, _) = busy();
    let kept = serde_json::to_value(scene.cluster.snapshot(scene.now)).unwrap();
    let check = |kept: &Value| {
        let read = serde_json::from_value(kept.clone()).map_err(|error| error.to_string());
        read.and_then(|durable: crate::Durable| durable.check())
    };
    assert_eq!(check(&kept), Ok(()));
    let number = |number: u64| Value::from(number);
    for (path, impossible) in [
        ("/outcome/phase", number(99)),
        ("/outcome/seconds", Value::from(-1)),
        ("/checkpoints/loading", serde_json::json!({"1": ""})),
        ("/checkpoints/stage", Value::from("Never")),
        ("/forgotten/next_worker", number(0)),
        ("/forgotten/next_ps", number(0)),
        ("/training/ledger/batch", number(0)),
        ("/training/ledger/epochs", number(0)),
        ("/training/ledger/samples", number(u64::MAX)),
        ("/training/ledger/position", number(SAMPLES + 1)),
        ("/training/ledger/returned", serde_json::json!([[0, 9, 3]])),
        (
            "/training/ledger/done",
            serde_json::json!({"0": SAMPLES + 1}),
        ),
        ("/checkpoints/newest/progress/ledger/batch", number(0)),
        ("/variables/map", Value::Null),
        ("/variables/specs/0/shape/0", number(0)),
        ("/variables/specs/0/shape/0", number(5)),
        ("/variables/map/block_elements", number(0)),
        ("/variables/map/shards", serde_json::json!([])),
        ("/variables/map/variables/0/shards/0", number(7)),
        ("/variables/map/variables/0/shards", serde_json::json!([])),
    ] {
        let mut kept = kept.clone();
        *kept.pointer_mut(path).expect(path) = impossible;
        assert!(check(&kept).is_err(), "{path}");
    }
}
