//! Whether a checkpoint's values can be loaded for a job.

use shared_proto::blocks::VariableSpec;
use shared_proto::job::Job;
use shared_proto::table::TableSpec;
use shared_proto::wire;

use crate::error::CheckpointError;
use crate::manifest::Manifest;
use crate::store::Store;

/// The reason why values cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The checkpoint cannot be read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The checkpoint is of another run, model or optimizer.
    #[error("checkpoint {number} at {location} does not fit the job: {what}")]
    OtherJob {
        /// The checkpoint's number.
        number: u64,
        /// The location of the store.
        location: String,
        /// The difference.
        what: &'static str,
    },
    /// The checkpoint has values that are NaN or infinite, which the job does not accept.
    #[error(
        "checkpoint {number} at {location} has values of {block} that are NaN or infinite, and the job has non_finite = \"fail\"; restore an earlier one, or set non_finite = \"skip\""
    )]
    NotFinite {
        /// The checkpoint's number.
        number: u64,
        /// The location of the store.
        location: String,
        /// A block with such values.
        block: String,
    },
}

impl LoadError {
    /// Returns the kind of failure, for the coordinator.
    pub fn failure(&self) -> wire::RestoreFailure {
        match self {
            Self::Checkpoint(CheckpointError::Denied { .. }) => wire::RestoreFailure::Denied,
            Self::Checkpoint(error) if error.is_of_store() => wire::RestoreFailure::Unavailable,
            Self::Checkpoint(_) | Self::OtherJob { .. } | Self::NotFinite { .. } => {
                wire::RestoreFailure::Unusable
            }
        }
    }
}

/// The parts of a model that a checkpoint's values have to fit.
#[derive(Clone, Debug)]
pub struct Wanted<'a> {
    /// The variables, sorted by name.
    pub variables: Vec<&'a VariableSpec>,
    /// The tables, sorted by name.
    pub tables: Vec<&'a TableSpec>,
    /// The id of the run that must have written the checkpoint; empty if any run may have written it.
    pub run: &'a str,
}

impl Wanted<'_> {
    /// Checks that a checkpoint is of this model and of the job's optimizers.
    ///
    /// # Errors
    /// [`LoadError::OtherJob`] names the difference.
    pub fn check(&self, from: &Store, manifest: &Manifest, job: &Job) -> Result<(), LoadError> {
        match self.misfit(manifest, job) {
            None => Ok(()),
            Some(what) => Err(LoadError::OtherJob {
                number: manifest.number,
                location: from.location().to_owned(),
                what,
            }),
        }
    }

    fn misfit(&self, manifest: &Manifest, job: &Job) -> Option<&'static str> {
        if !self.run.is_empty() && self.run != manifest.run {
            return Some("it is another run's");
        }
        let specs = || self.variables.iter().copied();
        let shape = |spec: &VariableSpec| (spec.name.clone(), spec.shape.clone());
        let saved = manifest.variables.iter().map(VariableSpec::from);
        if !specs().map(shape).eq(saved.map(|spec| shape(&spec))) {
            return Some("its variables are not the job's");
        }
        let slots = manifest.variables.iter().map(|saved| saved.slots as usize);
        if !specs()
            .map(|spec| job.slots_of(&spec.name, spec.kind))
            .eq(slots)
        {
            return Some("it is of another optimizer");
        }
        let pairs = self.tables.iter().zip(&manifest.tables);
        let same_tables = self.tables.len() == manifest.tables.len()
            && pairs
                .into_iter()
                .all(|(ours, saved)| ours.is_stored_like(saved));
        (!same_tables).then_some("its tables are not the job's")
    }
}
