//! The errors of a job file.

use super::Strategy;

/// The error of a job file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JobError {
    /// The text is no job file.
    #[error("the job file is not valid: {0}")]
    Syntax(#[from] toml::de::Error),
    /// A setting makes no sense.
    #[error("job setting `{field}` is {value}, but {expected}")]
    Setting {
        /// The setting's key, as in the file.
        field: &'static str,
        /// The setting's value.
        value: String,
        /// The expected value.
        expected: &'static str,
    },
    /// A setting is given that has no effect beside another.
    #[error(
        "job setting `{field}` is {value}, but it does not count with `{other}` {other_value}; {advice}"
    )]
    Unused {
        /// The setting's key, as in the file.
        field: &'static str,
        /// The value given.
        value: String,
        /// The other setting's name, as in the file.
        other: &'static str,
        /// The value of the other setting.
        other_value: String,
        /// Advice to the user.
        advice: &'static str,
    },
    /// A setting of a column of the data makes no sense.
    #[error("data.columns, column {column:?}: {error}")]
    Column {
        /// The column's name.
        column: String,
        /// The error of the setting.
        error: Box<JobError>,
    },
    /// A group's setting makes no sense.
    #[error("group {variables:?}: {error}")]
    Group {
        /// The group's pattern of names.
        variables: String,
        /// The error of the setting.
        error: Box<JobError>,
    },
    /// A setting of tables makes no sense.
    #[error("tables {tables:?}: {error}")]
    Table {
        /// The tables' pattern of names.
        tables: String,
        /// The error of the setting.
        error: Box<JobError>,
    },
}

impl JobError {
    /// Returns the error for a staleness bound in a mode that does not use it.
    pub fn staleness_unused(strategy: &Strategy) -> Self {
        Self::Unused {
            field: "strategy.staleness",
            value: strategy.staleness.to_string(),
            other: "strategy.mode",
            other_value: format!("{:?}", strategy.mode.name()),
            advice: "leave it out, or set the mode to \"bounded\"",
        }
    }
}
