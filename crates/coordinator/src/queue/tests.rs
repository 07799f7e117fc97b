//! Tests of the queue: its decisions, and what survives the process at any point.

use std::sync::Arc;

use proptest::prelude::*;
use shared_proto::job::Job;
use shared_proto::refusal::Reason;

use super::entry::{Entry, JobState};
use super::job_queue::{JobQueue, QueueError};
use super::jobs::{Cancelled, End, Jobs, MOST_BYTES, MOST_ENDED, MOST_QUEUED, Submission};
use super::store::Store;
use crate::keeping::log::{Log, RowChanges, RowStore};

fn submission(number: u64, name: &str) -> Submission {
    Submission {
        number,
        job: Job {
            name: name.to_owned(),
            ..Job::default()
        },
        restore: String::new(),
        run: format!("{number:016x}"),
    }
}

fn submit(jobs: &mut Jobs, number: u64) -> u64 {
    jobs.submit(submission(number, "job"), None, |_| true, number)
        .unwrap()
}

fn failed(error: &str) -> End {
    End {
        error: error.to_owned(),
        ..End::default()
    }
}

#[test]
fn jobs_are_begun_in_the_order_of_their_ids_one_at_a_time() {
    let mut jobs = Jobs::default();
    let [a, b, c] = [5, 6, 7].map(|number| submit(&mut jobs, number));
    assert_eq!([a, b, c], [1, 2, 3]);
    assert!(jobs.begin(a, 1));
    // The one that is at work comes first, also for a coordinator that starts again.
    assert_eq!(jobs.first().unwrap().id, a);
    assert!(jobs.begin(a, 2));
    assert_eq!(jobs.entries[&a].began, 1);
    jobs.end(a, End::default(), 3);
    assert_eq!(jobs.entries[&a].state, JobState::Done);
    assert_eq!(jobs.cancel(b, false, 4), Ok(Cancelled::Nothing));
    assert!(!jobs.begin(b, 5));
    assert_eq!(jobs.first().unwrap().id, c);
    assert!(jobs.begin(c, 6));
    assert_eq!(jobs.cancel(c, false, 7), Ok(Cancelled::InGoodOrder));
    jobs.end(c, failed("told to"), 9);
    assert_eq!(jobs.entries[&c].state, JobState::Cancelled);
    assert!(jobs.first().is_none());
    // What has ended stays as it is.
    jobs.end(a, failed("late"), 10);
    assert_eq!(jobs.entries[&a].state, JobState::Done);
    assert_eq!(jobs.cancel(a, true, 11), Ok(Cancelled::Nothing));
    let unknown = jobs.cancel(9, false, 12).unwrap_err();
    assert_eq!(unknown.reason, Reason::UnknownJob);
}

#[test]
fn a_repeated_cancel_changes_nothing_and_only_at_once_ends_a_job_at_once() {
    let mut jobs = Jobs::default();
    let id = submit(&mut jobs, 1);
    jobs.begin(id, 1);
    assert_eq!(jobs.cancel(id, false, 2), Ok(Cancelled::InGoodOrder));
    let once = jobs.clone();
    assert_eq!(jobs.cancel(id, false, 3), Ok(Cancelled::InGoodOrder));
    assert_eq!(jobs, once);
    assert!(!jobs.entries[&id].at_once);
    assert_eq!(jobs.cancel(id, true, 4), Ok(Cancelled::AtOnce));
    // What is to end at once does not go back to good order.
    assert_eq!(jobs.cancel(id, false, 5), Ok(Cancelled::AtOnce));
    let entry = &jobs.entries[&id];
    assert!(entry.cancelling && entry.at_once);
}

#[test]
fn an_entry_without_at_once_is_read() {
    let mut jobs = Jobs::default();
    let id = submit(&mut jobs, 1);
    let mut entry = serde_json::to_value(&jobs.entries[&id]).unwrap();
    assert!(entry.as_object_mut().unwrap().remove("at_once").is_some());
    let read: Entry = serde_json::from_value(entry).unwrap();
    assert_eq!(read, jobs.entries[&id]);
}

#[test]
fn a_job_that_was_to_be_cancelled_and_ran_to_its_end_is_done() {
    let mut jobs = Jobs::default();
    let id = submit(&mut jobs, 1);
    jobs.begin(id, 1);
    jobs.cancel(id, false, 2).unwrap();
    jobs.end(id, End::default(), 3);
    assert_eq!(jobs.entries[&id].state, JobState::Done);
}

#[test]
fn the_job_that_the_coordinator_starts_with_comes_first_and_is_added_once() {
    let mut jobs = Jobs::default();
    let other = submit(&mut jobs, 1);
    jobs.begin_with(submission(0, "given"), 2);
    jobs.begin_with(submission(0, "given"), 3);
    assert_eq!(jobs.entries.len(), 2);
    let given = jobs.first().unwrap().clone();
    assert_eq!((given.name.as_str(), given.folder.as_str()), ("given", ""));
    jobs.begin(given.id, 4);
    jobs.end(given.id, failed("why"), 5);
    jobs.begin_with(submission(0, "given"), 6);
    assert_eq!(jobs.first().unwrap().id, other);
    jobs.resume();
    assert_eq!(jobs.first().unwrap().id, given.id);
}

