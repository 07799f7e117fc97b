//! A training step: the values that it wants, and the gradients that it makes.

use std::sync::Arc;

use crate::ids::{Epoch, Version};
use crate::payload::Elements;

/// Values that are needed before a batch can be computed, or before an evaluation.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Want {
    /// All elements of all dense variables, for computing gradients. Outside sync mode, servers may answer with
    /// look-ahead weights.
    Dense,
    /// All elements of all dense variables as they are stored, never look-ahead weights.
    Stored,
    /// The moving averages of all dense variables. A variable that has no average has its values instead.
    Averages,
    /// Some rows of a table. A step wants at most one list of each table.
    Rows(Arc<WantedRows>),
}

impl Want {
    /// Returns the wanted rows; `None` if dense variables are wanted.
    pub fn rows(&self) -> Option<&WantedRows> {
        match self {
            Self::Rows(rows) => Some(rows),
            Self::Dense | Self::Stored | Self::Averages => None,
        }
    }
}

/// Some rows of a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WantedRows {
    /// The table's index among the model's tables, sorted by name.
    pub table: usize,
    /// The ids, each once, in ascending order of their hash: the ids of a bucket are neighbours.
    pub ids: Vec<u64>,
}

/// A variable or a table of a model, by its index among the model's variables or tables, sorted by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PartOf {
    /// A dense variable.
    Variable(usize),
    /// A table.
    Table(usize),
}

/// Consecutive values to load into a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// The variable or the table.
    pub of: PartOf,
    /// The index of the first value among all elements of the variable, or among the elements of all requested rows of
    /// the table.
    pub start: usize,
    /// The values.
    pub values: Elements,
    /// The version of the block that the values are from; `None` if they are from no server.
    pub version: Option<PartVersion>,
}

impl Part {
    /// Returns all values of a variable, or of all requested rows, as one part that is from no server.
    pub fn whole(of: PartOf, values: Elements) -> Self {
        Self {
            of,
            start: 0,
            values,
            version: None,
        }
    }
}

/// The version of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartVersion {
    /// The epoch that the version belongs to.
    pub epoch: Epoch,
    /// The number of updates that the block has taken.
    pub version: Version,
}

/// The values that every batch wants, whatever its samples are.
pub const EVERY_BATCH: &[Want] = &[Want::Dense];

/// The gradients of one step.
#[derive(Clone, Debug, PartialEq)]
pub struct Gradients {
    /// The gradients of dense variables: entry i has all elements of variable i. The entry of an averaged variable is
    /// its value before the step less its value after the step; the entry of a frozen variable is empty.
    pub values: Vec<Elements>,
    /// The gradients of rows: entry i is for table i.
    pub rows: Vec<RowGradients>,
    /// The global norm of the gradients of rows and trained variables, before they were clipped. The norm is finite
    /// only if all their elements are. No element is larger than the norm, so if the norm fits into the type of numbers
    /// on the wire, the elements need no check.
    pub norm: f64,
}

impl Gradients {
    /// Returns the gradients of a step without samples.
    pub fn none() -> Self {
        Self {
            values: Vec::new(),
            rows: Vec::new(),
            norm: 0.0,
        }
    }
}

/// The gradients of some rows of a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowGradients {
    /// The rows.
    pub rows: Arc<WantedRows>,
    /// The gradients, row after row in the order of the ids.
    pub values: Elements,
}
