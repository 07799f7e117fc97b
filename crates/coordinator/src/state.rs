//! What outlives a coordinator: kept in an embedded transactional store in the run directory.

use std::path::Path;

use redb::{Database, ReadableDatabase, StorageBackend, TableDefinition};

use shared_proto::job::run_dir;

use crate::cluster::Saved;

const TABLE: TableDefinition<&str, &[u8]> = TableDefinition::new("flambeau");
const CLUSTER: &str = "cluster";

/// The store of a coordinator's state.
pub(crate) struct State(Database);

/// Whether a coordinator is at work in a run directory.
///
/// # Errors
/// If what is kept there cannot be read.
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

/// Why the state cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct StateError(Box<redb::Error>);

impl<E: Into<redb::Error>> From<E> for StateError {
    fn from(error: E) -> Self {
        Self(Box::new(error.into()))
    }
}

impl State {
    /// Opens the file, or makes it.
    ///
    /// # Errors
    /// If it cannot be read or written, or another process has it open.
    pub(crate) fn open(path: &Path) -> Result<Self, StateError> {
        Ok(Self(Database::create(path)?))
    }

    /// State over other storage: for simulations.
    ///
    /// # Errors
    /// If it cannot be read or written.
    pub(crate) fn over(storage: impl StorageBackend) -> Result<Self, StateError> {
        Ok(Self(Database::builder().create_with_backend(storage)?))
    }

    /// What was kept, if anything.
    pub(crate) fn read(&self) -> Result<Option<Saved>, StateError> {
        let reading = self.0.begin_read()?;
        let table = match reading.open_table(TABLE) {
            Ok(table) => table,
            Err(redb::TableError::TableDoesNotExist(_)) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let Some(kept) = table.get(CLUSTER)? else {
            return Ok(None);
        };
        let saved = serde_json::from_slice(kept.value());
        Ok(Some(saved.map_err(|error| {
            redb::Error::Corrupted(format!("it is not what this release writes: {error}"))
        })?))
    }

    /// Keeps the cluster: when this returns, it outlives the process and the machine.
    pub(crate) fn write(&self, saved: &Saved) -> Result<(), StateError> {
        let bytes =
            serde_json::to_vec(saved).map_err(|error| redb::Error::Corrupted(error.to_string()))?;
        let writing = self.0.begin_write()?;
        writing
            .open_table(TABLE)?
            .insert(CLUSTER, bytes.as_slice())?;
        Ok(writing.commit()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::Cluster;
    use shared_proto::job::Job;
    use std::time::Instant;

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
