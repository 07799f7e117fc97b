//! A training step: the values that it wants, and the gradients that it makes.

use std::sync::Arc;

use crate::ids::{Epoch, Version};
use crate::payload::Elements;

/// Values that are needed before a batch can be computed, or before an evaluation.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Want {
    /// All elements of all dense variables, to compute gradients with: outside sync mode, servers may answer with look-ahead weights.
    Dense,
    /// All elements of all dense variables, as they are.
    Stored,
    /// The moving averages of all dense variables; the values of those that have no average.
    Averages,
    /// Some rows of a table. A step wants at most one list of each table.
    Rows(Arc<WantedRows>),
}

impl Want {
    /// Returns the rows that are wanted, if these are rows.
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
    /// The table's number among the model's tables, sorted by name.
    pub table: usize,
    /// The ids, each once, in ascending order of their hash: the ids of a bucket are neighbours.
    pub ids: Vec<u64>,
}

/// A variable or a table of a model, each by its number among those of its kind, sorted by name.
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
    /// The first element: of a variable, among all its elements; of a table, among those of the rows that were asked for.
    pub start: usize,
    /// The values.
    pub values: Elements,
    /// The version of the block that they are from; `None` if they are from no server.
    pub version: Option<PartVersion>,
}

impl Part {
    /// Returns all values of a variable, or of all rows that were asked for. They are from no server.
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
    /// The epoch in which the version counts.
    pub epoch: Epoch,
    /// The number of updates that the block has taken.
    pub version: Version,
}

/// The values that every batch wants, whatever its samples are.
pub const EVERY_BATCH: &[Want] = &[Want::Dense];

/// The gradients of one step.
#[derive(Clone, Debug, PartialEq)]
pub struct Gradients {
    /// One entry for each variable, in the order of their numbers: all its elements. The entry of an averaged variable
    /// is its value before the step less that after it; the entry of a frozen one is empty.
    pub values: Vec<Elements>,
    /// The gradients of rows: one entry for each table, in the order of their numbers.
    pub rows: Vec<RowGradients>,
    /// The global norm of the gradients of rows and trained variables, before they were clipped. None of their elements
    /// is larger, so if the norm fits into the numbers on the wire, they need no check. It is finite only if each of
    /// their elements is.
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
