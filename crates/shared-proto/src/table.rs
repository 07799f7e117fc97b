//! Embedding tables: rows of numbers, found by id.

use serde::{Deserialize, Serialize};

use crate::job::{Adagrad, Adam, Ftrl, Sgd};
use crate::refusal::{Reason, Refusal};

/// A table of rows. A row has an id, `dimension` values, and the optimizer's state for them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TableSpec {
    /// The table's name, as in the model.
    pub name: String,
    /// Values in each row.
    pub dimension: u32,
    /// Virtual buckets: the parts in which the table is placed on servers. Their number never changes.
    pub buckets: u32,
    /// The values of a new row.
    pub initializer: Initializer,
    /// The way in which gradients change a row.
    pub optimizer: RowOptimizer,
    /// The seed of new rows' values.
    pub seed: u64,
    /// The condition on which an id gets a row.
    #[serde(default)]
    pub admission: Admission,
    /// The rows that are evicted.
    #[serde(default)]
    pub eviction: Eviction,
}

/// The condition on which an id gets a row. An id without a row costs no memory: its gradients are dropped, and it reads as
/// zeros.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Admission {
    /// Each id, by its first gradient. Before that it reads as its initial values.
    #[default]
    All,
    /// An id that has had a number of gradients, this one included. A sketch counts them, which may count too many.
    Sights {
        /// The number of gradients, at most 255.
        count: u8,
        /// Counters in each row of a bucket's sketch. It has four rows, a byte for each counter.
        width: u32,
    },
    /// An id that is drawn with a probability, anew at each gradient.
    Chance {
        /// The probability, above 0 and at most 1.
        probability: f32,
    },
}

/// The rows that are evicted. Rows are evicted after updates. Unless an age is in seconds, what is kept in the bucket decides
/// alone, so that a run that is restored evicts the same rows again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Eviction {
    /// Evicts rows without an update for so long.
    pub age: Option<Age>,
    /// Evicts rows of a full table.
    pub capacity: Option<Capacity>,
    /// Evicts rows in which each value is smaller than this, after their first 16 updates.
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
    /// Seconds. What is removed then depends on the clock of the server.
    Seconds(u32),
}

/// The most rows of a table. Each bucket has the same part of them. A full bucket evicts a sixteenth of its part, so that it is
/// not full again at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Capacity {
    /// Rows of the whole table.
    pub rows: u64,
    /// The rows that are evicted first.
    pub order: EvictionOrder,
}

/// The rows that a full bucket evicts first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EvictionOrder {
    /// Those whose last update is the longest ago.
    Oldest,
    /// Those with the fewest updates; of two with as many, the one whose last update is longer ago. Rows that
    /// were updated at the newest time come last.
    Rarest,
}

/// The values of a new row. They follow from the table's seed and name and the row's id alone, so that they do not depend on
/// the worker that uses a row first.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Initializer {
    /// All values are 0.
    Zeros,
    /// Each value is drawn evenly from `-limit` to `limit`.
    Uniform {
        /// The largest size of a value.
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

impl TableSpec {
    /// Checks that the settings are possible.
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
            Admission::Sights { count, width } => at_least_one("admission.sights.count", count.into())
                .or_else(|| at_least_one("admission.sights.width", width.into())),
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
            .or(initializer)
            .or(admission)
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

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> TableSpec {
        TableSpec {
            name: "item".to_owned(),
            dimension: 8,
            buckets: 16,
            initializer: Initializer::Zeros,
            optimizer: RowOptimizer::Sgd(Sgd::default()),
            seed: 0,
            admission: Admission::All,
            eviction: Eviction::default(),
        }
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
