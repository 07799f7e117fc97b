//! The interface of data sources.

use std::path::Path;

use shared_proto::job::Data;
use toml::Value;

use crate::dataset::Dataset;
use crate::error::InputError;
use crate::features::fitted::Fitted;

/// A source of data, which a job names in `data.kind`.
///
/// ```
/// # mod flambeau { pub use flambeau_data::*; }
/// use flambeau::{Column, DataSetup, Dataset, InMemory, InputError, Source};
///
/// /// The numbers from 0 to 1, and twice as much.
/// struct Doubled;
///
/// impl Source for Doubled {
///     fn open(setup: &DataSetup) -> Result<Dataset, InputError> {
///         // Settings of the source's own are in `data.options`.
///         setup.only(&["count"])?;
///         let count = setup.whole_number("count")?.unwrap_or(100);
///         let samples = |count: u64| {
///             let x: Vec<f32> = (0..count).map(|i| i as f32 / count as f32).collect();
///             let y = x.iter().map(|x| 2.0 * x).collect();
///             InMemory::new(
///                 vec![Column::numbers("x", vec![1], x)],
///                 vec![Column::numbers("y", vec![1], y)],
///             )
///         };
///         Dataset::in_memory(samples(count)?, samples(20)?)
///     }
/// }
/// # fn main() {}
/// ```
pub trait Source: 'static {
    /// True if samples can stay in their files when `data.stream` is set. If false, a job that sets `data.stream` is
    /// refused.
    const STREAMS: bool = false;

    /// Opens the data. With the same settings and files, every worker gets the same samples.
    ///
    /// # Errors
    /// [`InputError`] names the file and the place in it, or the setting.
    fn open(setup: &DataSetup) -> Result<Dataset, InputError>;
}

/// The settings with which data is opened.
#[derive(Clone, Copy, Debug)]
pub struct DataSetup<'a> {
    /// The job's `[data]` table. Settings of the source's own are in its `options`.
    pub settings: &'a Data,
    /// The job's seed.
    pub seed: u64,
    /// The use of the data.
    pub purpose: Purpose<'a>,
}

/// The use of data. It matters for data with parameters that are fitted to the training samples, such as tables.
#[derive(Clone, Copy, Debug, Default)]
pub enum Purpose<'a> {
    /// Training, in which columns are fitted.
    #[default]
    Training,
    /// An evaluation, with the columns as they were fitted in training.
    Evaluation(&'a Fitted),
    /// An evaluation of all samples of other data than that of the training, with the columns as they were fitted in
    /// training.
    EvaluationOfAll(&'a Fitted),
    /// Predictions for all samples, with the columns as they were fitted in training. Labels are not read.
    Prediction(&'a Fitted),
}

impl<'a> Purpose<'a> {
    /// Returns the parameters that were fitted in training; `None` if this is the training.
    pub(crate) fn fitted(self) -> Option<&'a Fitted> {
        match self {
            Self::Training => None,
            Self::Evaluation(fitted) | Self::EvaluationOfAll(fitted) | Self::Prediction(fitted) => {
                Some(fitted)
            }
        }
    }
}

impl<'a> DataSetup<'a> {
    /// Returns the folder or file that the data is in.
    ///
    /// # Errors
    /// [`InputError::NoPlace`] if neither the job nor this worker's settings name one.
    pub fn dir(&self) -> Result<&'a Path, InputError> {
        self.settings.dir.as_deref().ok_or(InputError::NoPlace)
    }

    /// Returns the size in bytes of the windows in which streamed samples are shuffled.
    pub(crate) fn window(&self) -> u64 {
        u64::from(self.settings.shuffle_mebibytes) << 20
    }

    /// Returns a whole number in `data.options`; `None` if it is not set.
    ///
    /// # Errors
    /// [`InputError::Invalid`] if the value is not a whole number, or is negative.
    pub fn whole_number(&self, key: &str) -> Result<Option<u64>, InputError> {
        let number = |value: &Value| value.as_integer().and_then(|n| u64::try_from(n).ok());
        self.option(key, number, "a whole number, at least 0")
    }

    /// Returns a number in `data.options`; `None` if it is not set.
    ///
    /// # Errors
    /// [`InputError::Invalid`] if the value is not a number.
    pub fn number(&self, key: &str) -> Result<Option<f64>, InputError> {
        let number = |value: &Value| value.as_float().or(value.as_integer().map(|n| n as f64));
        self.option(key, number, "a number")
    }

    /// Returns a boolean in `data.options`; `None` if it is not set.
    ///
    /// # Errors
    /// [`InputError::Invalid`] if the value is neither `true` nor `false`.
    pub fn truth(&self, key: &str) -> Result<Option<bool>, InputError> {
        self.option(key, Value::as_bool, "true or false")
    }

    /// Returns a text in `data.options`; `None` if it is not set.
    ///
    /// # Errors
    /// [`InputError::Invalid`] if the value is not a text.
    pub fn text(&self, key: &str) -> Result<Option<&'a str>, InputError> {
        self.option(key, Value::as_str, "text in quotes")
    }

    /// Refuses settings that have no effect: `data.columns`, `data.weight`, and settings in `data.options` other than
    /// those in `names`.
    ///
    /// # Errors
    /// [`InputError::Invalid`] names the setting.
    pub fn only(&self, names: &[&str]) -> Result<(), InputError> {
        if let Some(column) = self.settings.columns.keys().next() {
            return Err(InputError::Invalid(format!(
                "`data.columns` has {column:?}, but data.kind = {:?} has no columns; leave it out, or set data.kind to \"csv\" or \"parquet\"",
                self.settings.kind
            )));
        }
        if let Some(weight) = &self.settings.weight {
            return Err(InputError::Invalid(format!(
                "`data.weight` is {weight:?}, but data.kind = {:?} has no columns with names; leave it out, or weigh classes with data.class_weight",
                self.settings.kind
            )));
        }
        self.only_options(names)
    }

    /// Refuses settings in `data.options` other than those in `names`.
    ///
    /// # Errors
    /// [`InputError::Invalid`] names the setting, and lists those in `names`.
    pub fn only_options(&self, names: &[&str]) -> Result<(), InputError> {
        let mut options = self.settings.options.keys();
        let Some(key) = options.find(|key| !names.contains(&key.as_str())) else {
            return Ok(());
        };
        let known = match names {
            [] => "which takes none".to_owned(),
            names => format!("which takes {}", names.join(", ")),
        };
        Err(InputError::Invalid(format!(
            "`data.options.{key}` is no setting of data.kind = {:?}, {known}",
            self.settings.kind
        )))
    }

    fn option<T>(
        &self,
        key: &str,
        read: impl Fn(&'a Value) -> Option<T>,
        expected: &str,
    ) -> Result<Option<T>, InputError> {
        let Some(value) = self.settings.options.get(key) else {
            return Ok(None);
        };
        let refused = || {
            InputError::Invalid(format!(
                "`data.options.{key}` is {value}, but must be {expected}"
            ))
        };
        read(value).map(Some).ok_or_else(refused)
    }
}
