//! A training step: the values that it wants, and the gradients that it makes.

use crate::payload::Elements;

/// Values that are needed before a batch can be computed, or before an evaluation. Rows of tables will be another kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Want {
    /// All elements of all dense variables.
    Dense,
    /// The moving averages of all dense variables; the values of those that have no average.
    Averages,
}

/// The values that every batch wants, whatever its samples are.
pub const EVERY_BATCH: &[Want] = &[Want::Dense];

/// The gradients of one step.
#[derive(Clone, Debug, PartialEq)]
pub struct Gradients {
    /// One entry for each variable, in the order of their numbers: all its elements. The entry of an averaged variable
    /// is its value before the step less that after it; the entry of a frozen one is empty.
    pub values: Vec<Elements>,
    /// The global norm of the trained variables' gradients, before they were clipped. None of their elements is larger,
    /// so if the norm fits into the numbers on the wire, they need no check. It is finite only if each of their
    /// elements is.
    pub norm: f64,
}
