//! Reads data sets: from files to the samples of a step, without a machine-learning library.
//!
//! Everything here is deterministic: with the same files and seed, each position of a pass holds the same sample on
//! every worker. Files are not trusted: an error names the file and the place in it.
//!
//! A value goes through these modules in this order:
//! - [`source`]: the interface of data sources, and the settings with which they open
//! - `files`: the bytes of files in folders, object stores and archives, decompressed
//! - `reading`: the files of a data set, the samples that are held out, and the chunks in which files are read
//! - `columns`: cells in the types of their file, and the columns of a table
//! - `features`: the transforms of columns to inputs, fitted to the training samples
//! - `samples`: named columns of samples, in memory or read anew in each pass; `shuffle`: their order
//! - `sources`: the data sources of this crate, which use all of the above: [`Digits`], [`Idx`], [`Cifar10`], [`Npy`],
//!   [`Images`], [`Csv`], [`Parquet`], [`LibSvm`], [`Criteo`], [`Clicks`] and [`Random`]
//! - `fuzzing`: the driver of a fuzz target
//! - `dataset`: the result; `error` and `place`: the errors of all of these

mod columns;
mod dataset;
mod error;
mod features;
mod files;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod place;
mod reading;
mod samples;
pub mod shuffle;
pub mod source;
mod sources;

pub use columns::cell::Cell;
pub use columns::header::pandas_index;
pub use dataset::{Dataset, save_transforms};
pub use error::InputError;
pub use features::fitted::{Fitted, FittedColumn, Gap, Rule};
pub use features::target::Target;
pub use files::matching;
pub use samples::column::{BatchColumn, Column, Values};
pub use samples::field::{Field, Scale, Signature, ValueType};
pub use samples::memory::InMemory;
pub use samples::{Order, Samples};
pub use source::{DataSetup, Purpose, Source};
pub use sources::batches::{CellWriter, OwnCell, RowBatch, TableRows, open_batches};
pub use sources::cifar::Cifar10;
pub use sources::clicks::{Clicks, category_id};
pub use sources::criteo::Criteo;
pub use sources::csv::Csv;
pub use sources::digits::Digits;
pub use sources::idx::Idx;
pub use sources::images::Images;
pub use sources::libsvm::LibSvm;
pub use sources::npy::Npy;
pub use sources::parquet::Parquet;
pub use sources::random::Random;
pub use sources::survey::{ColumnSurvey, Looks};
pub use sources::{Sources, survey, texts};
