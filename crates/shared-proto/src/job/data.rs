//! The data set of a job: its source, what is predicted, and the columns of tables.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::JobError;
use super::columns::{ColumnType, Missing, check_missing, is_default, is_yes, yes};
use super::settings::settings;

settings! {
    /// The data set and its settings.
    Data {
        /// The name of a source that ships, such as `csv` (`flambeau job init -` prints all), or of one of your own.
        kind: String = "digits".to_owned(),
        /// The folder or file of the data; each worker may override it.
        #[serde(skip_serializing_if = "Option::is_none")]
        dir: Option<PathBuf> = None,
        /// CSV, Parquet: the name of the column with the label.
        label: String = "label".to_owned(),
        /// CSV, Parquet, LIBSVM: the kind of the labels.
        target: TargetKind = TargetKind::Auto,
        /// CSV, Parquet, LIBSVM: the transformation of labels that are numbers. Metrics and predictions stay in the unit of
        /// the labels.
        #[serde(skip_serializing_if = "is_default")]
        label_transform: LabelTransform = LabelTransform::None,
        /// The share of the samples that is held out for evaluation, where no separate file has them.
        held_out: f64 = 0.2,
        /// The number of batches that a worker prepares ahead of the one that it computes.
        prefetch: u32 = 1,
        /// CSV, Parquet, LIBSVM, Criteo, folders of pictures: samples are read from their files in each pass, and not held in
        /// memory.
        stream: bool = false,
        /// Streamed data: the size in MiB of the parts of files whose samples are shuffled together. A worker holds twice
        /// as much.
        shuffle_mebibytes: u32 = 64,
        /// CSV: the character between fields. Absent: the one of comma, tab, semicolon and `|` that is most frequent in the
        /// first line.
        #[serde(skip_serializing_if = "Option::is_none")]
        delimiter: Option<char> = None,
        /// CSV: the decimal separator of numbers.
        #[serde(skip_serializing_if = "is_point")]
        decimal: char = '.',
        /// CSV: whether the first line has the names of the columns.
        #[serde(default = "yes", skip_serializing_if = "is_yes")]
        header: bool = true,
        /// CSV without a line of names: the names of the columns. Absent: the names are the columns' indices, from 0.
        #[serde(skip_serializing_if = "Option::is_none")]
        column_names: Option<Vec<String>> = None,
        /// CSV, Parquet: the replacement of missing numbers and dates in columns that do not set their own. Absent: a
        /// missing value is an error.
        #[serde(skip_serializing_if = "Option::is_none")]
        missing: Option<Missing> = None,
        /// CSV, Parquet, LIBSVM: the texts that stand for a missing value, besides an empty cell. Absent: those of pandas and R.
        #[serde(skip_serializing_if = "Option::is_none")]
        missing_texts: Option<Vec<String>> = None,
        /// CSV, Parquet, LIBSVM: the treatment of a sample without a label.
        #[serde(skip_serializing_if = "is_default")]
        missing_label: MissingLabel = MissingLabel::Error,
        /// CSV, Parquet: the column with the weight of each sample in loss and metrics. Absent: all samples count alike.
        #[serde(skip_serializing_if = "Option::is_none")]
        weight: Option<String> = None,
        /// The weights of classes in loss and metrics, by label. Classes that are not here have the weight 1.
        #[serde(skip_serializing_if = "BTreeMap::is_empty")]
        class_weight: BTreeMap<String, f32> = BTreeMap::new(),
        /// CSV, Parquet: the types of columns, by name. Columns that are not here are numbers.
        #[serde(skip_serializing_if = "BTreeMap::is_empty")]
        columns: BTreeMap<String, ColumnType> = BTreeMap::new(),
        /// Sources of pictures: how they are resized, normalised and varied.
        #[serde(skip_serializing_if = "Option::is_none")]
        pictures: Option<Pictures> = None,
        /// Settings that only this source has. A source refuses settings that it does not have.
        #[serde(skip_serializing_if = "toml::Table::is_empty")]
        options: toml::Table = toml::Table::new(),
    }
}

/// The transformations of pictures, in the order of these fields. A picture is a sample of shape `[channels, rows,
/// columns]`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Pictures {
    /// The number of rows, and of columns, to which all pictures are resized.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resize: Option<u32>,
    /// Training: the number of zeros that are added at each side. From the result, a window of the picture's size is
    /// cut at a random place, which is drawn again in each pass.
    #[serde(skip_serializing_if = "is_default")]
    pub crop: u32,
    /// Training: each picture is mirrored left to right with probability 1/2, drawn again in each pass.
    #[serde(skip_serializing_if = "is_default")]
    pub flip: bool,
    /// The number that is subtracted from all values of a channel, for each channel.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mean: Vec<f32>,
    /// A divisor for each channel. It divides the values after `mean` is subtracted.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub deviation: Vec<f32>,
}

