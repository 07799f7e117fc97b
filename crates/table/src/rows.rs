//! The rows of a bucket and the index that finds them.
//!
//! A row is an id, a history if the table evicts rows, values and optimizer state, back to back. Rows and index grow a
//! piece at a time: a full chunk of rows is never moved, and a part of the index that grows is a small share of the
//! bucket.
//!
//! `rows/spilled` has the rows on disk: the least recently used ones, which do not fit into the server's memory.

mod layout;
mod shared;
mod spilled;

use std::hint::black_box;
use std::io;
use std::sync::Arc;

use optimizer::row::{self, ChangedRows, Row, RowRates};
use shared_proto::hash::mix;
use shared_proto::kernel::Kernel;
use shared_proto::payload::LeF32;
use shared_proto::table::{Admission, RowOptimizer, Storage, TableSpec};

use crate::chunks::Chunks;
use crate::disk::{Disk, RowFile};
use crate::index::{BLOCK, Index, Key};
use crate::initial::NewRows;
use crate::storage;

use layout::{ID, Layout, id_of};
use spilled::Spilled;

pub use crate::chunks::Place;
pub use shared::{SharedRow, SharedRows};

/// The updates of a row, by which it may be evicted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct History {
    /// The time of the last update.
    pub last: u32,
    /// The number of updates, at most `u32::MAX`.
    pub updates: u32,
}

/// The rows of a bucket.
#[derive(Debug)]
pub struct Rows {
    layout: Layout,
    /// The number of the table's buckets.
    buckets: u32,
    optimizer: RowOptimizer,
    new_rows: NewRows,
    /// True if an id without a row reads as its initial values, false if as zeros.
    reads_initial: bool,
    index: Index,
    chunks: Chunks,
    /// The rows on disk; `None` if all rows stay in memory.
    spilled: Option<Spilled>,
    /// A row may be evicted if all of its values are smaller than this; `None` if the table does not evict rows for
    /// that.
    below: Option<f32>,
}

/// The data of a row by which it may be evicted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Aged {
    pub(crate) id: u64,
    pub(crate) history: History,
    /// True if all values are below the table's threshold.
    pub(crate) is_small: bool,
}

impl Rows {
    /// Returns the rows of an empty bucket. They have a history if the table evicts rows.
    pub fn new(spec: &TableSpec) -> Self {
        let layout = Layout::new(spec);
        Self {
            layout,
            buckets: spec.buckets,
            optimizer: spec.optimizer.clone(),
            new_rows: NewRows::new(spec),
            reads_initial: spec.admission == Admission::All,
            index: Index::new(),
            chunks: Chunks::new(layout.stride()),
            spilled: None,
            below: spec.eviction.below,
        }
    }

    /// Keeps rows in this file that do not fit into the server's memory. There must not be any rows yet.
    pub(crate) fn spill_to(&mut self, file: Arc<RowFile>) {
        self.spilled = Some(Spilled::new(file));
    }

    /// Returns a file for rows of a table.
    pub fn file(spec: &TableSpec, disk: &Arc<Disk>) -> Arc<RowFile> {
        disk.file(Layout::new(spec).stride())
    }

    /// Returns the number of rows.
    pub fn len(&self) -> usize {
        self.chunks.count() + self.on_disk()
    }

    /// Returns whether there is no place for another row: a place is a number of 32 bits.
    pub fn is_full(&self) -> bool {
        self.chunks.is_full()
    }

    /// Returns whether there is no row.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of bytes of memory that rows and index occupy.
    pub fn bytes(&self) -> usize {
        let spilled = self.spilled.as_ref().map_or(0, Spilled::bytes);
        self.chunks.bytes() + self.index.bytes() + spilled
    }

