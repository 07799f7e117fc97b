//! The state that outlives a coordinator, in an embedded transactional store in the run directory.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;

use parking_lot::Mutex;
use redb::{Database, ReadableDatabase, ReadableTable, StorageBackend, TableDefinition};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use shared_proto::job::run_dir;

use super::reserve::Reserve;
use crate::cluster::{Durable, TakeRows};

const TABLE: TableDefinition<&str, &[u8]> = TableDefinition::new("flambeau");

/// The row with the form of the state. In forms before the third it has the whole state.
const FORM_ROW: &str = "cluster";

/// The form of the state that this release writes. It is raised when an earlier release's state cannot be read as
/// this one's.
const FORM: u32 = 3;

/// The number of bytes that are encoded in the time in which one is written.
const ENCODED_FOR_ONE_WRITTEN: usize = 4;

/// The values of rows, by name.
type Rows = BTreeMap<String, Vec<u8>>;

/// The form of a state.
#[derive(Serialize, Deserialize)]
struct Form {
    #[serde(default)]
    form: u32,
}

/// The store of a coordinator's state.
pub(crate) struct State {
    database: Mutex<Option<Database>>,
    /// The rows in the store, once they are known.
    rows: Mutex<Option<Rows>>,
    /// The reserve; none for a state that is not in a file.
    reserve: Option<Mutex<Reserve>>,
}

/// Returns whether a coordinator is at work in a run directory.
///
/// # Errors
/// If the state in it cannot be opened.
pub fn is_at_work(dir: &Path) -> Result<bool, StateError> {
    let path = dir.join(run_dir::STATE);
    if !path.exists() {
        return Ok(false);
    }
    match Database::open(path) {
        Ok(_) => Ok(false),
        Err(redb::DatabaseError::DatabaseAlreadyOpen) => Ok(true),
        Err(error) => Err(error.into()),
    }
}

/// The reason why the state cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StateError {
    /// The store fails, or is not what this release writes.
    #[error("{0}")]
    Store(Box<redb::Error>),
    /// The next process would not read the state as it was written.
    #[error("the state does not read back as it was written ({0}); this is a bug in Flambeau")]
    NotReadBack(String),
    /// Another release has written it.
    #[error(
        "another release of Flambeau has written it, in form {0}, and this one reads form {FORM}"
    )]
    OtherRelease(u32),
}

impl<E: Into<redb::Error>> From<E> for StateError {
    fn from(error: E) -> Self {
        Self::Store(Box::new(error.into()))
    }
}

impl StateError {
    /// Returns a likely reason, as the end of a sentence.
    pub(crate) fn suspicion(&self) -> &'static str {
        match self {
            Self::Store(_) => "; is another coordinator at work there?",
            Self::NotReadBack(_) | Self::OtherRelease(_) => ".",
        }
    }

    /// Returns whether the disk is full.
    fn is_full(&self) -> bool {
        use io::ErrorKind::{QuotaExceeded, StorageFull};
        match self {
            Self::Store(error) => {
                matches!(&**error, redb::Error::Io(io) if matches!(io.kind(), StorageFull | QuotaExceeded))
            }
            Self::NotReadBack(_) | Self::OtherRelease(_) => false,
        }
    }
}

impl State {
    /// Opens or creates the file. If the disk is full, uses the reserve that an earlier process has made.
    ///
    /// # Errors
    /// If it cannot be read or written, or another process has it open.
    pub(crate) fn open(path: &Path) -> Result<Self, StateError> {
        let mut reserve = Reserve::beside(path);
        let database = match Database::create(path).map_err(StateError::from) {
            Err(error) if error.is_full() && reserve.release() => Database::create(path)?,
            opened => opened?,
        };
        // Made only now, because the process that has the state open owns the reserve too.
        reserve.make();
        Ok(Self {
            database: Mutex::new(Some(database)),
            rows: Mutex::default(),
            reserve: Some(Mutex::new(reserve)),
        })
    }

    /// Reads the state in a file that no process has open. Returns none if there is no file, or no run in it. Nothing is written
    /// for the run.
    ///
    /// # Errors
    /// If it cannot be read, or another process has it open.
    pub(crate) fn saved(path: &Path) -> Result<Option<Durable>, StateError> {
        // A process that died when it had created the file has left it empty.
        if !path.metadata().is_ok_and(|file| file.len() > 0) {
            return Ok(None);
        }
        let state = Self {
            database: Mutex::new(Some(Database::open(path)?)),
            rows: Mutex::default(),
            reserve: None,
        };
        state.read()
    }

