//! The errors of folders and object stores.

use std::io;

/// An error of a location. The variants differ in what the caller does next.
///
/// No variant has a source: the errors of object stores quote requests and answers with keys in them.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StorageError {
    /// The storage does not answer, or fails. The fault may pass: try again.
    #[error("{place}: {reason}")]
    Failed {
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
    /// The file to be created exists already.
    #[error("{0} is there already")]
    Exists(String),
    /// There is no such file or folder.
    #[error("{0}")]
    NotFound(String),
    /// The text names no location, or none that can be used.
    #[error("{location:?} is no location: {reason}")]
    Location {
        /// The location as it was given, without user and password.
        location: String,
        /// The reason why it cannot be used.
        reason: String,
    },
}

impl StorageError {
    /// Converts the operating system's error about a file.
    pub fn io(place: &str, error: &io::Error) -> Self {
        let (place, reason) = (place.to_owned(), error.to_string());
        match error.kind() {
            io::ErrorKind::NotFound => Self::NotFound(format!("{place}: {reason}")),
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                Self::Denied { place, reason }
            }
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                Self::Full { place, reason }
            }
            _ => Self::Failed { place, reason },
        }
    }
}
