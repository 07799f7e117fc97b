//! The store of the state: what is written is read back, also on a full disk.

use super::*;
use crate::keeping::log::LogFile;
use crate::keeping::log::tests::InMemory;
use cluster::Cluster;
use proptest::prelude::*;
use shared_proto::ids::Role;
use shared_proto::job::Job;
use shared_proto::wire;
use std::fs::File;
use std::io::{self, Write};
use std::time::Instant;

/// Returns a cluster with one evaluation that has these numbers.
fn evaluated(numbers: [f64; 4]) -> Durable {
    let mut cluster = Cluster::new(Job::default());
    let request = wire::RegisterRequest {
        identity: "w".to_owned(),
        ..wire::RegisterRequest::default()
    };
    let now = Instant::now();
    cluster.register(now, Role::Worker, request).unwrap();
    let metrics = numbers.iter().enumerate();
    cluster.add_evaluation(wire::EvaluationReport {
        metrics: metrics.map(|(i, n)| (format!("m{i}"), *n)).collect(),
        ..wire::EvaluationReport::default()
    });
    cluster.snapshot(now)
}

fn metrics(saved: &Durable) -> Vec<f64> {
    let cluster = Cluster::resume(Job::default(), saved.clone(), Instant::now());
    let metrics: std::collections::BTreeMap<_, _> = cluster.newest_evaluation().collect();
    metrics.into_values().collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn metrics_of_any_bits_outlive_a_coordinator(bits: [u64; 4]) {
        let numbers = bits.map(f64::from_bits);
        let state = State::over(InMemory::default()).unwrap();
        state.write(&evaluated(numbers)).unwrap();
        let read = metrics(&state.read().unwrap().unwrap());
        let same = |(a, b): (&f64, f64)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
        prop_assert!(numbers.iter().zip(read).all(same));
    }
}

#[test]
fn a_metric_that_is_no_number_outlives_a_coordinator() {
    let numbers = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -0.0];
    let state = State::over(InMemory::default()).unwrap();
    state.write(&evaluated(numbers)).unwrap();
    let read = metrics(&state.read().unwrap().unwrap());
    assert!(read[0].is_nan(), "{read:?}");
    assert_eq!(read[1..], [f64::INFINITY, f64::NEG_INFINITY, -0.0]);
    assert!(read[3].is_sign_negative());
}

/// The place of the samples in a worker's stored progress.
const SAMPLES: usize = 5;

/// Returns a cluster's state with these workers; the number is that of their samples.
fn with_workers(workers: &[(u32, u64)]) -> Durable {
    let mut cluster = Cluster::new(Job::default());
    let now = Instant::now();
    for worker in 0..8 {
        let request = wire::RegisterRequest {
            identity: format!("w{worker}"),
            ..wire::RegisterRequest::default()
        };
        cluster.register(now, Role::Worker, request).unwrap();
    }
    let mut state = as_json(&cluster.snapshot(now));
    let members = state["members"].as_array_mut().unwrap();
    members.retain_mut(|member| {
        let index = member[0]["id"]["index"].as_u64().unwrap();
        let wanted = workers
            .iter()
            .find(|(worker, _)| u64::from(*worker) == index);
        let Some((_, samples)) = wanted else {
            return false;
        };
        let progress = member.as_array_mut().unwrap().last_mut().unwrap();
        progress[SAMPLES] = (*samples).into();
        true
    });
    assert_eq!(members.len(), workers.len());
    serde_json::from_value(state).unwrap()
}

fn as_json(durable: &Durable) -> serde_json::Value {
    serde_json::to_value(durable).unwrap()
}

#[test]
fn rows_that_differ_are_written_and_those_of_nobody_removed() {
    let state = State::over(InMemory::default()).unwrap();
    state.write(&with_workers(&[(0, 1), (1, 1)])).unwrap();
    let rows = state.rows.lock();
    let (changes, _) = differences(rows.rows(), &with_workers(&[(1, 2), (2, 1)])).unwrap();
    let names: Vec<&str> = changes.set.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["members/worker-1", "members/worker-2"]);
    assert_eq!(changes.removed, ["members/worker-0"]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    /// Whatever changes from write to write, and whichever process writes, the state reads back as it was written.
    #[test]
    fn the_newest_state_is_read_back_whatever_was_written_before(
        writes in prop::collection::vec(
            (prop::collection::btree_map(0u32..8, 0u64..3, 0..8), any::<bool>()),
            1..12,
        ),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state");
        let mut state = State::open(&path).unwrap();
        for (workers, restarts) in writes {
            let durable = with_workers(&workers.into_iter().collect::<Vec<_>>());
            state.write(&durable).unwrap();
            if restarts {
                drop(state);
                state = State::open(&path).unwrap();
            }
            let read = State::read(&state).unwrap().unwrap();
            prop_assert_eq!(as_json(&read), as_json(&durable));
            if restarts {
                // The next process may write before it reads.
                drop(state);
                state = State::open(&path).unwrap();
            }
        }
    }
}

