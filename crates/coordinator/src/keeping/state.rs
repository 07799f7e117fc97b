//! The state that outlives a coordinator, in an embedded transactional store in the run directory.
//!
//! - `rows`: the rows of the store

mod rows;

use std::io;
use std::path::Path;

use parking_lot::Mutex;
use redb::{Database, ReadableDatabase, ReadableTable, StorageBackend, TableDefinition};
use shared_proto::job::run_dir;

use super::reserve::Reserve;
use crate::cluster::Durable;
use rows::{Changes, FORM, Rows, decode};

const TABLE: TableDefinition<&str, &[u8]> = TableDefinition::new("flambeau");

/// The number of bytes that are encoded in the time in which one is written.
const ENCODED_FOR_ONE_WRITTEN: usize = 4;

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
        let rows = read_rows(database.as_ref().ok_or_else(closed)?)?;
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
            None => read_rows(database.as_ref().ok_or_else(closed)?)?,
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
fn read_rows(database: &Database) -> Result<Rows, StateError> {
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
mod tests;
