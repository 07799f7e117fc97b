//! The layout of the words of a row.

use optimizer::row;
use shared_proto::table::{Eviction, Storage, TableSpec};

use super::History;
use crate::storage;

/// The layout of the words of a row.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    pub(super) dimension: usize,
    pub(super) storage: Storage,
    /// True if the row has the time of its last update and the number of its updates, a word each.
    pub(super) has_history: bool,
    /// The number of words of optimizer state.
    pub(super) state: usize,
}

/// The number of words of an id.
pub(super) const ID: usize = 2;

impl Layout {
    pub(super) fn new(spec: &TableSpec) -> Self {
        let dimension = spec.dimension as usize;
        Self {
            dimension,
            storage: spec.storage,
            has_history: spec.eviction != Eviction::default(),
            state: row::state_len(&spec.optimizer, dimension),
        }
    }

    pub(super) fn head(self) -> usize {
        ID + 2 * usize::from(self.has_history)
    }

    pub(super) fn stride(self) -> usize {
        self.head() + self.value_words() + self.state
    }

    /// Returns the number of words of a row's values.
    pub(super) fn value_words(self) -> usize {
        storage::words(self.storage, self.dimension)
    }

    /// Returns the words of a row that hold its values, and those that hold its optimizer state.
    #[inline(always)]
    pub(super) fn split(self, row: &[u32]) -> (&[u32], &[u32]) {
        row[self.head()..].split_at(self.value_words())
    }

    #[inline(always)]
    pub(super) fn split_mut(self, row: &mut [u32]) -> (&mut [u32], &mut [u32]) {
        row[self.head()..].split_at_mut(self.value_words())
    }

    /// Returns whether all values of a row are smaller than `below`.
    pub(super) fn is_small(self, row: &[u32], below: f32) -> bool {
        let (words, _) = self.split(row);
        let small = |value: &f32| value.abs() < below;
        if self.storage == Storage::F32 {
            return bytemuck::cast_slice(words).iter().all(small);
        }
        let mut values = vec![0.0; self.dimension];
        storage::unpack(self.storage, words, &mut values);
        values.iter().all(small)
    }

    /// Appends the values of a row.
    #[inline(always)]
    pub(super) fn read(self, row: &[u32], values: &mut Vec<f32>) {
        let (words, _) = self.split(row);
        if self.storage == Storage::F32 {
            // Parts of a fixed length are copied faster.
            let (parts, rest) = bytemuck::cast_slice::<u32, f32>(words).as_chunks::<8>();
            for part in parts {
                values.extend_from_slice(part);
            }
            return values.extend_from_slice(rest);
        }
        let start = values.len();
        values.resize(start + self.dimension, 0.0);
        storage::unpack(self.storage, words, &mut values[start..]);
    }

    /// Returns the history in the words of a row; zeros if rows have none.
    pub(super) fn history(self, words: &[u32]) -> History {
        match self.has_history {
            true => History {
                last: words[ID],
                updates: words[ID + 1],
            },
            false => History::default(),
        }
    }
}

/// Returns the id in the words of a row.
#[inline(always)]
pub(super) fn id_of(words: &[u32]) -> u64 {
    u64::from(words[0]) | u64::from(words[1]) << 32
}
