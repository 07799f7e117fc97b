//! What a worker's model holds of the blocks.

use shared_proto::wire;

/// Values that a block has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ValuesOf {
    /// The weights as they are.
    Weights,
    /// Look-ahead weights: those to which the momentum leads until the gradient arrives.
    LookAhead,
    /// The moving averages.
    Averages,
}

/// What a worker's model holds of a block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Held {
    pub(crate) version: wire::BlockVersion,
    pub(crate) values: ValuesOf,
}