/// A disk of a few MiB, unmounted at the end of the test.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    fn mount(mebibytes: u32) -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let mounted = std::process::Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={mebibytes}m"), "tmpfs"])
            .arg(dir.path())
            .output()
            .is_ok_and(|output| output.status.success());
        if mounted {
            return Some(Self(dir));
        }
        // Written to the real stderr, which the test harness does not capture.
        let _ = writeln!(
            io::stderr(),
            "SKIPPED: the state on a full disk: no tmpfs can be mounted here (root can)"
        );
        None
    }

    /// Fills the disk.
    fn fill(&self) {
        let mut file = File::create(self.0.path().join("others")).unwrap();
        while file.write_all(&[1; 4096]).is_ok() {}
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let unmount = std::process::Command::new("umount")
            .arg(self.0.path())
            .status();
        if !unmount.is_ok_and(|status| status.success()) {
            eprintln!("cannot unmount {:?}", self.0.path());
        }
    }
}

#[test]
fn a_full_disk_has_room_for_the_state() {
    let Some(disk) = SmallDisk::mount(16) else {
        return;
    };
    let path = disk.0.path().join(run_dir::STATE);
    let state = State::open(&path).unwrap();
    state.write(&evaluated([1.0; 4])).unwrap();
    for file in [LogFile::Even, LogFile::Odd] {
        let reserved = file.path(&path).metadata().unwrap().len();
        assert_eq!(reserved, ROOM as u64);
    }
    disk.fill();
    // Much more than fits into one file.
    for round in 0..200 {
        let mut cluster = Cluster::new(Job::default());
        for member in 0..300 {
            let request = wire::RegisterRequest {
                identity: format!("{round}-{member:0>200}"),
                ..wire::RegisterRequest::default()
            };
            let now = Instant::now();
            cluster.register(now, Role::Worker, request).unwrap();
        }
        cluster.add_evaluation(wire::EvaluationReport {
            metrics: [("round".to_owned(), f64::from(round))].into(),
            ..wire::EvaluationReport::default()
        });
        state.write(&cluster.snapshot(Instant::now())).unwrap();
    }
    drop(state);
    // The next coordinator reads it, although the disk is still full, and gives the room back at the end.
    let state = State::open(&path).unwrap();
    assert_eq!(metrics(&state.read().unwrap().unwrap()), [199.0]);
    state.write(&evaluated([2.0; 4])).unwrap();
    state.release();
    let lengths =
        [LogFile::Even, LogFile::Odd].map(|file| file.path(&path).metadata().unwrap().len());
    assert!(lengths.iter().sum::<u64>() < 1 << 20, "{lengths:?}");
    let state = {
        drop(state);
        State::open(&path).unwrap()
    };
    assert_eq!(metrics(&state.read().unwrap().unwrap()), [2.0; 4]);
}

#[test]
fn a_saved_state_is_looked_at_without_beginning_a_run() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("state");
    assert!(State::saved(&path).unwrap().is_none());
    assert!(!path.exists());
    std::fs::write(&path, "").unwrap();
    assert!(State::saved(&path).unwrap().is_none());
    // A run that could not be begun leaves a store without a run in it.
    drop(State::open(&path).unwrap());
    assert!(State::saved(&path).unwrap().is_none());
    let mut cluster = Cluster::new(Job::default());
    for has_ended in [false, true] {
        if has_ended {
            cluster.cancel(Instant::now(), true);
        }
        let state = State::open(&path).unwrap();
        state.write(&cluster.snapshot(Instant::now())).unwrap();
        assert!(State::saved(&path).is_err(), "another process has it open");
        drop(state);
        let saved = State::saved(&path).unwrap().unwrap();
        assert_eq!(saved.has_ended(), has_ended);
    }
}

#[test]
fn what_was_kept_is_read_by_the_next_process_alone() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(run_dir::STATE);
    let state = State::open(&path).unwrap();
    assert!(state.read().unwrap().is_none());
    let saved = Cluster::new(Job::default()).snapshot(Instant::now());
    state.write(&saved).unwrap();
    assert!(
        State::open(&path).is_err(),
        "two coordinators with one state"
    );
    drop(state);
    let read = State::open(&path).unwrap().read().unwrap().unwrap();
    assert_eq!(read.run.job_toml, Job::default().to_toml());
}
