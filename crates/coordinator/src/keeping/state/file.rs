//! The file of the state: the journal, and the database behind it.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::ops::Bound;
use std::path::Path;
use std::sync::Arc;

use redb::backends::FileBackend;
use redb::{
    BackendError, Database, DatabaseError, ReadableDatabase, ReadableTable, StorageBackend,
    TableDefinition, TableError,
};

use super::StateError;
use super::journal::{Journal, is_created};
use super::rows::{Changes, FORM_ROW, Rows, form_row, sequence_of};

const TABLE: TableDefinition<&str, &[u8]> = TableDefinition::new("flambeau");

/// The size of the journal in a file, in bytes.
pub(super) const JOURNAL_BYTES: usize = 1 << 20;

/// The rows as they are stored: the database has them as they were at some write, and the journal has all later changes.
pub(super) struct StateFile {
    database: Database,
    journal: Journal,
    /// The number of the newest write.
    sequence: u64,
    /// The rows that changed since the database was written.
    behind: BTreeSet<String>,
    /// True if this process has written the database, and changes since then may be in the journal alone.
    is_continued: bool,
}

impl StateFile {
    /// Opens or creates a file.
    ///
    /// # Errors
    /// If it cannot be read or written, is of another kind, or another process has it open.
    pub(super) fn open(path: &Path) -> Result<Self, StateError> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        Self::over(lock(options.open(path)?)?, JOURNAL_BYTES)
    }

    /// Opens a file if it is there and has a database. A process that died while it created the file has left it without one. Writes nothing.
    ///
    /// # Errors
    /// As for [`Self::open`].
    pub(super) fn find(path: &Path) -> Result<Option<Self>, StateError> {
        let file = match OpenOptions::new().read(true).write(true).open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => lock(file?)?,
        };
        if !is_created(&*file, JOURNAL_BYTES)? {
            return Ok(None);
        }
        Self::over(file, JOURNAL_BYTES).map(Some)
    }

    /// Opens or creates a file in other storage, with a journal of so many bytes.
    ///
    /// # Errors
    /// As for [`Self::open`].
    pub(super) fn over(
        storage: Arc<dyn StorageBackend>,
        journal_bytes: usize,
    ) -> Result<Self, StateError> {
        let journal = if is_created(&*storage, journal_bytes)? {
            Journal::open(&storage, journal_bytes)
        } else {
            Journal::create(&storage, journal_bytes)?
        };
        let begin = journal_bytes as u64;
        let database = Database::builder().create_with_backend(DatabasePart { storage, begin })?;
        Ok(Self {
            database,
            journal,
            sequence: 0,
            behind: BTreeSet::new(),
            is_continued: false,
        })
    }

    /// Reads all rows.
    ///
    /// # Errors
    /// If they cannot be read.
    pub(super) fn read(&mut self) -> Result<Rows, StateError> {
        let mut rows = self.read_database()?;
        self.behind.clear();
        // Records may be in the memory of the system alone, if an earlier process could not sync them. The next write makes them durable.
        self.is_continued = false;
        self.sequence = sequence_of(&rows);
        if !rows.contains_key(FORM_ROW) {
            return Ok(rows);
        }
        for record in self.journal.read(self.sequence)? {
            self.sequence = record.sequence;
            for name in record.removed {
                rows.remove(&name);
                self.behind.insert(name);
            }
            for row in record.rows {
                self.behind.insert(row.name.clone());
                rows.insert(row.name, row.value);
            }
        }
        Ok(rows)
    }

    fn read_database(&self) -> Result<Rows, StateError> {
        let reading = self.database.begin_read()?;
        let table = match reading.open_table(TABLE) {
            Ok(table) => table,
            Err(TableError::TableDoesNotExist(_)) => return Ok(Rows::new()),
            Err(error) => return Err(error.into()),
        };
        let mut rows = Rows::new();
        for row in table.iter()? {
            let (name, value) = row?;
            rows.insert(name.value().to_owned(), value.value().to_vec());
        }
        Ok(rows)
    }

    /// Writes changes of `rows`, which is what [`Self::read`] would return.
    ///
    /// # Errors
    /// If they cannot be written.
    pub(super) fn write(&mut self, rows: &Rows, changes: &Changes) -> Result<(), StateError> {
        if changes.rows.is_empty() && changes.removed.is_empty() {
            return Ok(());
        }
        if !self.append(changes) {
            return self.write_database(rows, changes);
        }
        let changed = changes.rows.iter().map(|(name, _)| name);
        self.behind.extend(changed.chain(&changes.removed).cloned());
        Ok(())
    }

    /// Appends changes to the journal. Returns false if that is not possible.
    fn append(&mut self, changes: &Changes) -> bool {
        if !self.is_continued {
            return false;
        }
        let appended = self.journal.append(self.sequence + 1, changes);
        if let Err(error) = &appended {
            tracing::warn!(
                "the journal of the coordinator's state cannot be written: {error}; each change is written to the database from now on"
            );
        }
        let appended = appended.unwrap_or(false);
        self.sequence += u64::from(appended);
        appended
    }

    /// Writes changes to the database, with all that it lacks.
    ///
    /// # Errors
    /// If it cannot be written.
    pub(super) fn write_database(
        &mut self,
        rows: &Rows,
        changes: &Changes,
    ) -> Result<(), StateError> {
        let sequence = self.sequence + 1;
        // If the commit fails, the database may have this number all the same, so no record may get it.
        self.is_continued = false;
        let writing = self.database.begin_write()?;
        {
            let mut table = writing.open_table(TABLE)?;
            for name in &self.behind {
                match rows.get(name) {
                    Some(value) => table.insert(name.as_str(), value.as_slice())?,
                    None => table.remove(name.as_str())?,
                };
            }
            for (name, value) in &changes.rows {
                table.insert(name.as_str(), value.as_slice())?;
            }
            for name in &changes.removed {
                table.remove(name.as_str())?;
            }
            table.insert(FORM_ROW, form_row(sequence)?.as_slice())?;
        }
        writing.commit()?;
        self.sequence = sequence;
        self.behind.clear();
        self.is_continued = true;
        self.journal.restart();
        Ok(())
    }
}

