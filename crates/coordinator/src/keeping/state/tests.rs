//! The store of the state: what is written is read back, also on a full disk.

use super::file::JOURNAL_BYTES;
use super::*;
use crate::cluster::Cluster;
use crate::keeping::reserve::{RESERVE_AGAIN, RESERVE_BYTES};
use proptest::prelude::*;
use shared_proto::ids::Role;
use shared_proto::job::Job;
use shared_proto::wire;
use std::fs::File;
use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
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
        let state = State::over(redb::backends::InMemoryBackend::new()).unwrap();
        state.write(&evaluated(numbers)).unwrap();
        let read = metrics(&state.read().unwrap().unwrap());
        let same = |(a, b): (&f64, f64)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
        prop_assert!(numbers.iter().zip(read).all(same));
    }
}

#[test]
fn a_metric_that_is_no_number_outlives_a_coordinator() {
    let numbers = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -0.0];
    let state = State::over(redb::backends::InMemoryBackend::new()).unwrap();
    state.write(&evaluated(numbers)).unwrap();
    let read = metrics(&state.read().unwrap().unwrap());
    assert!(read[0].is_nan(), "{read:?}");
    assert_eq!(read[1..], [f64::INFINITY, f64::NEG_INFINITY, -0.0]);
    assert!(read[3].is_sign_negative());
}

/// Writes rows to a new file: to its database, behind an empty journal of so many bytes.
fn write_rows(path: &Path, journal_bytes: usize, rows: &[(&str, &[u8])]) {
    let database = redb::Database::create(path).unwrap();
    let table: redb::TableDefinition<'_, &str, &[u8]> = redb::TableDefinition::new("flambeau");
    let writing = database.begin_write().unwrap();
    for (name, value) in rows {
        let mut table = writing.open_table(table).unwrap();
        table.insert(*name, *value).unwrap();
    }
    writing.commit().unwrap();
    drop(database);
    let mut content = vec![0; journal_bytes];
    content.extend(std::fs::read(path).unwrap());
    std::fs::write(path, content).unwrap();
}

#[test]
fn a_file_of_another_kind_is_refused_and_stays() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("state");
    for content in [b"notes".to_vec(), vec![7; 5 << 20]] {
        std::fs::write(&path, &content).unwrap();
        assert!(State::open(&path).is_err());
        assert!(State::saved(&path).is_err());
        assert_eq!(std::fs::read(&path).unwrap(), content);
    }
}