    /// Finds the rows of ids. Writes a place for each id to `places`, or [`Place::NONE`] for an id without a row. A
    /// place on disk may be that of another row, which [`Self::bring_back`] finds out.
    pub fn find(&self, ids: &[u64], places: &mut Vec<Place>) {
        places.clear();
        places.resize(ids.len(), Place::NONE);
        let mut keys = [Key::default(); BLOCK];
        for (ids, places) in ids.chunks(BLOCK).zip(places.chunks_mut(BLOCK)) {
            let keys = &mut keys[..ids.len()];
            for (key, id) in keys.iter_mut().zip(ids) {
                *key = Key::new(*id, self.buckets);
            }
            self.index.guess(keys, places);
            fetch(&self.chunks, places);
            for ((place, id), key) in places.iter_mut().zip(ids).zip(keys) {
                if *place == Place::NONE || !self.may_be(*place, *id) {
                    *place = self.search(*id, *key);
                }
            }
        }
    }

    /// Returns the place of an id's row in memory, or [`Place::NONE`] if there is none.
    pub(crate) fn place(&self, id: u64) -> Place {
        let is_row = |place: Place| place.is_in_memory() && self.id(place) == id;
        let found = self.index.find(Key::new(id, self.buckets), is_row);
        found.unwrap_or(Place::NONE)
    }

    fn search(&self, id: u64, key: Key) -> Place {
        let found = self.index.find(key, |place| self.may_be(place, id));
        found.unwrap_or(Place::NONE)
    }

    /// Returns whether the row at a place may be that of an id. The place is in an entry of the id's key. For a place
    /// on disk, only a read shows which row is there.
    #[inline(always)]
    fn may_be(&self, place: Place, id: u64) -> bool {
        !place.is_in_memory() || self.id(place) == id
    }

    /// Returns the place of an id's row in memory. Creates the row if the id has none. The row must not be on disk.
    pub fn create(&mut self, id: u64) -> Place {
        let place = self.place(id);
        if place != Place::NONE {
            return place;
        }
        let place = self.insert(id);
        let Layout {
            storage, dimension, ..
        } = self.layout;
        let (values, state) = self.layout.split_mut(self.chunks.row_mut(place));
        if storage == Storage::F32 {
            self.new_rows.write(id, bytemuck::cast_slice_mut(values));
        } else {
            let mut initial = vec![0.0; dimension];
            self.new_rows.write(id, &mut initial);
            storage::pack(storage, &initial, values);
        }
        row::initialize(&self.optimizer, bytemuck::cast_slice_mut(state));
        place
    }

    /// Returns whether rows have a history.
    pub fn has_history(&self) -> bool {
        self.layout.has_history
    }

    /// Returns the number of values of a row, plus the number of elements of its optimizer state.
    pub fn numbers_of_row(&self) -> usize {
        self.layout.dimension + self.layout.state
    }

    /// Returns whether the values among a row's numbers are finite in the form in which the table stores them.
    pub(crate) fn fits(&self, numbers: &[f32]) -> bool {
        let of_values = numbers.get(..self.layout.dimension);
        of_values.is_some_and(|values| storage::all_fit(self.layout.storage, values))
    }

    /// Adds a row with this history, and with the values and the optimizer state in `numbers`. Returns false and
    /// changes nothing if the id has a row already.
    ///
    /// # Errors
    /// If a row on disk cannot be read.
    ///
    /// # Panics
    /// If `numbers` does not have the length of a row of this table.
    pub fn restore(&mut self, id: u64, history: History, numbers: &[f32]) -> io::Result<bool> {
        let mut place = [self.search(id, Key::new(id, self.buckets))];
        self.bring_back(&[id], &mut place)?;
        if place != [Place::NONE] {
            return Ok(false);
        }
        let place = self.insert(id);
        self.set_history(place, history);
        let (values, state) = self.layout.split_mut(self.chunks.row_mut(place));
        let (of_values, of_state) = numbers.split_at(self.layout.dimension);
        storage::pack(self.layout.storage, of_values, values);
        state.copy_from_slice(bytemuck::cast_slice(of_state));
        Ok(true)
    }

    /// Adds a row for an id that has none. The caller must write values and state.
    fn insert(&mut self, id: u64) -> Place {
        let place = self.chunks.add();
        let words = self.chunks.row_mut(place);
        words[0] = id as u32;
        words[1] = (id >> 32) as u32;
        self.set_history(place, History::default());
        self.index.insert(Key::new(id, self.buckets), place);
        place
    }

