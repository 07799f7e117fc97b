//! The jobs on disk, as rows of a log. It belongs to one process at a time.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::entry::Entry;
use super::jobs::Jobs;
use crate::keeping::log::{Log, RowChanges, RowStore, StateError};

/// The disk space that is reserved for each of the two files of changes, in bytes.
const ROOM: usize = 1 << 20;

/// The name of the row with the highest id that was given to a job.
const NEWEST: &str = "newest";

/// The prefix of the names of rows with jobs.
const JOB: &str = "job/";

/// The version of the format of entries that this release writes.
const FORM: u32 = 1;

#[derive(Serialize, Deserialize)]
struct Stored<T> {
    form: u32,
    job: T,
}

/// The store of the queue.
pub(super) struct Store {
    rows: Log,
}

impl Store {
    /// Opens or creates the log at a path.
    ///
    /// # Errors
    /// If it cannot be read or written, or another process has it open.
    pub(super) fn open(path: &Path) -> Result<Self, StateError> {
        let rows = Log::open(path, ROOM)?;
        Ok(Self { rows })
    }

    /// Reads all jobs.
    ///
    /// # Errors
    /// [`StateError::Content`].
    pub(super) fn read(&self) -> Result<Jobs, StateError> {
        let mut jobs = Jobs::default();
        for (name, value) in self.rows.rows() {
            let wrong = |what: String| StateError::Content(format!("{name}: {what}"));
            if name == NEWEST {
                let newest = serde_json::from_slice(value);
                jobs.newest = newest.map_err(|error| wrong(error.to_string()))?;
                continue;
            }
            let stored = serde_json::from_slice::<Stored<Entry>>(value);
            let Stored { form, job } = stored.map_err(|error| wrong(error.to_string()))?;
            if form != FORM || *name != row_of(job.id) {
                return Err(wrong(format!(
                    "it has form {form} and id {}; expected form {FORM}",
                    job.id
                )));
            }
            jobs.entries.insert(job.id, job);
        }
        let last = jobs.entries.keys().next_back().copied();
        jobs.newest = jobs.newest.max(last.unwrap_or(0));
        Ok(jobs)
    }

    /// Persists the difference between two states. Once this returns, the difference survives a crash of the process
    /// and the machine.
    ///
    /// # Errors
    /// If it cannot be written.
    pub(super) fn write(&mut self, before: &Jobs, after: &Jobs) -> Result<(), StateError> {
        let mut changes = RowChanges::default();
        let mut set = |row: String, value: serde_json::Result<Vec<u8>>| match value {
            Ok(value) => {
                changes.set.push((row, value));
                Ok(())
            }
            Err(error) => Err(StateError::Content(format!("{row}: {error}"))),
        };
        for (id, job) in &after.entries {
            if before.entries.get(id) != Some(job) {
                set(row_of(*id), serde_json::to_vec(&Stored { form: FORM, job }))?;
            }
        }
        if before.newest != after.newest {
            set(NEWEST.to_owned(), serde_json::to_vec(&after.newest))?;
        }
        let gone = before.entries.keys();
        let gone = gone.filter(|id| !after.entries.contains_key(id));
        changes.removed = gone.map(|id| row_of(*id)).collect();
        self.rows.write(changes)
    }
}

fn row_of(id: u64) -> String {
    format!("{JOB}{id}")
}