    /// Creates a state over other storage, for simulations.
    ///
    /// # Errors
    /// If it cannot be read or written.
    pub(crate) fn over(storage: impl StorageBackend) -> Result<Self, StateError> {
        let database = Database::builder().create_with_backend(storage)?;
        Ok(Self {
            database: Mutex::new(Some(database)),
            rows: Mutex::default(),
            reserve: None,
        })
    }

    /// Reads the stored state, if there is one.
    pub(crate) fn read(&self) -> Result<Option<Durable>, StateError> {
        let database = self.database.lock();
        let rows = rows(database.as_ref().ok_or_else(closed)?)?;
        let durable = decode(&rows);
        *self.rows.lock() = Some(rows);
        durable
    }

    /// Persists the state of the cluster. Once this returns, it survives a crash of the process and the machine. If the disk is full, uses
    /// the reserve. Returns the cost, as the number of bytes that take as long to write.
    ///
    /// # Errors
    /// If it cannot be written, or the next process could not read it. The stored state is then unchanged.
    pub(crate) fn write(&self, durable: &Durable) -> Result<usize, StateError> {
        let mut database = self.database.lock();
        let mut known = self.rows.lock();
        // After an error they are read again.
        let mut stored = match known.take() {
            Some(stored) => stored,
            None => rows(database.as_ref().ok_or_else(closed)?)?,
        };
        let changes = Changes::between(&stored, durable)?;
        self.put(&mut database, &changes)?;
        let written: usize = changes.rows.iter().map(|(_, value)| value.len()).sum();
        let cost = written + changes.encoded / ENCODED_FOR_ONE_WRITTEN;
        changes.apply_to(&mut stored);
        *known = Some(stored);
        Ok(cost)
    }

    fn put(&self, database: &mut Option<Database>, changes: &Changes) -> Result<(), StateError> {
        let written = put(database.as_ref().ok_or_else(closed)?, changes);
        let Some(reserve) = &self.reserve else {
            return written;
        };
        let mut reserve = reserve.lock();
        match written {
            Err(error) if error.is_full() && reserve.release() => {
                tracing::error!(
                    "no room for the coordinator's state ({error}); used the room reserved for it in {}. Make room on that disk",
                    reserve.path.display()
                );
                // After a failed write the store must be opened again.
                drop(database.take());
                let again = database.insert(Database::create(&reserve.state)?);
                put(again, changes)
            }
            Ok(()) => {
                reserve.see_to();
                Ok(())
            }
            failed => failed,
        }
    }

    /// Releases the reserve for good, because the job has ended.
    pub(crate) fn release(&self) {
        if let Some(reserve) = &self.reserve {
            let mut reserve = reserve.lock();
            reserve.release();
            reserve.wanted = false;
        }
    }
}

fn closed() -> StateError {
    redb::Error::Corrupted("it could not be opened again after a failed write".to_owned()).into()
}

/// Reads all rows.
fn rows(database: &Database) -> Result<Rows, StateError> {
    let reading = database.begin_read()?;
    let table = match reading.open_table(TABLE) {
        Ok(table) => table,
        Err(redb::TableError::TableDoesNotExist(_)) => return Ok(Rows::new()),
        Err(error) => return Err(error.into()),
    };
    let mut rows = Rows::new();
    for row in table.iter()? {
        let (name, value) = row?;
        rows.insert(name.value().to_owned(), value.value().to_vec());
    }
    Ok(rows)
}

/// Returns the state in rows that a coordinator has written; none if there are no rows.
fn decode(rows: &Rows) -> Result<Option<Durable>, StateError> {
    let corrupted = |what: String| {
        redb::Error::Corrupted(format!("it is not what this release writes: {what}"))
    };
    let read = |error: serde_json::Error| corrupted(error.to_string());
    if rows.is_empty() {
        return Ok(None);
    }
    let form = rows.get(FORM_ROW).map_or(b"{}".as_slice(), Vec::as_slice);
    let Form { form } = serde_json::from_slice(form).map_err(read)?;
    if form != FORM {
        return Err(StateError::OtherRelease(form));
    }
    let parts = rows.iter().filter(|(name, _)| *name != FORM_ROW);
    let parts = parts.map(|(name, value)| (name.as_str(), value.as_slice()));
    let durable = Durable::of_rows(parts).map_err(read)?;
    durable.check().map_err(corrupted)?;
    Ok(Some(durable))
}

/// The differences between a state and the stored one.
struct Changes {
    /// The rows that differ, with their new values.
    rows: Vec<(String, Vec<u8>)>,
    /// The rows that the state has no longer.
    removed: Vec<String>,
    /// The size of all rows of the state, in bytes.
    encoded: usize,
}

