//! When changes are persisted, and what is handed over with them.

use super::*;
use crate::keeping::log::tests::InMemory;
use shared_proto::ids::Role;
use shared_proto::job::Job;
use shared_proto::view::{Commit, JobPhase};
use shared_proto::wire;

fn shared() -> Arc<Shared> {
    with_queue(1).0
}

fn with_queue(places: usize) -> (Arc<Shared>, mpsc::Receiver<Record>) {
    let state = State::over(InMemory::default()).unwrap();
    let (records, queue) = mpsc::channel(places);
    let cluster = Cluster::new(Job::default());
    (
        Shared::new(cluster, records, state, Offload::Threads),
        queue,
    )
}

/// Registers a worker: an urgent change, and a record.
fn join(shared: &Shared, identity: &str) {
    let request = wire::RegisterRequest {
        identity: identity.to_owned(),
        ..wire::RegisterRequest::default()
    };
    let mut cluster = shared.cluster.lock();
    cluster.register(now(), Role::Worker, request).unwrap();
}

/// Returns the names of the workers in the records that have been handed over.
fn joined(queue: &mut mpsc::Receiver<Record>) -> Vec<String> {
    let records = std::iter::from_fn(|| queue.try_recv().ok());
    records
        .map(|record| match record {
            Record::Joined { task, .. } => task,
            other => panic!("{other:?}"),
        })
        .collect()
}

#[tokio::test]
async fn records_are_handed_over_with_the_changes_that_they_follow_from() {
    let (shared, mut queue) = with_queue(2);
    let mut kept = shared.kept.lock().await;
    join(&shared, "a");
    join(&shared, "b");
    shared.keep(&mut kept).await;
    join(&shared, "c");
    // The change of c is not persisted, and that must not hold up the others.
    assert!(shared.publish_persisted(&kept));
    assert_eq!(joined(&mut queue), ["worker-0", "worker-1"]);
    shared.keep(&mut kept).await;
    assert!(shared.publish_persisted(&kept));
    assert_eq!(joined(&mut queue), ["worker-2"]);
}

#[tokio::test]
async fn records_for_which_there_is_no_room_are_handed_over_later_in_order() {
    let (shared, mut queue) = with_queue(2);
    let mut kept = shared.kept.lock().await;
    for identity in ["a", "b", "c"] {
        join(&shared, identity);
    }
    shared.keep(&mut kept).await;
    assert!(!shared.publish_persisted(&kept));
    assert_eq!(joined(&mut queue), ["worker-0", "worker-1"]);
    assert!(shared.publish_persisted(&kept));
    assert_eq!(joined(&mut queue), ["worker-2"]);
    queue.close();
    join(&shared, "d");
    shared.keep(&mut kept).await;
    assert!(
        shared.publish_persisted(&kept),
        "nobody takes records any more"
    );
}

/// Makes a change that may be lost, as a finished part is.
fn change(shared: &Shared) -> Changes {
    let mut cluster = shared.cluster.lock();
    cluster.may_persist();
    cluster.changes()
}

#[tokio::test(start_paused = true)]
async fn a_part_is_answered_with_its_commit_or_the_end_of_its_epoch_or_of_the_job() {
    type Change = fn(&mut View);
    let changes: [Change; 4] = [
        |view| {
            view.commit = Some(Commit {
                step: Clock(5),
                contributors: Vec::new(),
                clip_factor: None,
            });
        },
        |view| view.epoch = Epoch(3),
        |view| view.phase = JobPhase::Done,
        |view| view.phase = JobPhase::Failed,
    ];
    for (case, ends) in changes.into_iter().enumerate() {
        let (shared, over) = (shared(), CancellationToken::new());
        let began = tokio::time::Instant::now();
        let answered = shared.persist_part(Clock(5), Epoch(2), &over);
        let later = async {
            tokio::time::sleep(PARTS_WAIT / 4).await;
            shared.views.send_modify(|view| {
                view.commit = Some(Commit {
                    step: Clock(4),
                    contributors: Vec::new(),
                    clip_factor: None,
                });
                view.epoch = Epoch(2);
            });
            tokio::time::sleep(PARTS_WAIT / 4).await;
            shared.views.send_modify(ends);
        };
        tokio::join!(answered, later);
        assert_eq!(began.elapsed(), PARTS_WAIT / 2, "case {case}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_part_whose_step_takes_long_is_persisted_before_it_is_answered() {
    for ends_at_once in [false, true] {
        let (shared, over) = (shared(), CancellationToken::new());
        let changed = change(&shared);
        if ends_at_once {
            over.cancel();
        }
        let began = tokio::time::Instant::now();
        shared.persist_part(Clock(5), Epoch(2), &over).await;
        assert!(shared.kept.lock().await.changes.others >= changed.others);
        assert!(shared.state.read().unwrap().is_some());
        assert_eq!(began.elapsed() < PARTS_WAIT, ends_at_once);

        // Nothing is written for a part that is persisted already.
        let written = shared.kept.lock().await.changes;
        shared.persist_part(Clock(5), Epoch(2), &over).await;
        assert_eq!(shared.kept.lock().await.changes, written);
    }
}
