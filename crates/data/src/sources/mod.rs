//! The data sources of this crate.

pub(crate) mod batches;
mod by_name;
pub(crate) mod cifar;
mod classes;
pub(crate) mod clicks;
pub(crate) mod criteo;
pub(crate) mod csv;
pub(crate) mod digits;
pub(crate) mod idx;
pub(crate) mod images;
pub(crate) mod libsvm;
pub(crate) mod npy;
pub(crate) mod parquet;
mod pictures;
pub(crate) mod random;
pub(crate) mod survey;
mod tabular;
mod weighted;

use shared_proto::job::{Data, Job};

use crate::error::InputError;
use crate::source::{DataSetup, Purpose};
use survey::ColumnSurvey;

pub use by_name::Sources;

/// Returns the cells of columns of a job's data as texts, for all samples of a prediction: one vector for each column,
/// in the order of the samples.
///
/// # Errors
/// If the data has no columns with names, lacks one of these columns, or cannot be read.
pub fn texts(job: &Job, names: &[String]) -> Result<Vec<Vec<String>>, InputError> {
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

/// Surveys the columns of a table by its first rows.
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
