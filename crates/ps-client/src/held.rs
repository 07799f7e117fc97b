//! The values of blocks that a worker's model has.

use shared_proto::wire;

/// The kinds of values that a block has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ValuesOf {
    /// The weights as they are.
    Weights,
    /// Look-ahead weights: the weights that the momentum leads to by the time the gradient arrives.
    LookAhead,
    /// The moving averages.
    Averages,
}

/// The values of a block that a worker's model has: their version and their kind.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Held {
    pub(crate) version: wire::BlockVersion,
    pub(crate) values: ValuesOf,
}
