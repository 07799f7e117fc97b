//! The state that outlives a coordinator, in an embedded transactional store in the run directory.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use parking_lot::Mutex;
use redb::{Database, ReadableDatabase, StorageBackend, TableDefinition};
use shared_proto::job::run_dir;

use crate::cluster::Saved;

const TABLE: TableDefinition<&str, &[u8]> = TableDefinition::new("flambeau");
const CLUSTER: &str = "cluster";

/// The disk space that is reserved for the state. The state's size is bounded, and redb writes a new state
/// before it frees the old one.
const RESERVE_BYTES: usize = 4 << 20;

/// The number of writes after which a released reserve is made again, if there is room.
const RESERVE_AGAIN: u32 = 256;

/// The store of a coordinator's state.
pub(crate) struct State {
    database: Mutex<Option<Database>>,
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
}

impl<E: Into<redb::Error>> From<E> for StateError {
    fn from(error: E) -> Self {
        Self::Store(Box::new(error.into()))
    }
}

impl StateError {
    /// Returns whether the disk is full.
    fn is_full(&self) -> bool {
        use io::ErrorKind::{QuotaExceeded, StorageFull};
        match self {
            Self::Store(error) => {
                matches!(&**error, redb::Error::Io(io) if matches!(io.kind(), StorageFull | QuotaExceeded))
            }
            Self::NotReadBack(_) => false,
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
            reserve: Some(Mutex::new(reserve)),
        })
    }

    /// Creates a state over other storage, for simulations.
    ///
    /// # Errors
    /// If it cannot be read or written.
    pub(crate) fn over(storage: impl StorageBackend) -> Result<Self, StateError> {
        let database = Database::builder().create_with_backend(storage)?;
        Ok(Self {
            database: Mutex::new(Some(database)),
            reserve: None,
        })
    }

    /// Reads the stored state, if there is one.
    pub(crate) fn read(&self) -> Result<Option<Saved>, StateError> {
        let database = self.database.lock();
        let Some(database) = &*database else {
            return Err(closed());
        };
        let reading = database.begin_read()?;
        let table = match reading.open_table(TABLE) {
            Ok(table) => table,
            Err(redb::TableError::TableDoesNotExist(_)) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let Some(kept) = table.get(CLUSTER)? else {
            return Ok(None);
        };
        let saved: Result<Saved, _> = serde_json::from_slice(kept.value());
        let saved = saved.map_err(|error| error.to_string());
        let saved = saved.and_then(|saved| saved.check().map(|()| saved));
        Ok(Some(saved.map_err(|what| {
            redb::Error::Corrupted(format!("it is not what this release writes: {what}"))
        })?))
    }

    /// Persists the state of the cluster. Once this returns, it survives a crash of the process and the machine.
    /// If the disk is full, uses the reserve.
    ///
    /// # Errors
    /// If it cannot be written, or the next process could not read it. The stored state is then unchanged.
    pub(crate) fn write(&self, saved: &Saved) -> Result<(), StateError> {
        let bytes = encode(saved)?;
        let mut database = self.database.lock();
        let written = match &*database {
            Some(database) => put(database, &bytes),
            None => Err(closed()),
        };
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
                put(again, &bytes)
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

/// Encodes the state, and checks that it reads back the same.
fn encode(saved: &Saved) -> Result<Vec<u8>, StateError> {
    let wrong = |error: serde_json::Error| StateError::NotReadBack(error.to_string());
    let bytes = serde_json::to_vec(saved).map_err(wrong)?;
    let read: Saved = serde_json::from_slice(&bytes).map_err(wrong)?;
    if serde_json::to_vec(&read).map_err(wrong)? != bytes {
        let what = "a value changes when it is read back".to_owned();
        return Err(StateError::NotReadBack(what));
    }
    Ok(bytes)
}

fn put(database: &Database, bytes: &[u8]) -> Result<(), StateError> {
    let writing = database.begin_write()?;
    writing.open_table(TABLE)?.insert(CLUSTER, bytes)?;
    Ok(writing.commit()?)
}

/// A file that reserves disk space for the state. If checkpoints or logs fill the disk, this file is deleted
/// and the state is written in its place.
struct Reserve {
    path: PathBuf,
    state: PathBuf,
    held: bool,
    /// True if a released reserve is made again.
    wanted: bool,
    writes: u32,
}

impl Reserve {
    fn beside(state: &Path) -> Self {
        let path = state.with_extension("reserve");
        Self {
            held: path.exists(),
            path,
            state: state.to_owned(),
            wanted: true,
            writes: 0,
        }
    }

    /// Deletes the file. Returns whether that has freed space.
    fn release(&mut self) -> bool {
        std::mem::take(&mut self.held) && std::fs::remove_file(&self.path).is_ok()
    }

    /// Creates the file, if there is room. The coordinator works without it too.
    fn make(&mut self) {
        let found = std::fs::metadata(&self.path);
        self.held = found.is_ok_and(|found| found.len() == RESERVE_BYTES as u64);
        if self.held {
            return;
        }
        // Written, because a sparse file takes no room.
        let made = File::create(&self.path).and_then(|mut file| {
            let zeros = vec![0; RESERVE_BYTES];
            file.write_all(&zeros)?;
            file.sync_all()
        });
        self.held = made.is_ok();
        if let Err(error) = made {
            let path = self.path.display();
            tracing::warn!("cannot reserve room for the state in {path}: {error}");
            let _ = std::fs::remove_file(&self.path);
        }
    }

    /// Creates a released reserve again after [`RESERVE_AGAIN`] writes.
    fn see_to(&mut self) {
        if self.held || !self.wanted {
            return;
        }
        self.writes += 1;
        if self.writes >= RESERVE_AGAIN {
            self.writes = 0;
            self.make();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::Cluster;
    use proptest::prelude::*;
    use shared_proto::ids::Role;
    use shared_proto::job::Job;
    use shared_proto::wire;
    use std::time::Instant;

    /// Returns a cluster with one evaluation that has these numbers.
    fn evaluated(numbers: [f64; 4]) -> Saved {
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
        cluster.save_all(now)
    }

    fn metrics(saved: &Saved) -> Vec<f64> {
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
    fn what_earlier_releases_kept_of_one_is_read() {
        let text = serde_json::to_string(&evaluated([f64::NAN; 4])).unwrap();
        let old = text.replace("\"NaN\"", "null");
        assert_ne!(old, text);
        let saved: Saved = serde_json::from_str(&old).unwrap();
        assert!(metrics(&saved).iter().all(|metric| metric.is_nan()));
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
            state.write(&cluster.save_all(Instant::now())).unwrap();
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
    fn what_was_kept_is_read_by_the_next_process_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("coordinator.redb");
        let state = State::open(&path).unwrap();
        assert!(state.read().unwrap().is_none());
        let saved = Cluster::new(Job::default()).save_all(Instant::now());
        state.write(&saved).unwrap();
        assert!(
            State::open(&path).is_err(),
            "two coordinators with one state"
        );
        drop(state);
        let read = State::open(&path).unwrap().read().unwrap().unwrap();
        assert_eq!(read.job_toml, Job::default().to_toml());
    }
}