#[test]
fn the_state_of_another_release_is_refused_as_such() {
    let read = |name: &str, value: &str| {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state");
        write_rows(&path, JOURNAL_BYTES, &[(name, value.as_bytes())]);
        State::open(&path).unwrap().read().unwrap_err().to_string()
    };
    for (name, value, form) in [
        ("cluster", r#"{"generation":3,"members":[]}"#, "form 0"),
        ("cluster", r#"{"form":2,"cluster":{}}"#, "form 2"),
        ("run", "{}", "form 0"),
        ("cluster", r#"{"form":5}"#, "form 5"),
    ] {
        let refused = read(name, value);
        assert!(refused.contains("another release"), "{refused}");
        assert!(refused.contains(form), "{refused}");
    }
    for value in [r#"{"form":4}"#, r#"{"form":"x"}"#, "{"] {
        let refused = read("cluster", value);
        assert!(
            refused.contains("not what this release writes"),
            "{refused}"
        );
    }
}

#[test]
fn the_state_of_a_release_without_journals_is_refused_as_such_and_stays() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("state");
    write_rows(&path, 0, &[("cluster", br#"{"form":2,"cluster":{}}"#)]);
    let written = std::fs::read(&path).unwrap();
    for refused in [State::open(&path).err(), State::saved(&path).err()] {
        let refused = refused.unwrap().to_string();
        assert!(refused.contains("an earlier release"), "{refused}");
    }
    assert_eq!(std::fs::read(&path).unwrap(), written);
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
    let state = State::over(redb::backends::InMemoryBackend::new()).unwrap();
    state.write(&with_workers(&[(0, 1), (1, 1)])).unwrap();
    let stored = state.rows.lock().clone().unwrap();
    let changes = Changes::between(&stored, &with_workers(&[(1, 2), (2, 1)])).unwrap();
    let names: Vec<&str> = changes.rows.iter().map(|(name, _)| name.as_str()).collect();
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

/// Storage that outlives the state over it.
#[derive(Clone, Debug)]
struct Storage {
    bytes: Arc<redb::backends::InMemoryBackend>,
    /// True if the journal cannot be written.
    has_bad_journal: Arc<AtomicBool>,
    /// The number of changes after which all fail.
    changes_left: Arc<AtomicUsize>,
}

impl StorageBackend for Storage {
    fn len(&self) -> io::Result<u64> {
        self.bytes.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.bytes.read(offset, out)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.change()?;
        self.bytes.set_len(len)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.change()?;
        self.bytes.sync_data()
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        if offset < Self::JOURNAL as u64 && self.has_bad_journal.load(Ordering::Relaxed) {
            return Err(io::Error::other("a bad sector"));
        }
        self.change()?;
        self.bytes.write(offset, data)
    }
}

impl Storage {
    /// The size of the journal: room for a few of [`with_workers`].
    const JOURNAL: usize = 8 << 10;

    fn new() -> Self {
        Self {
            bytes: Arc::new(redb::backends::InMemoryBackend::new()),
            has_bad_journal: Arc::default(),
            changes_left: Arc::new(AtomicUsize::new(usize::MAX)),
        }
    }

    fn change(&self) -> io::Result<()> {
        let left = self.changes_left.load(Ordering::Relaxed);
        let left = left.checked_sub(1).ok_or(io::ErrorKind::StorageFull)?;
        self.changes_left.store(left, Ordering::Relaxed);
        Ok(())
    }

    fn try_open(&self) -> Result<StateFile, StateError> {
        StateFile::over(Arc::new(self.clone()), Self::JOURNAL)
    }

    fn open(&self) -> State {
        let file = self.try_open().unwrap();
        State {
            file: Mutex::new(Some(file)),
            rows: Mutex::default(),
            reserve: None,
        }
    }

    fn read(&self) -> serde_json::Value {
        as_json(&self.open().read().unwrap().unwrap())
    }

    fn journal(&self) -> Vec<u8> {
        let mut journal = vec![0; Self::JOURNAL];
        self.bytes.read(0, &mut journal).unwrap();
        journal
    }
}

#[test]
fn a_file_whose_creation_was_cut_short_is_created_again() {
    let mut cuts = 0;
    for changes in 0.. {
        let storage = Storage::new();
        storage.changes_left.store(changes, Ordering::Relaxed);
        let created = storage.try_open().is_ok();
        storage.changes_left.store(usize::MAX, Ordering::Relaxed);
        let newest = with_workers(&[(1, changes as u64)]);
        storage.open().write(&newest).unwrap();
        assert_eq!(storage.read(), as_json(&newest));
        if created {
            break;
        }
        cuts += 1;
    }
    assert!(cuts > 3, "{cuts}");
}

#[test]
fn a_journal_that_cannot_be_written_holds_up_no_change() {
    let storage = Storage::new();
    for fails in [false, true, true, false, false] {
        let state = storage.open();
        for samples in 0..4 {
            storage
                .has_bad_journal
                .store(fails && samples > 0, Ordering::Relaxed);
            let newest = with_workers(&[(samples, samples.into()), (7, 1)]);
            state.write(&newest).unwrap();
            let read = state.read().unwrap().unwrap();
            assert_eq!(as_json(&read), as_json(&newest));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// The newest state is read back by whichever process, with a journal that is often full. If the machine dies within a write, so that
    /// any of its bytes are not written, then the state is the one before or the new one.
    #[test]
    fn a_write_is_read_back_whole_or_not_at_all(
        writes in prop::collection::vec((any::<bool>(), any::<bool>(), any::<u64>()), 1..40),
    ) {
        let storage = Storage::new();
        let mut state = storage.open();
        let mut newest = with_workers(&[]);
        state.write(&newest).unwrap();
        for (number, (restarts, dies, bytes)) in writes.into_iter().enumerate() {
            let before = storage.journal();
            let next = with_workers(&[(number as u32 % 7, number as u64), (7, 1)]);
            state.write(&next).unwrap();
            let after = storage.journal();
            if dies && before != after {
                drop(state);
                let mut torn = after.clone();
                for (index, (torn, before)) in torn.iter_mut().zip(&before).enumerate() {
                    if bytes & (1 << (index % 64)) == 0 {
                        *torn = *before;
                    }
                }
                storage.write(0, &torn).unwrap();
                let read = storage.read();
                let expected = if torn == after { &next } else { &newest };
                prop_assert_eq!(read, as_json(expected));
                // The next process writes it again.
                state = storage.open();
                state.write(&next).unwrap();
            }
            newest = next;
            if restarts {
                drop(state);
                prop_assert_eq!(storage.read(), as_json(&newest));
                state = storage.open();
            }
        }
        drop(state);
        prop_assert_eq!(storage.read(), as_json(&newest));
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
    let path = disk.0.path().join("coordinator.redb");
    let state = State::open(&path).unwrap();
    let reserve = disk.0.path().join("coordinator.reserve");
    assert_eq!(reserve.metadata().unwrap().len(), RESERVE_BYTES as u64);
    state.write(&evaluated([1.0; 4])).unwrap();
    disk.fill();
    // Much more than fits into the store's file.
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
    assert!(!reserve.exists(), "the disk was not full");
    drop(state);
    // The next coordinator reads it, although the disk is still full.
    let state = State::open(&path).unwrap();
    assert_eq!(metrics(&state.read().unwrap().unwrap()), [199.0]);
    std::fs::remove_file(disk.0.path().join("others")).unwrap();
    for _ in 0..=RESERVE_AGAIN {
        state.write(&evaluated([2.0; 4])).unwrap();
    }
    assert!(reserve.exists(), "there is room again");
    state.release();
    assert!(!reserve.exists());
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
    let path = dir.path().join("coordinator.redb");
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
