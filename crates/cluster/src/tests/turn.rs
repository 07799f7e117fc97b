//! Jobs of a coordinator that has others, too.

use super::*;

fn phase(scene: &mut Scene) -> (JobPhase, String) {
    let view = scene.cluster.refresh_view();
    (view.phase, view.error.clone())
}

#[test]
fn a_cancelled_job_stops_in_good_order_and_at_once_if_told_so() {
    let (mut scene, tasks) = Scene::training(Mode::Bounded, 2);
    scene.split(tasks[0]);
    scene.cluster.cancel(scene.now, false);
    // A call whose answer was lost is made again.
    scene.cluster.cancel(scene.now, false);
    assert_eq!(phase(&mut scene).0, JobPhase::Training);
    while let (Work::Split(_), _) = scene.work(tasks[0]) {
        scene.finish(tasks[0]);
    }
    assert!(scene.cluster.durable.done().1 < SAMPLES);
    scene.cluster.cancel(scene.now, true);
    let (ended, error) = phase(&mut scene);
    assert_eq!(ended, JobPhase::Failed);
    assert!(error.contains("cancelled"), "{error}");
    // What has ended stays as it is.
    scene.cluster.cancel(scene.now, false);
    assert_eq!(phase(&mut scene), (JobPhase::Failed, error));
}

#[test]
fn a_job_that_is_cancelled_before_it_trains_ends_at_once() {
    let mut cluster = Cluster::new(Job::default()).in_turn(Turn::Submitted);
    cluster.cancel(Instant::now(), false);
    let view = cluster.refresh_view();
    assert_eq!(view.phase, JobPhase::Failed);
    assert!(view.error.contains("before its training began"));
}

#[test]
fn a_member_of_an_earlier_job_registers_again_where_jobs_follow_each_other() {
    let (mut scene, tasks) = Scene::training(Mode::Bounded, 1);
    let mut origin = scene.origin(tasks[0], Clock(0));
    origin.job = "the one before".to_owned();
    for (turn, reason) in [
        (Turn::Alone, Reason::ForeignJob),
        (Turn::First, Reason::Fenced),
        (Turn::Submitted, Reason::Fenced),
    ] {
        let resumed = Cluster::resume(
            scene.cluster.job().clone(),
            scene.cluster.snapshot(scene.now),
            scene.now,
        );
        let refused = resumed.in_turn(turn).admit(&origin).unwrap_err();
        assert_eq!(refused.reason, reason, "{turn:?}");
    }
}