#[test]
fn a_job_that_is_resumed_waits_for_the_one_at_work() {
    let mut jobs = Jobs::default();
    jobs.begin_with(submission(0, "given"), 1);
    let other = submit(&mut jobs, 1);
    let given = jobs.first().unwrap().id;
    jobs.begin(given, 2);
    jobs.end(given, failed("why"), 3);
    jobs.begin(other, 4);
    // The coordinator is killed, and started again with --resume-failed.
    jobs.resume();
    assert_eq!(jobs.entries[&given].state, JobState::Queued);
    assert_eq!(jobs.first().unwrap().id, other);
    jobs.end(other, End::default(), 5);
    assert_eq!(jobs.first().unwrap().id, given);
    assert!(jobs.begin(given, 6));
}

#[test]
fn a_given_job_whose_run_has_not_begun_gets_other_settings() {
    let mut jobs = Jobs::default();
    let given = |name: &str, restore: &str, run: &str| Submission {
        restore: restore.to_owned(),
        run: run.to_owned(),
        ..submission(0, name)
    };
    jobs.replace(given("none", "", "0"), 1);
    assert!(jobs.entries.is_empty());
    jobs.begin_with(given("wrong", "/nowhere", "1"), 1);
    let other = submit(&mut jobs, 1);
    for ends in [false, true] {
        let id = jobs.first().unwrap().id;
        jobs.begin(id, 2);
        jobs.cancel(id, true, 3).unwrap();
        if ends {
            jobs.end(id, failed("it cannot be begun"), 4);
        }
        jobs.replace(given("right", "/here", "2"), 5);
        let entry = jobs.first().unwrap();
        assert_eq!((entry.id, entry.state), (id, JobState::Queued));
        assert_eq!(
            (entry.name.as_str(), entry.restore.as_str()),
            ("right", "/here")
        );
        assert_eq!(Job::parse(&entry.job_toml).unwrap().name, "right");
        assert_eq!((entry.run.as_str(), entry.folder.as_str()), ("1", ""));
        assert!(!entry.cancelling && !entry.at_once && entry.error.is_empty());
    }
    assert_eq!(jobs.newest, other);
}

#[test]
fn a_full_queue_takes_no_more_and_old_jobs_are_forgotten() {
    let mut jobs = Jobs::default();
    for number in 1..=MOST_QUEUED as u64 {
        submit(&mut jobs, number);
    }
    let more = jobs.submit(submission(5000, "job"), None, |_| true, 0);
    assert_eq!(more.unwrap_err().reason, Reason::TooManyRequests);
    // The same submission again is no more.
    assert_eq!(submit(&mut jobs, 7), 7);
    for round in 0..3 {
        while let Some(id) = jobs.first().map(|entry| entry.id) {
            jobs.begin(id, 1);
            jobs.end(id, End::default(), 2);
        }
        for number in 0..500 {
            submit(&mut jobs, 10_000 * (round + 1) + number);
        }
    }
    let ended = jobs.entries.values().filter(|entry| entry.has_ended());
    assert_eq!(ended.count(), MOST_ENDED);
    assert_eq!(jobs.newest, 2500);
}

#[test]
fn long_jobs_fill_the_queue_sooner_and_those_that_ended_first_are_forgotten_first() {
    let mut jobs = Jobs::default();
    let long = |number: u64| Submission {
        job: Job {
            name: "x".repeat(200 << 10),
            ..Job::default()
        },
        ..submission(number, "")
    };
    let add = |jobs: &mut Jobs, number| jobs.submit(long(number), None, |_| true, number);
    let most = (1..).find(|number| add(&mut jobs, *number).is_err());
    let refused = add(&mut jobs, 5000).unwrap_err();
    assert_eq!(refused.reason, Reason::TooManyRequests);
    let most = most.unwrap() - 1;
    assert!((70..90).contains(&most), "{most} jobs of 200 KiB");
    // The one with the highest id ends first, so it is the first to be forgotten.
    assert_eq!(jobs.cancel(most, false, 1), Ok(Cancelled::Nothing));
    for id in 1..most {
        jobs.cancel(id, false, 2).unwrap();
    }
    let bytes = jobs.entries.values().map(|entry| entry.job_toml.len());
    assert!(bytes.sum::<usize>() <= MOST_BYTES);
    assert!(!jobs.entries.contains_key(&most));
    assert!(jobs.entries.contains_key(&(most - 1)));
}

