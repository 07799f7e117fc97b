//! An embedding table and its settings.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{Adagrad, Adam, Ftrl, JobError, Optimizer, Sgd};
use crate::refusal::{Reason, Refusal};
use crate::wire;

/// The most buckets of a table.
const MOST_BUCKETS: u32 = 1 << 16;

/// The maximum number of counters in one row of the sketches of all buckets together.
const MOST_COUNTERS: u64 = 1 << 30;

/// The maximum number of values of a row, so that a message has room for many rows.
const MOST_VALUES: u32 = 1 << 14;

/// A table of rows. A row has an id, `dimension` values, and the optimizer's state for them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TableSpec {
    /// The table's name, as in the model.
    pub name: String,
    /// The number of values in each row.
    pub dimension: u32,
    /// The number of buckets in which the rows are spread over servers. It never changes.
    pub buckets: u32,
    /// The values of a new row.
    pub initializer: Initializer,
    /// The optimizer of the rows.
    pub optimizer: RowOptimizer,
    /// The seed of new rows' values.
    pub seed: u64,
    /// The condition on which an id gets a row.
    #[serde(default)]
    pub admission: Admission,
    /// The rows that are evicted.
    #[serde(default)]
    pub eviction: Eviction,
    /// The form of the values in a server's memory and on its disk.
    #[serde(default, skip_serializing_if = "Storage::is_default")]
    pub storage: Storage,
}

/// The form of a row's values in a server's memory and on its disk. Updates compute with `f32`. The result is rounded up or
/// down by chance, so that small changes count on average (Gupta et al., "Deep Learning with Limited Numerical Precision",
/// ICML 2015, section 3). The optimizer's state, messages and checkpoints have `f32`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Storage {
    /// 32 bits, as computed.
    #[default]
    F32,
    /// 16 bits, with the range of `f32` and 8 significant bits.
    Bf16,
    /// 16 bits, up to 65,504 and with 11 significant bits.
    F16,
}

impl Storage {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// The condition on which an id gets a row. An id without a row takes no memory: its gradients are dropped, and it reads as
/// zeros.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Admission {
    /// Each id gets a row with its first gradient. Before that, the id reads as its initial values.
    #[default]
    All,
    /// An id gets a row once it has had `count` gradients. A sketch counts them, and may overestimate.
    Sights {
        /// The number of gradients, at most 255.
        count: u8,
        /// The number of counters in each row of a bucket's sketch. A sketch has four rows, and a counter is one byte.
        width: u32,
    },
    /// Each gradient of an id without a row gives it one with this probability.
    Chance {
        /// The probability, above 0 and at most 1.
        probability: f32,
    },
}

/// The rows that are evicted. A bucket evicts rows after an update. Unless an age is in seconds, the decision depends on the
/// bucket's content alone, so a restored run evicts the same rows again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Eviction {
    /// Evicts rows that have had no update for this long.
    pub age: Option<Age>,
    /// Evicts rows of a full table.
    pub capacity: Option<Capacity>,
    /// Evicts rows in which each value has a smaller magnitude than this, once they have had 16 updates.
    pub below: Option<f32>,
    /// The number of updates of a bucket from one search for old and small rows to the next; 0 stands for 256.
    pub search_interval: u32,
}

/// A length of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Age {
    /// Updates of the row's bucket.
    Updates(u32),
    /// Seconds, by the server's clock.
    Seconds(u32),
}

/// The maximum number of rows of a table. Each bucket has an equal part of it. A full bucket evicts a sixteenth of its
/// part, so that it is not full again at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Capacity {
    /// The maximum number of rows of the whole table.
    pub rows: u64,
    /// The rows that are evicted first.
    pub order: EvictionOrder,
}

/// The rows that a full bucket evicts first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EvictionOrder {
    /// The least recently updated rows.
    Oldest,
    /// The rows with the fewest updates; among equals, the least recently updated. Rows of the newest update come last.
    Rarest,
}

/// The values of a new row. They depend on the table's seed and name and on the row's id alone, not on the worker that uses
/// the row first.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Initializer {
    /// All values are 0.
    Zeros,
    /// Each value is drawn uniformly from `-limit` to `limit`.
    Uniform {
        /// The largest absolute value.
        limit: f32,
    },
    /// Each value is drawn from the normal distribution with mean 0.
    Normal {
        /// The standard deviation.
        deviation: f32,
    },
}

/// An optimizer that changes only the rows of a step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "name", rename_all = "kebab-case")]
pub enum RowOptimizer {
    /// Stochastic gradient descent.
    Sgd(Sgd),
    /// Adagrad, with a sum of squares for each value.
    Adagrad(Adagrad),
    /// Adagrad, with a sum of squares for each row.
    RowAdagrad(Adagrad),
    /// Adam, with two means for each value.
    Adam(Adam),
    /// Adam, with a mean for each value and a mean square for each row.
    RowAdam(Adam),
    /// FTRL-Proximal.
    Ftrl(Ftrl),
}