    /// Removes the row of an id. Returns whether it was there.
    pub fn remove(&mut self, id: u64) -> bool {
        let (chunks, spilled) = (&self.chunks, &mut self.spilled);
        let is_row = |place: Place| match place.record() {
            None => id_of(chunks.row(place)) == id,
            Some((record, _)) => spilled.as_ref().is_some_and(|of| of.is_known(record, id)),
        };
        let removed = self.index.remove(Key::new(id, self.buckets), is_row);
        if let Some(place) = removed {
            match (place.record(), spilled) {
                (Some((record, _)), Some(spilled)) => spilled.release_later(record),
                _ => self.chunks.remove(place),
            }
        }
        removed.is_some()
    }

    /// Gives the memory of removed rows back, if they were many. Returns whether rows have moved to other places.
    pub(crate) fn shrink(&mut self) -> bool {
        let (index, buckets) = (&mut self.index, self.buckets);
        let mut has_moved = false;
        self.chunks.shrink(|words, from, to| {
            has_moved = true;
            index.replace(Key::new(id_of(words), buckets), from, to);
        });
        has_moved
    }

    #[inline(always)]
    fn id(&self, place: Place) -> u64 {
        id_of(self.chunks.row(place))
    }

    /// Returns the values of the row at a place.
    pub fn values(&self, place: Place) -> Vec<f32> {
        let mut values = Vec::with_capacity(self.layout.dimension);
        self.layout.read(self.chunks.row(place), &mut values);
        values
    }

    /// Returns the history of the row at a place; `None` if rows have no history.
    pub fn history(&self, place: Place) -> Option<History> {
        let words = self.chunks.row(place);
        let has_history = self.layout.has_history;
        has_history.then(|| self.layout.history(words))
    }

    /// Sets the history of the row at a place, if rows have a history.
    fn set_history(&mut self, place: Place, history: History) {
        if self.layout.has_history {
            let words = self.chunks.row_mut(place);
            words[ID] = history.last;
            words[ID + 1] = history.updates;
        }
    }

    /// Records an update of rows in their histories.
    pub fn note_update(&mut self, places: &[Place], now: u32) {
        if !self.layout.has_history {
            return;
        }
        for place in places {
            if let Some(history) = self.history(*place) {
                let updates = history.updates.saturating_add(1);
                self.set_history(*place, History { last: now, updates });
            }
        }
    }

    /// Appends the values of rows. An id without a row reads as its initial values if all ids get rows, and as zeros
    /// otherwise.
    pub fn read(&self, ids: &[u64], places: &[Place], values: &mut Vec<f32>) {
        values.reserve(ids.len() * self.layout.dimension);
        for (id, place) in ids.iter().zip(places) {
            if *place != Place::NONE {
                self.layout.read(self.chunks.row(*place), values);
                continue;
            }
            let start = values.len();
            values.resize(start + self.layout.dimension, 0.0);
            if self.reads_initial {
                self.write_initial(*id, &mut values[start..]);
            }
        }
    }

    /// Writes the values that a new row of an id has.
    fn write_initial(&self, id: u64, values: &mut [f32]) {
        self.new_rows.write(id, values);
        if self.layout.storage != Storage::F32 {
            let mut words = vec![0; self.layout.value_words()];
            storage::pack(self.layout.storage, values, &mut words);
            storage::unpack(self.layout.storage, &words, values);
        }
    }

    /// Applies the gradients of rows, one after the other, at their learning rates. Drops a gradient without a place.
    /// Returns whether all changed values and states are finite. Values of 16 bits are rounded up or down at random,
    /// depending on `draw` and the row's id.
    ///
    /// # Panics
    /// If there is not one gradient for each place, or if `factors` is neither empty nor has one factor for each place.
    pub fn update(
        &mut self,
        places: &[Place],
        gradients: &[LeF32],
        RowRates { rate, factors }: RowRates<'_>,
        draw: u64,
    ) -> bool {
        assert_eq!(gradients.len(), places.len() * self.layout.dimension);
        assert!(factors.is_empty() || factors.len() == places.len());
        let mut changed = Changed {
            layout: self.layout,
            chunks: &mut self.chunks,
            places,
            gradients,
            factors,
            draw,
            finite: true,
        };
        row::update(&self.optimizer, rate, Kernel::best(), &mut changed);
        changed.finite
    }