#[test]
fn folders_are_below_the_coordinators_and_of_one_job_each() {
    let mut jobs = Jobs::default();
    for (number, name) in (1..).zip(["plain", "../../etc", "", ".hidden", "a/b\\c d", "\u{e4}\0"]) {
        let taken = |folder: &str| folder != "runs/plain-1";
        let location = Some("s3://bucket/here/");
        let id = jobs
            .submit(submission(number, name), location, taken, 0)
            .unwrap();
        let entry = &jobs.entries[&id];
        let (runs, folder) = entry.folder.split_once('/').unwrap();
        assert_eq!(runs, "runs");
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        assert!(
            folder.chars().all(plain) && !folder.starts_with('.'),
            "{folder:?}"
        );
        let job = Job::parse(&entry.job_toml).unwrap();
        let expected = format!("s3://bucket/here/{}-{}", entry.folder, entry.run);
        assert_eq!(job.checkpoint.location, Some(expected));
    }
    assert_eq!(jobs.entries[&1].folder, "runs/plain-1-2");
}

/// A change of the queue.
#[derive(Clone, Debug)]
enum Change {
    Submit(u64),
    Begin,
    End(bool),
    Cancel(u64, bool),
    Given,
    Replace,
    Resume,
}

fn changes() -> impl Strategy<Value = Vec<Change>> {
    let change = prop_oneof![
        (1..20u64).prop_map(Change::Submit),
        Just(Change::Begin),
        any::<bool>().prop_map(Change::End),
        (1..20u64, any::<bool>()).prop_map(|(id, at_once)| Change::Cancel(id, at_once)),
        Just(Change::Given),
        Just(Change::Replace),
        Just(Change::Resume),
    ];
    proptest::collection::vec(change, 1..40)
}

fn apply(jobs: &mut Jobs, change: &Change) {
    let first = jobs.first().map(|entry| entry.id);
    match change {
        Change::Submit(number) => {
            submit(jobs, *number);
        }
        Change::Begin => {
            first.map(|id| jobs.begin(id, 1));
        }
        Change::End(well) => {
            let running = |id: &u64| jobs.entries[id].state == JobState::Running;
            let end = if *well { End::default() } else { failed("why") };
            if let Some(id) = first.filter(running) {
                jobs.end(id, end, 2);
            }
        }
        Change::Cancel(id, at_once) => {
            let _ = jobs.cancel(*id, *at_once, 3);
        }
        Change::Given => jobs.begin_with(submission(0, "given"), 4),
        Change::Replace => jobs.replace(submission(0, "other"), 5),
        Change::Resume => jobs.resume(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    #[test]
    fn what_is_persisted_is_read_back_and_one_job_runs_at_most(changes in changes()) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("jobs.state");
        let mut jobs = Jobs::default();
        for change in &changes {
            // Each change by a process of its own, which dies after it.
            let mut store = Store::open(&path).unwrap();
            prop_assert_eq!(&store.read().unwrap(), &jobs);
            let before = jobs.clone();
            apply(&mut jobs, change);
            store.write(&before, &jobs).unwrap();
            let running = jobs.entries.values().filter(|e| e.state == JobState::Running);
            prop_assert!(running.count() <= 1);
        }
        prop_assert_eq!(Store::open(&path).unwrap().read().unwrap(), jobs);
    }
}

#[tokio::test]
async fn a_queue_belongs_to_one_process_and_a_refused_change_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let queue = JobQueue::open(dir.path(), None).unwrap();
    assert!(
        JobQueue::open(dir.path(), None).is_err(),
        "two coordinators with one queue"
    );
    let entry = queue.submit(submission(3, "job")).await.unwrap();
    assert_eq!(queue.run_dir(&entry), dir.path().join("runs/job-1"));
    let refused = queue.cancel(8, false).await.unwrap_err();
    assert!(matches!(refused, QueueError::Refused(_)), "{refused}");
    assert!(queue.begin(entry.id).await.unwrap());
    drop(queue);
    let queue: Arc<JobQueue> = JobQueue::open(dir.path(), None).unwrap();
    let first = queue.first().unwrap();
    assert_eq!((first.id, first.state), (entry.id, JobState::Running));
    assert_eq!(first.run, entry.run);
    // A cancel that comes before the job is at work is heeded by whoever begins it, also after a restart.
    let cancelled = queue.cancel(entry.id, true).await.unwrap();
    assert_eq!(cancelled, Cancelled::AtOnce);
    drop(queue);
    let queue = JobQueue::open(dir.path(), None).unwrap();
    let first = queue.first().unwrap();
    assert!(first.cancelling && first.at_once);
}

#[test]
fn an_entry_of_another_release_is_refused_with_its_id() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("jobs.state");
    let mut jobs = Jobs::default();
    submit(&mut jobs, 1);
    let mut store = Store::open(&path).unwrap();
    store.write(&Jobs::default(), &jobs).unwrap();
    drop(store);
    let mut rows = Log::open(&path, 0).unwrap();
    let set = vec![("job/1".to_owned(), b"{\"form\":9}".to_vec())];
    let removed = Vec::new();
    rows.write(RowChanges { set, removed }).unwrap();
    drop(rows);
    let refused = Store::open(&path).unwrap().read().unwrap_err().to_string();
    assert!(refused.contains("job/1"), "{refused}");
}
