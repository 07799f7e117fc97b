//! The jobs on disk, in an embedded transactional store. The store belongs to one process at a time.

use std::path::{Path, PathBuf};

use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition};
use serde::{Deserialize, Serialize};

use super::entry::Entry;
use super::jobs::Jobs;

const JOBS: TableDefinition<u64, &[u8]> = TableDefinition::new("jobs");
const NUMBERS: TableDefinition<&str, u64> = TableDefinition::new("numbers");
const NEWEST: &str = "newest";

/// The form of the entries that this release writes.
const FORM: u32 = 1;

#[derive(Serialize, Deserialize)]
struct Stored<T> {
    form: u32,
    job: T,
}

/// The reason why the queue cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum StoreError {
    /// The store fails.
    #[error("{0}")]
    Store(Box<redb::Error>),
    /// An entry is not what this release writes.
    #[error("the entry of job {id} is not what this release of Flambeau writes: {what}")]
    Entry { id: u64, what: String },
}

impl<E: Into<redb::Error>> From<E> for StoreError {
    fn from(error: E) -> Self {
        Self::Store(Box::new(error.into()))
    }
}

/// The store of the queue.
pub(super) struct Store {
    path: PathBuf,
    /// None after a failed write, until the store is opened again.
    database: Option<Database>,
}

impl Store {
    /// Opens or creates the file.
    ///
    /// # Errors
    /// If it cannot be read or written, or another process has it open.
    pub(super) fn open(path: &Path) -> Result<Self, StoreError> {
        Ok(Self {
            path: path.to_owned(),
            database: Some(Database::create(path)?),
        })
    }

    /// Reads all jobs.
    pub(super) fn read(&mut self) -> Result<Jobs, StoreError> {
        let reading = self.database()?.begin_read()?;
        let mut jobs = Jobs::default();
        let table = match reading.open_table(JOBS) {
            Ok(table) => table,
            Err(redb::TableError::TableDoesNotExist(_)) => return Ok(jobs),
            Err(error) => return Err(error.into()),
        };
        for row in table.iter()? {
            let (id, bytes) = row?;
            let entry = decode(id.value(), bytes.value())?;
            jobs.entries.insert(entry.id, entry);
        }
        let newest = reading.open_table(NUMBERS)?.get(NEWEST)?;
        let last = jobs.entries.keys().next_back().copied();
        jobs.newest = newest
            .map_or(0, |newest| newest.value())
            .max(last.unwrap_or(0));
        Ok(jobs)
    }

    /// Persists the difference between two states. Once this returns, it survives a crash of the process and the machine.
    pub(super) fn write(&mut self, before: &Jobs, after: &Jobs) -> Result<(), StoreError> {
        let written = put(self.database()?, before, after);
        if written.is_err() {
            // After a failed write the store must be opened again.
            self.database = None;
        }
        written
    }

    fn database(&mut self) -> Result<&Database, StoreError> {
        let database = match self.database.take() {
            Some(database) => database,
            None => Database::create(&self.path)?,
        };
        Ok(self.database.insert(database))
    }
}

fn put(database: &Database, before: &Jobs, after: &Jobs) -> Result<(), StoreError> {
    let writing = database.begin_write()?;
    {
        let mut table = writing.open_table(JOBS)?;
        for (id, entry) in &after.entries {
            if before.entries.get(id) != Some(entry) {
                table.insert(*id, encode(entry)?.as_slice())?;
            }
        }
        for id in before.entries.keys() {
            if !after.entries.contains_key(id) {
                table.remove(*id)?;
            }
        }
        writing.open_table(NUMBERS)?.insert(NEWEST, after.newest)?;
    }
    Ok(writing.commit()?)
}

fn encode(entry: &Entry) -> Result<Vec<u8>, StoreError> {
    let stored = Stored {
        form: FORM,
        job: entry,
    };
    serde_json::to_vec(&stored).map_err(|error| StoreError::Entry {
        id: entry.id,
        what: error.to_string(),
    })
}

fn decode(id: u64, bytes: &[u8]) -> Result<Entry, StoreError> {
    let wrong = |what: String| StoreError::Entry { id, what };
    let stored: Stored<Entry> = serde_json::from_slice(bytes).map_err(|e| wrong(e.to_string()))?;
    match stored.form == FORM && stored.job.id == id {
        true => Ok(stored.job),
        false => Err(wrong(format!(
            "it has form {} and id {}; expected form {FORM}",
            stored.form, stored.job.id
        ))),
    }
}