impl Changes {
    /// Encodes a state, and checks that the rows that differ from the stored ones read back the same.
    fn between(stored: &Rows, durable: &Durable) -> Result<Self, StateError> {
        let mut encoder = Encoder {
            stored,
            kept: BTreeSet::new(),
            changed: Vec::new(),
            value: Vec::new(),
            encoded: 0,
        };
        encoder.row(FORM_ROW, &Form { form: FORM })?;
        durable.rows(&mut encoder)?;
        let Encoder {
            kept,
            changed,
            encoded,
            ..
        } = encoder;
        let removed = stored.keys().filter(|name| !kept.contains(name.as_str()));
        Ok(Self {
            removed: removed.cloned().collect(),
            rows: changed,
            encoded,
        })
    }

    fn apply_to(self, stored: &mut Rows) {
        for name in &self.removed {
            stored.remove(name);
        }
        stored.extend(self.rows);
    }
}

/// Finds the rows of a state that differ from the stored ones.
struct Encoder<'a> {
    stored: &'a Rows,
    /// The names of the stored rows that the state still has.
    kept: BTreeSet<&'a str>,
    changed: Vec<(String, Vec<u8>)>,
    value: Vec<u8>,
    encoded: usize,
}

impl TakeRows for Encoder<'_> {
    type Error = StateError;

    fn row<T: Serialize + DeserializeOwned>(
        &mut self,
        name: &str,
        value: &T,
    ) -> Result<(), StateError> {
        let wrong = |what: String| StateError::NotReadBack(format!("{name}: {what}"));
        let wrong_json = |error: serde_json::Error| wrong(error.to_string());
        self.value.clear();
        serde_json::to_writer(&mut self.value, value).map_err(wrong_json)?;
        self.encoded += self.value.len();
        if let Some((name, stored)) = self.stored.get_key_value(name) {
            self.kept.insert(name);
            if *stored == self.value {
                return Ok(());
            }
        }
        let read: T = serde_json::from_slice(&self.value).map_err(wrong_json)?;
        if serde_json::to_vec(&read).map_err(wrong_json)? != self.value {
            return Err(wrong("a value changes when it is read back".to_owned()));
        }
        self.changed.push((name.to_owned(), self.value.clone()));
        Ok(())
    }
}

fn put(database: &Database, changes: &Changes) -> Result<(), StateError> {
    if changes.rows.is_empty() && changes.removed.is_empty() {
        return Ok(());
    }
    let writing = database.begin_write()?;
    {
        let mut table = writing.open_table(TABLE)?;
        for (name, value) in &changes.rows {
            table.insert(name.as_str(), value.as_slice())?;
        }
        for name in &changes.removed {
            table.remove(name.as_str())?;
        }
    }
    Ok(writing.commit()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::Cluster;
    use crate::keeping::reserve::{RESERVE_AGAIN, RESERVE_BYTES};
    use proptest::prelude::*;
    use shared_proto::ids::Role;
    use shared_proto::job::Job;
    use shared_proto::wire;
    use std::fs::File;
    use std::io::Write;
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

    #[test]
    fn the_state_of_another_release_is_refused_as_such() {
        let read = |name: &str, value: &str| {
            let state = State::over(redb::backends::InMemoryBackend::new()).unwrap();
            let changes = Changes {
                rows: vec![(name.to_owned(), value.as_bytes().to_vec())],
                removed: Vec::new(),
                encoded: 0,
            };
            put(state.database.lock().as_ref().unwrap(), &changes).unwrap();
            state.read().unwrap_err().to_string()
        };
        for (name, value, form) in [
            ("cluster", r#"{"generation":3,"members":[]}"#, "form 0"),
            ("cluster", r#"{"form":2,"cluster":{}}"#, "form 2"),
            ("run", "{}", "form 0"),
            ("cluster", r#"{"form":4}"#, "form 4"),
        ] {
            let refused = read(name, value);
            assert!(refused.contains("another release"), "{refused}");
            assert!(refused.contains(form), "{refused}");
        }
        for value in [r#"{"form":3}"#, r#"{"form":"x"}"#, "{"] {
            let refused = read("cluster", value);
            assert!(
                refused.contains("not what this release writes"),
                "{refused}"
            );
        }
    }

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
            let index = member["task"]["id"]["index"].as_u64().unwrap();
            let wanted = workers
                .iter()
                .find(|(worker, _)| u64::from(*worker) == index);
            let Some((_, samples)) = wanted else {
                return false;
            };
            member["progress"]["samples"] = (*samples).into();
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
                    identity: format!("{member:0>200}"),
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
}
