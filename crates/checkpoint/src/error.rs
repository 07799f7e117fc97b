//! The errors of checkpoints.

use std::io;

use storage::StorageError;

use crate::format::{FORMAT, folder_name};

/// An error of a checkpoint. The variants differ in what the caller does next.
///
/// No variant has a source: the errors of object stores quote requests and answers with keys in them.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The storage does not answer, or fails. The fault may pass: try again.
    #[error("{place}: {reason}")]
    Storage {
        /// File or folder.
        place: String,
        /// The storage's message.
        reason: String,
    },
    /// The storage refuses access. A person has to check credentials, region and permissions.
    #[error("{place}: refused: {reason}")]
    Denied {
        /// File or folder.
        place: String,
        /// The storage's message.
        reason: String,
    },
    /// The storage is full. Free some space, or wait.
    #[error("{place}: no room: {reason}")]
    Full {
        /// File or folder.
        place: String,
        /// The storage's message.
        reason: String,
    },
    /// The file to be created exists already, with other content. Nothing was changed.
    #[error("{0} is there already, and is another writer's")]
    Exists(String),
    /// Another run is at work at the location. Give this run another location, or end the other run.
    #[error(
        "another run is at work at {location}: {owner}; give this run another checkpoint.location, or end the other one"
    )]
    Taken {
        /// The location.
        location: String,
        /// A description of the other run.
        owner: String,
    },
    /// The location does not have the coordinator's checkpoints. Give all processes a location that they share.
    #[error(
        "the checkpoints of the coordinator cannot be seen in {0}; set checkpoint.location to a folder that all processes share, or to an URL as in s3://bucket/folder, or checkpoint.enabled to false"
    )]
    Elsewhere(String),
    /// The content differs from the written one. Use an older checkpoint.
    #[error("{file} is damaged: {reason}{}", before(instead.as_ref()))]
    Damaged {
        /// The file.
        file: String,
        /// The reason why the file counts as damaged.
        reason: String,
        /// The number and location of an older checkpoint that is whole.
        instead: Option<(u64, String)>,
    },
    /// A newer release wrote the file. Use a program of that release.
    #[error(
        "{file} was written by a newer release: format {format}, this program reads {}",
        FORMAT
    )]
    Newer {
        /// The file.
        file: String,
        /// The file's format.
        format: u64,
    },
    /// There is no such checkpoint, or none at all.
    #[error("{0}")]
    NotFound(String),
    /// The location cannot hold checkpoints. Give another one.
    #[error("{location:?} is no place for checkpoints: {reason}")]
    Location {
        /// The location as it was given, without user and password.
        location: String,
        /// The reason why the location cannot hold checkpoints.
        reason: String,
    },
}

impl CheckpointError {
    /// Returns whether the same call may succeed later.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Storage { .. } | Self::Full { .. })
    }

    /// Returns whether the store is at fault rather than its content. The store may recover, and
    /// another checkpoint would be no better.
    pub fn is_of_store(&self) -> bool {
        matches!(self, Self::Denied { .. }) || self.is_retryable()
    }

    /// Returns whether the storage is full.
    pub fn is_full(&self) -> bool {
        matches!(self, Self::Full { .. })
    }

    /// Returns whether an older checkpoint may serve instead.
    pub fn is_damaged(&self) -> bool {
        matches!(self, Self::Damaged { .. })
    }

    /// Returns the error of a damaged file.
    pub fn damaged(file: &str, reason: impl Into<String>) -> Self {
        Self::Damaged {
            file: file.to_owned(),
            reason: reason.into(),
            instead: None,
        }
    }

    /// Converts the operating system's error about a file.
    pub(crate) fn io(place: &str, error: &io::Error) -> Self {
        StorageError::io(place, error).into()
    }
}

impl From<StorageError> for CheckpointError {
    fn from(error: StorageError) -> Self {
        match error {
            StorageError::Denied { place, reason } => Self::Denied { place, reason },
            StorageError::Full { place, reason } => Self::Full { place, reason },
            StorageError::Exists(place) => Self::Exists(place),
            StorageError::NotFound(what) => Self::NotFound(what),
            StorageError::Location { location, reason } => Self::Location { location, reason },
            StorageError::Failed { place, reason } => Self::Storage { place, reason },
            other => Self::Storage {
                place: String::new(),
                reason: other.to_string(),
            },
        }
    }
}

fn before(instead: Option<&(u64, String)>) -> String {
    let Some((number, location)) = instead else {
        return String::new();
    };
    format!(
        "; {} before it is whole: --restore {location}",
        folder_name(*number)
    )
}