impl RowOptimizer {
    /// Checks the settings.
    pub(crate) fn validate(&self) -> Result<(), JobError> {
        match self.clone() {
            Self::Sgd(settings) => Optimizer::Sgd(settings),
            Self::Adagrad(settings) | Self::RowAdagrad(settings) => Optimizer::Adagrad(settings),
            Self::Adam(settings) | Self::RowAdam(settings) => Optimizer::Adam(settings),
            Self::Ftrl(settings) => Optimizer::Ftrl(settings),
        }
        .validate()
    }

    /// Returns the step size.
    pub fn learning_rate(&self) -> f32 {
        match self {
            Self::Sgd(settings) => settings.learning_rate,
            Self::Adagrad(settings) | Self::RowAdagrad(settings) => settings.learning_rate,
            Self::Adam(settings) | Self::RowAdam(settings) => settings.learning_rate,
            Self::Ftrl(settings) => settings.learning_rate,
        }
    }
}

impl Default for TableSpec {
    /// A table without a name, with one bucket and rows of one value.
    fn default() -> Self {
        Self {
            name: String::new(),
            dimension: 1,
            buckets: 1,
            initializer: Initializer::Zeros,
            optimizer: RowOptimizer::Sgd(Sgd::default()),
            seed: 0,
            admission: Admission::default(),
            eviction: Eviction::default(),
            storage: Storage::default(),
        }
    }
}

impl TableSpec {
    /// Checks that the settings are valid.
    ///
    /// # Errors
    /// [`Reason::Malformed`] names the table and the setting.
    pub fn check(&self) -> Result<(), Refusal> {
        let at_least_one = |what: &str, value: u64| {
            (value == 0).then(|| format!("{what} is 0; it must be at least 1"))
        };
        let size = |what: &str, value: f32| {
            let fits = value.is_finite() && value > 0.0;
            (!fits).then(|| format!("{what} is {value}; it must be finite and above 0"))
        };
        let initializer = match self.initializer {
            Initializer::Zeros => None,
            Initializer::Uniform { limit } => size("the limit of the initial values", limit),
            Initializer::Normal { deviation } => {
                size("the deviation of the initial values", deviation)
            }
        };
        let admission = match self.admission {
            Admission::All => None,
            Admission::Sights { count, width } => {
                let counters = u64::from(self.buckets) * u64::from(width);
                at_least_one("admission.sights.count", count.into())
                    .or_else(|| at_least_one("admission.sights.width", width.into()))
                    .or_else(|| (counters > MOST_COUNTERS).then(|| format!("admission.sights.width is {width} in each of {} buckets; {MOST_COUNTERS} in all is the most", self.buckets)))
            }
            Admission::Chance { probability } => (!(probability > 0.0 && probability <= 1.0))
                .then(|| format!("admission.chance.probability is {probability}; it must be above 0 and at most 1")),
        };
        let Eviction {
            age,
            capacity,
            below,
            ..
        } = self.eviction;
        let age = age.map(|(Age::Updates(age) | Age::Seconds(age))| u64::from(age));
        let problem = at_least_one("the dimension", self.dimension.into())
            .or_else(|| at_least_one("the number of buckets", self.buckets.into()))
            .or_else(|| {
                (self.buckets > MOST_BUCKETS).then(|| {
                    format!(
                        "the number of buckets is {}; {MOST_BUCKETS} is the most",
                        self.buckets
                    )
                })
            })
            .or_else(|| {
                (self.dimension > MOST_VALUES).then(|| {
                    format!(
                        "the dimension is {}; {MOST_VALUES} is the most",
                        self.dimension
                    )
                })
            })
            .or(initializer)
            .or(admission)
            .or_else(|| {
                self.optimizer
                    .validate()
                    .err()
                    .map(|error| error.to_string())
            })
            .or_else(|| age.and_then(|age| at_least_one("eviction.age", age)))
            .or_else(|| {
                capacity.and_then(|capacity| at_least_one("eviction.capacity.rows", capacity.rows))
            })
            .or_else(|| below.and_then(|below| size("eviction.below", below)));
        match problem {
            None => Ok(()),
            Some(problem) => Err(Refusal::new(
                Reason::Malformed,
                format!("table {:?}: {problem}", self.name),
            )),
        }
    }
}

impl TableSpec {
    /// Returns whether this table and `other` store rows in the same form, so that this table can take the rows of
    /// `other` from a checkpoint. Learning rates, the admission of new rows (except the presence and the width of a
    /// sketch), the limits of eviction and the storage of values may differ.
    pub fn is_stored_like(&self, other: &Self) -> bool {
        let optimizer = |spec: &Self| std::mem::discriminant(&spec.optimizer);
        let counters = |spec: &Self| match spec.admission {
            Admission::Sights { width, .. } => Some(width),
            Admission::All | Admission::Chance { .. } => None,
        };
        let evicts = |spec: &Self| spec.eviction != Eviction::default();
        // Times in histories are seconds or numbers of updates.
        let in_seconds = |spec: &Self| matches!(spec.eviction.age, Some(Age::Seconds(_)));
        let sizes = |spec: &Self| (spec.dimension, spec.buckets);
        self.name == other.name
            && sizes(self) == sizes(other)
            && optimizer(self) == optimizer(other)
            && counters(self) == counters(other)
            && evicts(self) == evicts(other)
            && in_seconds(self) == in_seconds(other)
    }
}

