//! A piece of the data.

use serde::{Deserialize, Serialize};

/// A piece of a data epoch's positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Split {
    pub(crate) id: u64,
    #[serde(rename = "epoch")]
    pub(crate) data_epoch: u32,
    pub(crate) start: u64,
    pub(crate) end: u64,
}