/// Locks a file for this process.
///
/// # Errors
/// If another process has it open.
fn lock(file: File) -> Result<Arc<dyn StorageBackend>, StateError> {
    // The database locks it too, but only after the journal is created. Where the file system has no such locks, it may have the database's.
    if matches!(file.try_lock(), Err(TryLockError::WouldBlock)) {
        return Err(DatabaseError::DatabaseAlreadyOpen.into());
    }
    Ok(Arc::new(FileBackend::new(file)?))
}

/// The part of a file in which the database is.
#[derive(Debug)]
struct DatabasePart {
    storage: Arc<dyn StorageBackend>,
    begin: u64,
}

impl StorageBackend for DatabasePart {
    fn len(&self) -> io::Result<u64> {
        Ok(self.storage.len()?.saturating_sub(self.begin))
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.storage.read(self.begin + offset, out)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.storage.set_len(self.begin + len)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.storage.sync_data()
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.storage.write(self.begin + offset, data)
    }

    fn close(&self) -> io::Result<()> {
        self.storage.close()
    }

    // Ranges of locks are no places of bytes: the database uses numbers beyond those of any file.

    fn try_lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<bool, BackendError> {
        self.storage.try_lock_range(start, end)
    }

    fn try_lock_shared_range(
        &self,
        start: Bound<u64>,
        end: Bound<u64>,
    ) -> Result<bool, BackendError> {
        self.storage.try_lock_shared_range(start, end)
    }

    fn lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
        self.storage.lock_range(start, end)
    }

    fn lock_shared_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
        self.storage.lock_shared_range(start, end)
    }

    fn unlock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
        self.storage.unlock_range(start, end)
    }

    fn query_lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<bool, BackendError> {
        self.storage.query_lock_range(start, end)
    }
}
