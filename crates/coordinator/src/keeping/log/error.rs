//! The reasons why persisted state is refused.

use std::io;
use std::path::PathBuf;

use super::format::FORM;

/// The reason why persisted state cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StateError {
    /// The files cannot be read or written.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// Another process has the files open.
    #[error("another coordinator is at work there")]
    OpenElsewhere,
    /// A file was not written by Flambeau.
    #[error("{file:?} was not written by Flambeau")]
    Foreign {
        /// The path of the file.
        file: PathBuf,
    },
    /// Another release has written the files, in a format of this version.
    #[error(
        "another release of Flambeau has written it, in form {0}, and this one reads form {FORM}"
    )]
    OtherRelease(u32),
    /// An earlier release has written the state, to a file of another name.
    #[error("an earlier release of Flambeau has written {file:?}, and this one cannot read it")]
    EarlierRelease {
        /// The path of the file.
        file: PathBuf,
    },
    /// A file is damaged.
    #[error("{file:?} is damaged: {what}")]
    Damaged {
        /// The path of the file.
        file: PathBuf,
        /// The place and kind of the damage.
        what: String,
    },
    /// The rows are undamaged, but not what this release writes.
    #[error("it is not what this release of Flambeau writes: {0}")]
    Content(String),
    /// The state is older than the run's newest checkpoint.
    #[error(
        "it is an older copy: the run has checkpoint {newest} in {location}, and the next one would be {next} by this state"
    )]
    Older {
        /// The number of the newest checkpoint.
        newest: u64,
        /// The location of the checkpoints.
        location: String,
        /// The number that this state would give to the next checkpoint.
        next: u64,
    },
}

impl StateError {
    /// Returns the remedy for the error, as a sentence. `way_on` is the remedy if the state is of no use any more.
    pub(crate) fn advice(&self, way_on: &'static str) -> &'static str {
        match self {
            Self::OpenElsewhere => "End that coordinator, or give another --run-dir",
            Self::Io(_) => "Make the files readable and writable, or give another --run-dir",
            Self::Foreign { .. } => "Move that file elsewhere, or give another --run-dir",
            _ => way_on,
        }
    }
}
