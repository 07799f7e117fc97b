//! Rows of embedding tables, as they travel and as they are saved.
//!
//! - `hash`: the hash of an id, which decides its bucket
//! - `rows`: some rows of a bucket, as they travel
//!
//! A table's settings are part of the job's ([`crate::job`]).

pub mod hash;
mod rows;

use bytes::{Bytes, BytesMut};

pub use crate::job::{
    Admission, Age, Capacity, Eviction, EvictionOrder, Initializer, RowOptimizer, Storage,
    TableSpec,
};
pub use rows::{Rows, ids_of_bytes, ids_to_bytes, most_looked_up, read_ids};

/// A bucket in bytes, as checkpoints have it. All numbers are little-endian. Entry i of `ids`, `history` and `numbers`
/// is of the same row.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SavedRows {
    /// The ids, `u64`.
    pub ids: Bytes,
    /// For each row, the time of its last update and the number of its updates, `u32`; empty if the table evicts no
    /// rows.
    pub history: Bytes,
    /// For each row, its values, followed by its optimizer state, `f32`.
    pub numbers: Bytes,
    /// The counters of the sketch that counts gradients; empty if the table admits ids without a sketch.
    pub counts: Bytes,
    /// The number of updates that the bucket has taken.
    pub updates: u64,
    /// The time of the newest update.
    pub time: u32,
    /// Present if these are not all rows, but those that have changed since an earlier checkpoint.
    pub changes: Option<Changes>,
}

impl SavedRows {
    /// Returns the bucket with only the rows whose ids `is_kept` accepts.
    #[must_use]
    pub fn retained(&self, mut is_kept: impl FnMut(u64) -> bool) -> Self {
        let kept: Vec<bool> = ids_of_bytes(&self.ids)
            .into_iter()
            .map(&mut is_kept)
            .collect();
        let of = |bytes: &Bytes| {
            let width = bytes.len().checked_div(kept.len()).unwrap_or(0).max(1);
            let rows = bytes.chunks_exact(width).zip(&kept);
            let mut of = BytesMut::with_capacity(bytes.len());
            for (row, _) in rows.filter(|(_, kept)| **kept) {
                of.extend_from_slice(row);
            }
            of.freeze()
        };
        Self {
            ids: of(&self.ids),
            history: of(&self.history),
            numbers: of(&self.numbers),
            ..self.clone()
        }
    }
}

/// What the changed rows of a bucket build on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// The number of the earlier checkpoint that has the other rows.
    pub since: u64,
    /// The ids of the rows that were removed since, `u64`, little-endian.
    pub removed: Bytes,
}
