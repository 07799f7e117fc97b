//! Embedding tables: rows of numbers, found by id.

use serde::{Deserialize, Serialize};

use crate::job::{Adagrad, Adam, Ftrl, Sgd};

/// A table of rows. A row has an id, `dimension` values, and the optimizer's state for them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
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
    /// Which ids get a row.
    #[serde(default)]
    pub admission: Admission,
    /// Which rows are removed.
    #[serde(default)]
    pub eviction: Eviction,
}

/// Which ids get a row. An id without a row costs no memory: its gradients are dropped, and it reads as zeros.
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

/// Which rows are removed. Rows are removed after updates alone, by what is kept in the bucket, so that a run that is
/// restored removes the same rows again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Eviction {
    /// Rows without an update for so long.
    pub age: Option<Age>,
    /// The table's most rows. Each bucket has the same part of them. A bucket with more removes a sixteenth of its part
    /// besides those beyond it.
    pub capacity: Option<Capacity>,
    /// Rows in which each value is smaller than this.
    pub below: Option<f32>,
    /// The number of updates of a bucket from one search for rows to remove by age and size to the next; 0 stands for 256.
    pub every: u32,
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

/// The most rows, and which are removed first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capacity {
    /// Rows of the whole table.
    pub rows: u64,
    /// The rows that are removed first.
    pub first: First,
}

/// The rows that are removed first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum First {
    /// Those whose last update is the longest ago.
    Oldest,
    /// Those with the fewest updates, but not those of the update that has filled the bucket; of two with as many, the one
    /// whose last update is longer ago.
    Rarest,
}

/// The values of a new row. They follow from the table's seed and name and the row's id alone, so that it does not matter
/// who uses a row first.
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
