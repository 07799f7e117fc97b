//! Data: the sources that a job can name, and samples that become batches.
//!
//! Everything here is deterministic: with the same files and seed, each position of a pass holds the same sample on
//! every worker. Files are not trusted: an error names the file and the place in it.
//!
//! - `source`: the interface of data sources; [`Digits`], [`Idx`], [`Cifar10`], [`Npy`], [`Images`], [`Csv`],
//!   [`Parquet`], [`LibSvm`], [`Criteo`], [`Clicks`] and [`Random`] are those that ship
//! - `dataset`: a data set and its samples, read by position
//! - `batch`: samples that are computed together
//! - `field`: the parts of a sample, by name
//! - `column`, `memory`: samples that are held in memory, column by column
//! - `shape`: the shape of pictures; `pictures`: samples that are pictures, resized, normalised, and varied in training
//! - `files`: where files are, and their bytes; `remote`: those in object stores; `archive`: those in zip archives; `held_out`: samples that are held out of them; `place`: a place in a file
//! - `chunks`: files that are read in parts; `stream`: samples that are read anew in each pass; `lines`: files of text
//! - `tabular`, `table`: columns by their types, of [`Csv`] and [`Parquet`]; `fitting`: how they are fitted to the training
//!   samples, and `fitted`: the result; `survey`: what columns look like; `value`: a cell in its file's type; `texts`, `hash`, `date`: cells as categories, ids and dates
//! - `classes`: samples in a file or a folder for each class; `target`: labels
//! - `error`: the errors of all of these

mod archive;
mod batch;
mod chunks;
mod cifar;
mod classes;
mod clicks;
mod column;
mod criteo;
mod csv;
mod dataset;
mod date;
mod digits;
mod error;
mod field;
mod files;
mod fitted;
mod fitting;
mod hash;
mod held_out;
mod id_column;
mod idx;
mod images;
mod libsvm;
mod lines;
mod memory;
mod npy;
mod parquet;
pub(crate) mod pictures;
mod place;
mod random;
mod remote;
mod shape;
mod source;
mod stream;
mod survey;
mod table;
mod tabular;
mod target;
mod texts;
mod value;

use std::path::{Path, PathBuf};

use shared_proto::job::{Data, Job};

/// Returns the cells of columns of a job's data as texts, for samples that are predicted: a row for each sample, in their order.
///
/// # Errors
/// If the data has no columns with names, or lacks one of these, or cannot be read.
pub(crate) fn texts(job: &Job, names: &[String]) -> Result<Vec<Vec<String>>, InputError> {
    let setup = DataSetup {
        settings: &job.data,
        seed: job.seed,
        purpose: Purpose::Training,
    };
    match job.data.kind.as_str() {
        "csv" => csv::texts(&setup, names),
        "parquet" => parquet::texts(&setup, names),
        kind => Err(InputError::Invalid(format!(
            "data of kind {kind:?} has no columns with names, so none can be copied to the predictions"
        ))),
    }
}

/// Returns the files that a path names, which may be a pattern; none for another kind of place.
///
/// # Errors
/// If nothing matches, or a folder cannot be read.
pub(crate) fn matching(place: &Path) -> Result<Vec<PathBuf>, InputError> {
    files::matching(place)
}

/// Returns what the columns of a table look like, by its first rows.
///
/// # Errors
/// If the data is no table with named columns, or cannot be read.
pub fn survey(data: &Data) -> Result<Vec<ColumnSurvey>, InputError> {
    let setup = DataSetup {
        settings: data,
        seed: 0,
        purpose: Purpose::Training,
    };
    match data.kind.as_str() {
        "csv" => csv::survey(&setup),
        "parquet" => parquet::survey(&setup),
        kind => Err(InputError::Invalid(format!(
            "data of kind {kind:?} has no columns with names to describe"
        ))),
    }
}

pub use batch::{Batch, Feature, Ragged};
pub use cifar::Cifar10;
pub use clicks::{Clicks, category_id};
pub use column::{Column, Values};
pub use criteo::Criteo;
pub use csv::Csv;
pub use dataset::{Dataset, Order, Samples};
pub(crate) use dataset::{read, save_transforms};
pub use digits::Digits;
pub use error::InputError;
pub use field::{Field, Signature};
pub use fitted::{Fitted, FittedColumn, Gap, Rule};
pub use idx::Idx;
pub use images::Images;
pub use libsvm::LibSvm;
pub use memory::InMemory;
pub use npy::Npy;
pub use parquet::Parquet;
pub use random::Random;
pub use source::{DataSetup, Purpose, Source};
pub use survey::{ColumnSurvey, Looks};
pub use target::Target;
