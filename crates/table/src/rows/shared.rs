//! The rows of a bucket at one moment, for a checkpoint.

use std::io;

use shared_proto::table::Storage;

use super::spilled::SharedSpilled;
use super::{History, Layout, id_of};
use crate::chunks::SharedChunks;

/// The rows of a bucket at one moment.
#[derive(Clone, Debug)]
pub struct SharedRows {
    layout: Layout,
    chunks: SharedChunks,
    /// The rows on disk; `None` if there are none.
    spilled: Option<SharedSpilled>,
}

/// A row of a bucket at one moment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SharedRow<'a> {
    /// The row's id.
    pub id: u64,
    /// The row's history; zeros if rows have none.
    pub history: History,
    /// The row's values, followed by its optimizer state.
    pub numbers: &'a [f32],
}

impl SharedRows {
    pub(super) fn new(
        layout: Layout,
        chunks: SharedChunks,
        spilled: Option<SharedSpilled>,
    ) -> Self {
        Self {
            layout,
            chunks,
            spilled,
        }
    }

    /// Returns whether rows have a history.
    pub fn has_history(&self) -> bool {
        self.layout.has_history
    }

    /// Returns the number of bytes of memory that the rows occupy.
    pub fn bytes(&self) -> usize {
        self.chunks.bytes()
    }

    /// Returns the number of bytes of a row.
    pub(crate) fn bytes_of_row(&self) -> usize {
        self.layout.stride() * size_of::<u32>()
    }

    /// Returns the number of rows.
    pub fn count(&self) -> usize {
        let spilled = self.spilled.as_ref();
        self.chunks.count() + spilled.map_or(0, |spilled| spilled.records().count())
    }

    /// Returns the number of rows that have changed since the rows were shared before.
    pub fn changed(&self) -> usize {
        let spilled = self.spilled.iter().flat_map(SharedSpilled::records);
        self.chunks.changed() + spilled.filter(|(_, changed)| *changed).count()
    }

    /// Calls `each` with each row. If `only_changed`, omits the rows that have not changed since the rows were shared
    /// before.
    ///
    /// # Errors
    /// If rows on disk cannot be read.
    pub fn visit(&self, only_changed: bool, mut each: impl FnMut(SharedRow<'_>)) -> io::Result<()> {
        let mut unpacked = Vec::new();
        let mut visit = |words: &[u32]| {
            let numbers = match self.layout.storage {
                Storage::F32 => bytemuck::cast_slice(&words[self.layout.head()..]),
                Storage::Bf16 | Storage::F16 => {
                    let (_, state) = self.layout.split(words);
                    unpacked.clear();
                    self.layout.read(words, &mut unpacked);
                    unpacked.extend_from_slice(bytemuck::cast_slice(state));
                    unpacked.as_slice()
                }
            };
            each(SharedRow {
                id: id_of(words),
                history: self.layout.history(words),
                numbers,
            });
        };
        for (words, changed) in self.chunks.rows() {
            if changed || !only_changed {
                visit(words);
            }
        }
        match &self.spilled {
            Some(spilled) => spilled.visit(only_changed, visit),
            None => Ok(()),
        }
    }
}
