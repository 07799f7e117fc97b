//! The columns of tables: their types, and the replacement of missing numbers.

use serde::{Deserialize, Serialize};

use super::JobError;

/// The maximum number of ids of a column, because ids are 32-bit numbers.
const MOST_BUCKETS: u64 = u32::MAX as u64;

/// The type of a column, and how its values become inputs of the model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "kebab-case", deny_unknown_fields)]
pub enum ColumnType {
    /// Numbers.
    Number {
        /// The transformation of the numbers.
        #[serde(default, skip_serializing_if = "is_default")]
        transform: Transform,
        /// The number of buckets of [`Transform::Bucket`]; 10 by default.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        buckets: Option<u64>,
        /// The number that replaces a missing one. Absent: `data.missing` decides.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        missing: Option<Missing>,
    },
    /// Dates and times, as days since the beginning of 1970 in UTC.
    Date {
        /// The format of dates, as in `strftime`, such as `%d/%m/%Y`. Absent: ISO 8601.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        format: Option<String>,
        /// The transformation of the number of days.
        #[serde(default, skip_serializing_if = "is_default")]
        transform: Transform,
        /// The number of buckets of [`Transform::Bucket`]; 10 by default.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        buckets: Option<u64>,
        /// The number that replaces a missing date. Absent: `data.missing` decides.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        missing: Option<Missing>,
    },
    /// Categories. Each category becomes an id.
    Category {
        /// The number of ids to which a hash maps the values. Absent: each value of the training samples has an id of
        /// its own, from 1 on in sorted order, and all other values have the id 0.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        buckets: Option<u64>,
    },
    /// Ids for embedding tables, without a limit on their number.
    Id {
        /// Whether a cell's id is a hash of its text. Otherwise cells are whole numbers, which are ids as they are.
        #[serde(default = "yes", skip_serializing_if = "is_yes")]
        hash: bool,
        /// The seed of the hash.
        #[serde(default, skip_serializing_if = "is_default")]
        seed: u64,
        /// The text between the ids of a cell. Absent: a cell has one id.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        separator: Option<String>,
    },
    /// Not an input of the model.
    Ignore {},
}

/// The replacement of a missing number. Statistics are those of the training samples.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Missing {
    /// This number.
    Number(f64),
    /// A rule, by its name.
    Rule(MissingRule),
}

/// A rule for the replacement of a missing number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MissingRule {
    /// The mean of the column.
    Mean,
    /// The median of the column.
    Median,
    /// 0.
    Zero,
    /// The mean of the column, and a column of its own that is 1 where the number is missing and 0 elsewhere.
    Indicator,
}

/// The transformation of a column's numbers. Its parameters are taken from the training samples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Transform {
    /// None.
    None,
    /// Subtracts the mean, and divides by the standard deviation.
    #[default]
    Standardise,
    /// `sign(x) ln(1 + |x|)`, which is then standardised.
    Log,
    /// The index of the number's bucket, as an id. The buckets hold about equally many training samples.
    Bucket,
}

impl ColumnType {
    /// Returns the replacement of missing numbers in the column. `None` if the column sets none, or has no numbers.
    pub fn missing(&self) -> Option<Missing> {
        match self {
            Self::Number { missing, .. } | Self::Date { missing, .. } => *missing,
            _ => None,
        }
    }

    /// Sets the replacement of missing numbers to `all`, unless the column sets its own or has no numbers.
    #[must_use]
    pub fn or_missing(mut self, all: Option<Missing>) -> Self {
        if let Self::Number { missing, .. } | Self::Date { missing, .. } = &mut self {
            *missing = missing.or(all);
        }
        self
    }

