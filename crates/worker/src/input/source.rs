//! The interface of data sources.

use std::path::Path;

use shared_proto::job::Data;

use super::dataset::Dataset;
use super::error::InputError;

/// A source of data, which a job names in `data.kind`.
pub trait Source: 'static {
    /// Opens the data. With the same settings and files, every worker gets the same samples.
    ///
    /// # Errors
    /// [`InputError`] names the file and the place in it, or the setting.
    fn open(setup: &DataSetup) -> Result<Dataset, InputError>;
}

/// The settings from which data is opened.
#[derive(Clone, Copy, Debug)]
pub struct DataSetup<'a> {
    /// The job's `[data]`; settings of a source's own are in its `options`.
    pub settings: &'a Data,
    /// The job's seed.
    pub seed: u64,
}

impl<'a> DataSetup<'a> {
    /// Returns the folder or file that the data is in.
    ///
    /// # Errors
    /// [`InputError::NoPlace`] if neither the job nor this worker's settings name one.
    pub fn dir(&self) -> Result<&'a Path, InputError> {
        self.settings.dir.as_deref().ok_or(InputError::NoPlace)
    }

    /// Returns a whole number in `data.options`, if it is there.
    ///
    /// # Errors
    /// [`InputError::Invalid`] if it is none, or negative.
    pub fn whole_number(&self, key: &str) -> Result<Option<u64>, InputError> {
        let Some(value) = self.settings.options.get(key) else {
            return Ok(None);
        };
        let number = value.as_integer().and_then(|n| u64::try_from(n).ok());
        let refused = || {
            InputError::Invalid(format!(
                "`data.options.{key}` is {value}, but must be a whole number, at least 0"
            ))
        };
        number.map(Some).ok_or_else(refused)
    }
}