/// The kind of the label.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TargetKind {
    /// Determined by the labels: numbers if one has a fraction, otherwise classes (LIBSVM: binary if there are two
    /// labels).
    #[default]
    Auto,
    /// One of several classes.
    Class,
    /// 0 or 1. The lower of the two labels becomes 0.
    Binary,
    /// A number.
    Number,
}

/// The transformation of labels that are numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LabelTransform {
    /// None.
    #[default]
    None,
    /// Subtracts the mean of the training labels, and divides by their standard deviation.
    Standardise,
}

/// The treatment of a sample without a label.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MissingLabel {
    /// The data is refused.
    #[default]
    Error,
    /// The sample is left out, and the log has the number of such samples.
    Skip,
}

impl Data {
    /// Checks the settings of columns, of weights and of the delimiter.
    pub(super) fn validate_columns(&self) -> Result<(), JobError> {
        check_missing("data.missing", self.missing)?;
        if let Some(delimiter) = self
            .delimiter
            .filter(|c| !c.is_ascii() || ['"', '\n', '\r'].contains(c))
        {
            return Err(JobError::Setting {
                field: "data.delimiter",
                value: format!("{delimiter:?}"),
                expected: "must be one ASCII character, such as \";\" or \"\\t\"",
            });
        }
        if let Some(weight) = self
            .class_weight
            .values()
            .find(|w| !w.is_finite() || **w < 0.0)
        {
            return Err(JobError::Setting {
                field: "data.class_weight",
                value: weight.to_string(),
                expected: "must be finite numbers, at least 0",
            });
        }
        if self.weight.as_ref() == Some(&self.label) {
            return Err(JobError::Setting {
                field: "data.weight",
                value: format!("{:?}", self.label),
                expected: "must name another column than data.label",
            });
        }
        if self.header && self.column_names.is_some() {
            return Err(JobError::Unused {
                field: "data.column_names",
                value: "given".to_owned(),
                other: "data.header",
                other_value: "true".to_owned(),
                advice: "leave it out, or set data.header to false",
            });
        }
        for (column, kind) in &self.columns {
            kind.validate().map_err(|error| JobError::Column {
                column: column.clone(),
                error: Box::new(error),
            })?;
        }
        Ok(())
    }
}

impl Pictures {
    /// The maximum of `resize` and of `crop`.
    const MOST: u32 = 1 << 12;

    pub(super) fn validate(&self) -> Result<(), JobError> {
        let setting = |field, value: String, expected| {
            Err(JobError::Setting {
                field,
                value,
                expected,
            })
        };
        if let Some(side) = self.resize.filter(|n| !(1..=Self::MOST).contains(n)) {
            let expected = "must be at least 1 and at most 4096";
            return setting("data.pictures.resize", side.to_string(), expected);
        }
        if self.crop > Self::MOST {
            let expected = "must be at most 4096";
            return setting("data.pictures.crop", self.crop.to_string(), expected);
        }
        if let Some(mean) = self.mean.iter().find(|mean| !mean.is_finite()) {
            let expected = "must be finite numbers";
            return setting("data.pictures.mean", mean.to_string(), expected);
        }
        let bad = |deviation: &&f32| !deviation.is_normal() || **deviation < 0.0;
        if let Some(deviation) = self.deviation.iter().find(bad) {
            let expected = "must be positive numbers";
            return setting("data.pictures.deviation", deviation.to_string(), expected);
        }
        Ok(())
    }
}

fn is_point(decimal: &char) -> bool {
    *decimal == '.'
}

#[cfg(test)]
mod tests {
    use crate::job::Job;

    #[test]
    fn changes_of_pictures_without_sense_are_named() {
        let pictures = "[data.pictures]\nresize = 96\nflip = true\nmean = [0.5]";
        let job = Job::from_toml(pictures).unwrap();
        assert_eq!(Job::from_toml(&job.to_toml()).unwrap(), job);
        for (setting, named) in [
            ("resize = 0", "data.pictures.resize"),
            ("resize = 4097", "is 4097"),
            ("crop = 4097", "data.pictures.crop"),
            ("mean = [0.5, nan]", "data.pictures.mean"),
            ("deviation = [0.0]", "data.pictures.deviation"),
            ("deviation = [-1.0]", "is -1"),
            ("size = 3", "size"),
        ] {
            let error = Job::from_toml(&format!("[data.pictures]\n{setting}"));
            let error = error.unwrap_err().to_string();
            assert!(error.contains(named), "{setting}: {error}");
        }
    }
}