    pub(super) fn validate(&self) -> Result<(), JobError> {
        let (buckets, fewest) = match self {
            Self::Category { buckets } => (buckets, 1),
            Self::Number {
                transform,
                buckets,
                missing,
            }
            | Self::Date {
                transform,
                buckets,
                missing,
                ..
            } => {
                check_missing("missing", *missing)?;
                if buckets.is_some() && *transform != Transform::Bucket {
                    return Err(JobError::Unused {
                        field: "buckets",
                        value: "given".to_owned(),
                        other: "transform",
                        other_value: format!("{:?}", transform.name()),
                        advice: "leave it out, or set transform to \"bucket\"",
                    });
                }
                (buckets, 2)
            }
            Self::Id {
                hash: false, seed, ..
            } if *seed != 0 => {
                return Err(JobError::Unused {
                    field: "seed",
                    value: seed.to_string(),
                    other: "hash",
                    other_value: "false".to_owned(),
                    advice: "leave it out, or set hash to true",
                });
            }
            Self::Id {
                separator: Some(separator),
                ..
            } if separator.is_empty() => {
                return Err(JobError::Setting {
                    field: "separator",
                    value: "\"\"".to_owned(),
                    expected: "must be the text between two ids, such as \"|\"",
                });
            }
            Self::Id { .. } | Self::Ignore {} => return Ok(()),
        };
        match buckets {
            Some(n) if !(fewest..=MOST_BUCKETS).contains(n) => Err(JobError::Setting {
                field: "buckets",
                value: n.to_string(),
                expected: "must be at least 1 for a category, 2 for others, and at most 4294967295",
            }),
            _ => Ok(()),
        }
    }
}

/// Refuses a replacement of missing numbers that is not finite.
pub(super) fn check_missing(field: &'static str, missing: Option<Missing>) -> Result<(), JobError> {
    match missing {
        Some(Missing::Number(number)) if !(number as f32).is_finite() => Err(JobError::Setting {
            field,
            value: number.to_string(),
            expected: "must be a finite number, \"mean\", \"median\", \"zero\" or \"indicator\"",
        }),
        _ => Ok(()),
    }
}

impl Transform {
    /// Returns the name in job files.
    fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Standardise => "standardise",
            Self::Log => "log",
            Self::Bucket => "bucket",
        }
    }
}

pub(super) fn yes() -> bool {
    true
}

pub(super) fn is_yes(value: &bool) -> bool {
    *value
}

pub(super) fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::Job;

    #[test]
    fn columns_are_read_and_written() {
        let job = Job::from_toml(
            r#"
            [data.columns]
            price = { type = "number", transform = "log" }
            age = { type = "number", transform = "bucket", buckets = 5 }
            city = { type = "category", buckets = 1000 }
            kind = { type = "category" }
            when = { type = "date" }
            user = { type = "id" }
            genres = { type = "id", seed = 3, separator = "|" }
            item = { type = "id", hash = false }
            note = { type = "ignore" }
            "#,
        )
        .unwrap();
        let columns = &job.data.columns;
        assert_eq!(columns["note"], ColumnType::Ignore {});
        assert_eq!(columns["kind"], ColumnType::Category { buckets: None });
        let when = ColumnType::Date {
            format: None,
            transform: Transform::Standardise,
            buckets: None,
            missing: None,
        };
        assert_eq!(columns["when"], when);
        assert_eq!(Job::from_toml(&job.to_toml()).unwrap(), job);
        let changed = job.with("data.columns.city.buckets=7").unwrap();
        let seven = ColumnType::Category { buckets: Some(7) };
        assert_eq!(changed.data.columns["city"], seven);
    }

    #[test]
    fn columns_without_sense_are_named() {
        for (column, named) in [
            ("type = \"number\"\nbuckets = 3", "transform"),
            (
                "type = \"number\"\ntransform = \"log\"\nbuckets = 3",
                "\"log\"",
            ),
            (
                "type = \"number\"\ntransform = \"bucket\"\nbuckets = 1",
                "is 1",
            ),
            ("type = \"category\"\nbuckets = 0", "is 0"),
            ("type = \"category\"\nbuckets = 4294967296", "is 4294967296"),
            (
                "type = \"date\"\ntransform = \"bucket\"\nbuckets = 0",
                "is 0",
            ),
            ("type = \"category\"\ntransform = \"log\"", "transform"),
            ("type = \"ignore\"\nbuckets = 3", "buckets"),
            ("type = \"text\"", "text"),
            ("transform = \"log\"", "type"),
        ] {
            let error = Job::from_toml(&format!("[data.columns.x]\n{column}"));
            let error = error.unwrap_err().to_string();
            assert!(error.contains(named), "{column}: {error}");
            assert!(error.contains("x"), "{error}");
        }
    }
}