    /// Returns the data of each row by which it may be evicted, in no order.
    pub(crate) fn aged(&self) -> impl Iterator<Item = Aged> {
        let aged = |place: Place| match place.record() {
            None => Some(self.aged_in_memory(place)),
            Some((record, _)) => self.spilled.as_ref()?.known(record),
        };
        self.index.places().filter_map(aged)
    }

    fn aged_in_memory(&self, place: Place) -> Aged {
        let row = self.chunks.row(place);
        let is_small = |below: f32| self.layout.is_small(row, below);
        Aged {
            id: id_of(row),
            history: self.history(place).unwrap_or_default(),
            is_small: self.below.is_some_and(is_small),
        }
    }

    /// Returns the place and the id of each row in memory, in no order.
    pub fn places(&self) -> impl Iterator<Item = (Place, u64)> {
        let places = self.index.places().filter(|place| place.is_in_memory());
        places.map(|place| (place, self.id(place)))
    }

    /// Returns the rows as they are now. They are shared, not copied.
    pub fn share(&mut self) -> SharedRows {
        let spilled = self.spilled.as_mut();
        let spilled = spilled.and_then(|spilled| spilled.share(&mut self.index));
        SharedRows::new(self.layout, self.chunks.share(), spilled)
    }
}

/// The number of rows that an update reads before it changes the first of them. They may have left the caches since
/// their ids were found.
const FETCHED: usize = 32;

/// Reads the first and the last word of each row, so that the CPU waits for the memory of many rows at once.
#[inline(always)]
fn fetch(chunks: &Chunks, places: &[Place]) {
    let mut read = 0;
    for place in places {
        if place.is_in_memory() {
            let words = chunks.row(*place);
            read ^= words[0] ^ words[words.len() - 1];
        }
    }
    black_box(read);
}

/// Rows of an update.
struct Changed<'a> {
    layout: Layout,
    chunks: &'a mut Chunks,
    places: &'a [Place],
    gradients: &'a [LeF32],
    /// Empty if all are 1.
    factors: &'a [f32],
    /// Together with a row's id, the seed of stochastic rounding.
    draw: u64,
    /// True while all changed numbers are finite.
    finite: bool,
}

impl ChangedRows for Changed<'_> {
    #[inline(always)]
    fn each(&mut self, mut change: impl FnMut(Row)) {
        let Layout {
            dimension, storage, ..
        } = self.layout;
        let gradients = self.gradients.chunks_exact(dimension);
        let mut largest = 0;
        let mut unpacked = vec![0.0; dimension];
        for (number, (place, gradient)) in self.places.iter().zip(gradients).enumerate() {
            if number.is_multiple_of(FETCHED) {
                let next = &self.places[number..];
                fetch(self.chunks, &next[..next.len().min(FETCHED)]);
            }
            if *place == Place::NONE {
                continue;
            }
            let factor = self.factors.get(number).copied().unwrap_or(1.0);
            let row = self.chunks.row_mut(*place);
            let id = id_of(row);
            let (values, state) = self.layout.split_mut(row);
            if storage == Storage::F32 {
                change(Row {
                    values: bytemuck::cast_slice_mut(values),
                    state: bytemuck::cast_slice_mut(state),
                    gradient,
                    factor,
                });
                let sizes = values.iter().map(|word| word & 0x7fff_ffff);
                largest = sizes.fold(largest, u32::max);
            } else {
                storage::unpack(storage, values, &mut unpacked);
                change(Row {
                    values: &mut unpacked,
                    state: bytemuck::cast_slice_mut(state),
                    gradient,
                    factor,
                });
                let draw = mix(id ^ self.draw);
                self.finite &= storage::pack_by_chance(storage, &unpacked, values, draw);
            }
            let sizes = state.iter().map(|word| word & 0x7fff_ffff);
            largest = sizes.fold(largest, u32::max);
        }
        self.finite &= largest < f32::INFINITY.to_bits();
    }
}
