//! A piece of the data.

use serde::{Deserialize, Serialize};

/// A range of positions in a data epoch: from `start` to `end`, without `end`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Split {
    pub(crate) id: u64,
    #[serde(rename = "epoch")]
    pub(crate) data_epoch: u32,
    pub(crate) start: u64,
    pub(crate) end: u64,
}