impl fmt::Display for TableSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "table {:?} of dimension {}", self.name, self.dimension)
    }
}

impl TableSpec {
    /// Reads a table from the wire.
    ///
    /// # Errors
    /// [`Reason::Malformed`] if the table's settings cannot be read, or are not valid.
    pub fn read(table: &wire::Table) -> Result<Self, Refusal> {
        let spec: Self = toml::from_str(&table.spec).map_err(|error| {
            Refusal::new(
                Reason::Malformed,
                format!("the settings of a table cannot be read: {error}; run the same release everywhere"),
            )
        })?;
        spec.check()?;
        Ok(spec)
    }
}

impl From<&TableSpec> for wire::Table {
    fn from(spec: &TableSpec) -> Self {
        // Numbers, texts and enums: there is nothing that TOML cannot hold.
        let spec = toml::to_string(spec).unwrap_or_default();
        Self { spec }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> TableSpec {
        TableSpec {
            name: "item".to_owned(),
            dimension: 8,
            buckets: 16,
            ..TableSpec::default()
        }
    }

    #[test]
    fn settings_survive_the_wire() {
        let all = TableSpec {
            initializer: Initializer::Normal { deviation: 0.1 },
            optimizer: RowOptimizer::RowAdagrad(Adagrad::default()),
            admission: Admission::Sights {
                count: 3,
                width: 512,
            },
            eviction: Eviction {
                age: Some(Age::Updates(9)),
                capacity: Some(Capacity {
                    rows: 100,
                    order: EvictionOrder::Rarest,
                }),
                below: Some(1e-7),
                search_interval: 3,
            },
            ..spec()
        };
        for spec in [spec(), all] {
            assert_eq!(TableSpec::read(&wire::Table::from(&spec)), Ok(spec));
        }
        let unread = TableSpec::read(&wire::Table::default()).unwrap_err();
        assert_eq!(unread.reason, Reason::Malformed);
    }

    #[test]
    fn rows_are_taken_from_tables_that_are_stored_alike() {
        let with = |age| TableSpec {
            eviction: Eviction {
                age: Some(age),
                ..Eviction::default()
            },
            ..spec()
        };
        let other_rate = TableSpec {
            optimizer: RowOptimizer::Sgd(Sgd {
                learning_rate: 0.5,
                ..Sgd::default()
            }),
            ..spec()
        };
        assert!(other_rate.is_stored_like(&spec()));
        assert!(with(Age::Updates(3)).is_stored_like(&with(Age::Updates(9))));
        // Histories hold numbers of updates or seconds.
        assert!(!with(Age::Updates(3)).is_stored_like(&with(Age::Seconds(3))));
        assert!(!with(Age::Updates(3)).is_stored_like(&spec()));
        let adagrad = TableSpec {
            optimizer: RowOptimizer::Adagrad(Adagrad::default()),
            ..spec()
        };
        assert!(!adagrad.is_stored_like(&spec()));
    }

    #[test]
    fn impossible_settings_are_named() {
        assert_eq!(spec().check(), Ok(()));
        let evicting = |eviction| TableSpec { eviction, ..spec() };
        let order = EvictionOrder::Oldest;
        for (wrong, said) in [
            (
                TableSpec {
                    dimension: 0,
                    ..spec()
                },
                "dimension is 0",
            ),
            (
                TableSpec {
                    buckets: 0,
                    ..spec()
                },
                "buckets is 0",
            ),
            (
                TableSpec {
                    initializer: Initializer::Uniform { limit: f32::NAN },
                    ..spec()
                },
                "limit",
            ),
            (
                TableSpec {
                    admission: Admission::Sights { count: 2, width: 0 },
                    ..spec()
                },
                "width is 0",
            ),
            (
                TableSpec {
                    admission: Admission::Sights {
                        count: 2,
                        width: u32::MAX,
                    },
                    ..spec()
                },
                "in all is the most",
            ),
            (
                TableSpec {
                    admission: Admission::Chance {
                        probability: f32::NAN,
                    },
                    ..spec()
                },
                "probability is NaN",
            ),
            (
                evicting(Eviction {
                    age: Some(Age::Seconds(0)),
                    ..Eviction::default()
                }),
                "age is 0",
            ),
            (
                evicting(Eviction {
                    capacity: Some(Capacity { rows: 0, order }),
                    ..Eviction::default()
                }),
                "rows is 0",
            ),
            (
                evicting(Eviction {
                    below: Some(-1.0),
                    ..Eviction::default()
                }),
                "below is -1",
            ),
        ] {
            let error = wrong.check().unwrap_err();
            assert_eq!(error.reason, Reason::Malformed);
            assert!(
                error.message.contains(said) && error.message.contains("\"item\""),
                "{error}"
            );
        }
    }
}
