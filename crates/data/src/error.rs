//! The errors of data sources.

use std::io;
use std::path::PathBuf;

/// An error of a data source.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InputError {
    /// No source has this name.
    #[error(
        "there is no data source {name:?}; `data.kind` may be {known}, or a source of your own once it is in the registry"
    )]
    Unknown {
        /// The name.
        name: String,
        /// The names that exist.
        known: String,
    },
    /// The job does not name the folder of the files.
    #[error("`data.dir` is absent; it must say where the data's files are")]
    NoPlace,
    /// A file is absent.
    #[error("{} has no {names}; put the file there, or let `data.dir` name another folder", folder.display())]
    Missing {
        /// The folder in which the file was expected.
        folder: PathBuf,
        /// The names that the file may have.
        names: String,
    },
    /// A file cannot be read.
    #[error("{} cannot be read: {source}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A file cannot be written.
    #[error("{} cannot be written: {source}", path.display())]
    Unwritable {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The content of a binary file is invalid.
    #[error("{}, byte {offset}: {problem}", path.display())]
    Bytes {
        /// The file.
        path: PathBuf,
        /// The offset in the file's uncompressed content.
        offset: u64,
        /// The value found, and the one expected.
        problem: String,
    },
    /// The content of a text file is invalid.
    #[error("{}, line {line}: {problem}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: u64,
        /// The value found, and the one expected.
        problem: String,
    },
    /// The content of a file of rows is invalid.
    #[error("{}, row {row}: {problem}", path.display())]
    Row {
        /// The file.
        path: PathBuf,
        /// The row, from 1.
        row: u64,
        /// The value found, and the one expected.
        problem: String,
    },
    /// The samples, or the settings of a source, make no sense.
    #[error("{0}")]
    Invalid(String),
    /// The data must have exactly one input or target, and has none or several.
    #[error(
        "the data has no single {what}: it has {names:?}; use a model that asks for these by name"
    )]
    Fields {
        /// `input` or `target`.
        what: &'static str,
        /// The names of the inputs or targets that the data has.
        names: Vec<String>,
    },
    /// The loss does not fit the target.
    #[error(
        "target {target:?} is {is}, which objective.loss = {loss:?} does not take; set objective.loss to \"auto\" or to a loss for it, or have the data read the target as what the loss takes"
    )]
    Target {
        /// The loss.
        loss: &'static str,
        /// The target's name.
        target: String,
        /// What the target is.
        is: String,
    },
    /// No metric has this name.
    #[error("objective.metrics has {name:?}; for this loss there are {known}")]
    Metric {
        /// The name.
        name: String,
        /// The names that exist for the loss.
        known: &'static str,
    },
}
