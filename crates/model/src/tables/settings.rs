//! The settings of a table.

use shared_proto::job::{Adagrad, Adam, Ftrl, Sgd};
use shared_proto::table::{Admission, Eviction, Initializer, RowOptimizer, Storage, TableSpec};

/// The default number of buckets of a table.
const BUCKETS: u32 = 64;

/// The largest absolute value of an initial value, as in Keras' `Embedding`.
const LIMIT: f32 = 0.05;

/// The settings of an embedding table.
///
/// ```
/// # mod flambeau { pub use flambeau_model::tables::Table; }
/// # fn main() {
/// use flambeau::Table;
///
/// let items = Table::dim(16).row_adagrad(0.05).column("item_id").column("history");
/// # }
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Table {
    dimension: u32,
    buckets: u32,
    initializer: Initializer,
    optimizer: RowOptimizer,
    admission: Admission,
    eviction: Eviction,
    storage: Storage,
    pub(super) columns: Vec<String>,
    pub(super) separate: bool,
}

impl Table {
    /// Returns a table with rows of `dimension` values. By default, initial values are uniformly distributed between
    /// -0.05 and 0.05, and the optimizer is row-wise Adagrad with its default settings.
    pub fn dim(dimension: u32) -> Self {
        Self {
            dimension,
            buckets: BUCKETS,
            initializer: Initializer::Uniform { limit: LIMIT },
            optimizer: RowOptimizer::RowAdagrad(Adagrad::default()),
            admission: Admission::default(),
            eviction: Eviction::default(),
            storage: Storage::default(),
            columns: Vec::new(),
            separate: false,
        }
    }

    /// Adds an input column that holds ids of this table: whole numbers, one or several in each sample.
    /// Equal ids of two columns share a row.
    #[must_use]
    pub fn column(mut self, name: &str) -> Self {
        self.columns.push(name.to_owned());
        self
    }

    /// Gives equal ids of different columns different rows: the hash of an id and its column identifies the row.
    #[must_use]
    pub fn separate_columns(mut self) -> Self {
        self.separate = true;
        self
    }

    /// Sets stochastic gradient descent.
    #[must_use]
    pub fn sgd(self, learning_rate: f32) -> Self {
        self.optimizer(RowOptimizer::Sgd(Sgd {
            learning_rate,
            ..Sgd::default()
        }))
    }

    /// Sets Adagrad, with a sum of squares for each value.
    #[must_use]
    pub fn adagrad(self, learning_rate: f32) -> Self {
        self.optimizer(RowOptimizer::Adagrad(Adagrad {
            learning_rate,
            ..Adagrad::default()
        }))
    }

    /// Sets Adagrad, with a sum of squares for each row.
    #[must_use]
    pub fn row_adagrad(self, learning_rate: f32) -> Self {
        self.optimizer(RowOptimizer::RowAdagrad(Adagrad {
            learning_rate,
            ..Adagrad::default()
        }))
    }

    /// Sets Adam, with two means for each value.
    #[must_use]
    pub fn adam(self, learning_rate: f32) -> Self {
        self.optimizer(RowOptimizer::Adam(Adam {
            learning_rate,
            ..Adam::default()
        }))
    }

    /// Sets Adam, with a mean for each value and a mean square for each row.
    #[must_use]
    pub fn row_adam(self, learning_rate: f32) -> Self {
        self.optimizer(RowOptimizer::RowAdam(Adam {
            learning_rate,
            ..Adam::default()
        }))
    }

    /// Sets FTRL-Proximal.
    #[must_use]
    pub fn ftrl(self, settings: Ftrl) -> Self {
        self.optimizer(RowOptimizer::Ftrl(settings))
    }

    /// Sets the optimizer of the rows.
    #[must_use]
    pub fn optimizer(mut self, optimizer: RowOptimizer) -> Self {
        self.optimizer = optimizer;
        self
    }

    /// Sets the initial values of rows.
    #[must_use]
    pub fn initializer(mut self, initializer: Initializer) -> Self {
        self.initializer = initializer;
        self
    }

    /// Sets the condition under which an id gets a row.
    #[must_use]
    pub fn admission(mut self, admission: Admission) -> Self {
        self.admission = admission;
        self
    }

    /// Sets which rows are evicted.
    #[must_use]
    pub fn eviction(mut self, eviction: Eviction) -> Self {
        self.eviction = eviction;
        self
    }

    /// Sets the format of the values on servers. The default is `f32`.
    #[must_use]
    pub fn storage(mut self, storage: Storage) -> Self {
        self.storage = storage;
        self
    }

    /// Sets the number of buckets. The default is 64. Servers hold, lock and move whole buckets. The number never
    /// changes, so a table that will be spread over many servers needs many buckets.
    #[must_use]
    pub fn buckets(mut self, buckets: u32) -> Self {
        self.buckets = buckets;
        self
    }

    /// Returns the specification of the table, as servers have it.
    pub(super) fn spec(&self, name: &str, seed: u64) -> TableSpec {
        TableSpec {
            name: name.to_owned(),
            dimension: self.dimension,
            buckets: self.buckets,
            initializer: self.initializer,
            optimizer: self.optimizer.clone(),
            seed,
            admission: self.admission,
            eviction: self.eviction,
            storage: self.storage,
        }
    }
}
