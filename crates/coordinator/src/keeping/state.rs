//! The state that outlives a coordinator, as rows of a log in the run directory.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use cluster::Durable;
use parking_lot::Mutex;
use shared_proto::job::run_dir;

use super::log::{Log, LogFile, RowChanges, RowStore, Rows, StateError, Storage};

/// The disk space that is reserved for each of the two files of changes, in bytes. A state of up to half this size is
/// written even if the disk is full.
const ROOM: usize = 4 << 20;

/// The space that is reserved for each file in simulated storage, in bytes. It is small, so that simulations fill it
/// often.
const SIMULATED_ROOM: usize = 16 << 10;

/// The number of bytes that are encoded in the time in which one is written.
const ENCODED_FOR_ONE_WRITTEN: usize = 4;

/// The coordinator's state, as it is persisted.
pub(crate) struct State {
    rows: Mutex<Box<dyn RowStore>>,
    /// The number of persisted changes. It can be read while further changes are written.
    changes: AtomicU64,
    /// The number of changes that were persisted when this process opened the state.
    opened: u64,
}

/// Returns whether a coordinator is at work in a run directory.
///
/// # Errors
/// If the state in it cannot be read.
pub fn is_at_work(dir: &Path) -> Result<bool, StateError> {
    match Log::find(&dir.join(run_dir::STATE)) {
        Ok(_) => Ok(false),
        Err(StateError::OpenElsewhere) => Ok(true),
        Err(error) => Err(error),
    }
}

/// Returns the paths of the files with a run's state.
pub fn state_files(dir: &Path) -> [PathBuf; 3] {
    LogFile::ALL.map(|file| file.path(&dir.join(run_dir::STATE)))
}

impl State {
    /// Opens or creates the state at a path.
    ///
    /// # Errors
    /// If it cannot be read or written, or another process has it open.
    pub(crate) fn open(path: &Path) -> Result<Self, StateError> {
        Ok(Self::new(Log::open(path, ROOM)?))
    }

    /// Reads the state at a path, and writes nothing. Returns `None` if there is no state.
    ///
    /// # Errors
    /// If it cannot be read, or another process has it open.
    pub(crate) fn saved(path: &Path) -> Result<Option<Durable>, StateError> {
        match Log::find(path)? {
            Some(rows) => decode(&rows),
            None => Ok(None),
        }
    }

    /// Opens or creates the state in other storage than files, for simulations.
    ///
    /// # Errors
    /// If it cannot be read or written.
    pub(crate) fn over(storage: impl Storage) -> Result<Self, StateError> {
        let path = Path::new(run_dir::STATE);
        Ok(Self::new(Log::over(
            Box::new(storage),
            path,
            SIMULATED_ROOM,
        )?))
    }

    fn new(log: Log) -> Self {
        Self {
            changes: AtomicU64::new(log.changes()),
            opened: log.changes(),
            rows: Mutex::new(Box::new(log)),
        }
    }

    /// Reads the persisted state, if there is one.
    ///
    /// # Errors
    /// If it is not what this release writes.
    pub(crate) fn read(&self) -> Result<Option<Durable>, StateError> {
        decode(self.rows.lock().rows())
    }

    /// Persists the state of the cluster. Once this returns, the state survives a crash of the process and the machine.
    /// Returns the cost of the call in written bytes; [`ENCODED_FOR_ONE_WRITTEN`] encoded bytes count as one.
    ///
    /// # Errors
    /// If it cannot be written.
    pub(crate) fn write(&self, durable: &Durable) -> Result<usize, StateError> {
        let mut rows = self.rows.lock();
        let (changes, encoded) = differences(rows.rows(), durable)?;
        let written: usize = changes.set.iter().map(|(_, value)| value.len()).sum();
        rows.write(changes)?;
        self.changes.store(rows.changes(), Ordering::Release);
        Ok(written + encoded / ENCODED_FOR_ONE_WRITTEN)
    }

    /// Returns the number of changes that were persisted since the run began.
    pub(crate) fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    /// Returns the number of changes that were persisted when this process opened the state.
    pub(crate) fn opened(&self) -> u64 {
        self.opened
    }

    /// Releases the disk space that is reserved for later changes, because the job has ended.
    pub(crate) fn release(&self) {
        self.rows.lock().release();
    }
}

fn decode(rows: &Rows) -> Result<Option<Durable>, StateError> {
    if rows.is_empty() {
        return Ok(None);
    }
    let rows = rows.iter();
    let rows: Vec<_> = rows
        .map(|(name, value)| (name.as_str(), value.as_slice()))
        .collect();
    let durable =
        Durable::of_rows(&rows).map_err(|error| StateError::Content(error.to_string()))?;
    durable.check().map_err(StateError::Content)?;
    Ok(Some(durable))
}

/// Returns the differences between the persisted rows and a state, and the size of all rows of the state in bytes.
fn differences(persisted: &Rows, durable: &Durable) -> Result<(RowChanges, usize), StateError> {
    let (mut kept, mut encoded) = (BTreeSet::new(), 0);
    let mut changes = RowChanges::default();
    let mut compare = |name: &str, value: &[u8]| {
        encoded += value.len();
        if let Some((name, before)) = persisted.get_key_value(name) {
            kept.insert(name.as_str());
            if before == value {
                return false;
            }
        }
        changes.set.push((name.to_owned(), value.to_vec()));
        true
    };
    durable.rows(&mut compare).map_err(StateError::Content)?;
    let names = persisted.keys();
    let removed = names.filter(|name| !kept.contains(name.as_str()));
    changes.removed = removed.cloned().collect();
    Ok((changes, encoded))
}

#[cfg(test)]
mod tests;
