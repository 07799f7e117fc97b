//! The state that outlives a coordinator, in a file of the run directory.
//!
//! - `rows`: the rows of a state, and their differences
//! - `file`: the file: an embedded transactional database, behind a `journal` of the changes that it does not have yet

mod file;
mod journal;
mod rows;

use std::io;
use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;
use redb::StorageBackend;
use shared_proto::job::run_dir;

use super::reserve::Reserve;
use crate::cluster::Durable;
use file::StateFile;
use rows::{Changes, FORM, Rows, decode};

/// The size of the journal in other storage than a file, in bytes. It is small, so that simulations fill it often.
const SIMULATED_JOURNAL_BYTES: usize = 16 << 10;

/// The number of bytes that are encoded in the time in which one is written.
const ENCODED_FOR_ONE_WRITTEN: usize = 4;

/// The store of a coordinator's state.
pub(crate) struct State {
    /// None if it could not be opened again after a failed write.
    file: Mutex<Option<StateFile>>,
    /// The rows in the file, once they are known.
    rows: Mutex<Option<Rows>>,
    /// The reserve; none for a state that is not in a file.
    reserve: Option<Mutex<Reserve>>,
}

/// Returns whether a coordinator is at work in a run directory.
///
/// # Errors
/// If the state in it cannot be opened.
pub fn is_at_work(dir: &Path) -> Result<bool, StateError> {
    match StateFile::find(&dir.join(run_dir::STATE)) {
        Ok(_) => Ok(false),
        Err(error) if error.is_open_elsewhere() => Ok(true),
        Err(error) => Err(error),
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
    /// A release without journals has written it.
    #[error("an earlier release of Flambeau has written it, and this one cannot read it")]
    NoJournal,
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
            Self::NotReadBack(_) | Self::OtherRelease(_) | Self::NoJournal => ".",
        }
    }

    /// Returns whether another process has the file open.
    fn is_open_elsewhere(&self) -> bool {
        let Self::Store(error) = self else {
            return false;
        };
        matches!(&**error, redb::Error::DatabaseAlreadyOpen)
    }

    /// Returns whether the disk is full.
    fn is_full(&self) -> bool {
        use io::ErrorKind::{QuotaExceeded, StorageFull};
        match self {
            Self::Store(error) => {
                matches!(&**error, redb::Error::Io(io) if matches!(io.kind(), StorageFull | QuotaExceeded))
            }
            Self::NotReadBack(_) | Self::OtherRelease(_) | Self::NoJournal => false,
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
        let file = match StateFile::open(path) {
            Err(error) if error.is_full() && reserve.release() => StateFile::open(path)?,
            opened => opened?,
        };
        // Made only now, because the process that has the state open owns the reserve too.
        reserve.make();
        Ok(Self {
            file: Mutex::new(Some(file)),
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
        let Some(file) = StateFile::find(path)? else {
            return Ok(None);
        };
        let state = Self {
            file: Mutex::new(Some(file)),
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
        let file = StateFile::over(Arc::new(storage), SIMULATED_JOURNAL_BYTES)?;
        Ok(Self {
            file: Mutex::new(Some(file)),
            rows: Mutex::default(),
            reserve: None,
        })
    }

    /// Reads the stored state, if there is one.
    pub(crate) fn read(&self) -> Result<Option<Durable>, StateError> {
        let mut file = self.file.lock();
        let rows = file.as_mut().ok_or_else(closed)?.read()?;
        let durable = decode(&rows);
        *self.rows.lock() = Some(rows);
        durable
    }

    /// Persists the state of the cluster. Once this returns, it survives a crash of the process and the machine. If the disk is full, uses
    /// the reserve. Returns the cost, as the number of bytes that take as long to write.
    ///
    /// # Errors
    /// If it cannot be written, or a row would not read back as it is ([`Changes::between`]).
    pub(crate) fn write(&self, durable: &Durable) -> Result<usize, StateError> {
        let mut file = self.file.lock();
        let mut known = self.rows.lock();
        // After an error they are read again.
        let mut stored = match known.take() {
            Some(stored) => stored,
            None => file.as_mut().ok_or_else(closed)?.read()?,
        };
        let changes = Changes::between(&stored, durable)?;
        self.put(&mut file, &stored, &changes)?;
        let written: usize = changes.rows.iter().map(|(_, value)| value.len()).sum();
        let cost = written + changes.encoded / ENCODED_FOR_ONE_WRITTEN;
        changes.apply_to(&mut stored);
        *known = Some(stored);
        Ok(cost)
    }

    fn put(
        &self,
        file: &mut Option<StateFile>,
        stored: &Rows,
        changes: &Changes,
    ) -> Result<(), StateError> {
        let written = file.as_mut().ok_or_else(closed)?.write(stored, changes);
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
                // After a failed write the file must be opened again.
                drop(file.take());
                let again = file.insert(StateFile::open(&reserve.state)?);
                let stored = again.read()?;
                again.write_database(&stored, changes)
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

#[cfg(test)]
mod tests;
