//! The shape that all pictures of a data set get.

use serde::{Deserialize, Serialize};

/// The most pixels that a side of a picture can have, in a file or as `data.options.size`.
pub(crate) const MOST: u32 = 1 << 14;

/// The shape of all pictures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Shape {
    pub(crate) channels: usize,
    pub(crate) rows: u32,
    pub(crate) columns: u32,
}

impl Shape {
    /// Returns whether pictures can have this shape.
    pub(crate) fn is_possible(self) -> bool {
        let side = 1..=MOST;
        [1, 3].contains(&self.channels) && side.contains(&self.rows) && side.contains(&self.columns)
    }
}
