//! The rows of a bucket and the index that finds them.
//!
//! A row is an id, a history if the table evicts rows by it, values and optimizer state, back to back. Rows and index grow a piece at
//! a time: a full chunk of rows is never moved, and a part of the index that grows is a small share of the bucket.

use std::collections::HashSet;
use std::hint::black_box;

use optimizer::row::{self, ChangedRows, Row};
use shared_proto::kernel::Kernel;
use shared_proto::payload::LeF32;
use shared_proto::table::{Admission, Eviction, RowOptimizer, TableSpec};

use crate::chunks::{Chunks, SharedChunks};
use crate::index::{BLOCK, Index, Key};
use crate::initial::NewRows;

pub use crate::chunks::Place;

/// The words of a row.
#[derive(Clone, Copy, Debug)]
struct Layout {
    dimension: usize,
    /// True if the row has the time of its last update and the number of its updates, a word each.
    has_history: bool,
    /// Words of optimizer state.
    state: usize,
}

/// Words of an id.
const ID: usize = 2;

impl Layout {
    fn head(self) -> usize {
        ID + 2 * usize::from(self.has_history)
    }

    fn stride(self) -> usize {
        self.head() + self.dimension + self.state
    }
}

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
    /// The places of removed rows.
    free: Vec<Place>,
    /// The number of rows.
    count: usize,
}

impl Rows {
    /// Returns a bucket without rows. Its rows have a history if the table removes rows by it.
    pub fn new(spec: &TableSpec) -> Self {
        let dimension = spec.dimension as usize;
        let layout = Layout {
            dimension,
            has_history: spec.eviction != Eviction::default(),
            state: row::state_len(&spec.optimizer, dimension),
        };
        Self {
            layout,
            buckets: spec.buckets,
            optimizer: spec.optimizer.clone(),
            new_rows: NewRows::of(spec),
            reads_initial: spec.admission == Admission::All,
            index: Index::new(),
            chunks: Chunks::new(layout.stride()),
            free: Vec::new(),
            count: 0,
        }
    }

    /// Returns the number of rows.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Returns whether there is no place for another row: a place is a number of 32 bits.
    pub fn is_full(&self) -> bool {
        self.free.is_empty() && self.chunks.is_full()
    }

    /// Returns whether there is no row.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Returns the bytes that rows and index occupy.
    pub fn bytes(&self) -> usize {
        self.chunks.bytes() + self.index.bytes() + self.free.capacity() * size_of::<Place>()
    }

    /// Finds the rows of ids. `places` gets a place for each, [`Place::NONE`] for one without a row.
    pub fn find(&self, ids: &[u64], places: &mut Vec<Place>) {
        places.clear();
        places.resize(ids.len(), Place::NONE);
        let mut keys = [Key::default(); BLOCK];
        for (ids, places) in ids.chunks(BLOCK).zip(places.chunks_mut(BLOCK)) {
            let keys = &mut keys[..ids.len()];
            for (key, id) in keys.iter_mut().zip(ids) {
                *key = Key::of(*id, self.buckets);
            }
            self.index.guess(keys, places);
            self.fetch(places);
            for ((place, id), key) in places.iter_mut().zip(ids).zip(keys) {
                if *place == Place::NONE || self.id(*place) != *id {
                    *place = self.search(*id, *key);
                }
            }
        }
    }

    /// Reads the first and the last word of each row, so that the CPU waits for the memory of many rows at once.
    #[inline(always)]
    fn fetch(&self, places: &[Place]) {
        let mut read = 0;
        for place in places {
            if *place != Place::NONE {
                let words = self.chunks.row(*place);
                read ^= words[0] ^ words[words.len() - 1];
            }
        }
        black_box(read);
    }

    /// Returns the place of an id's row, [`Place::NONE`] without one.
    pub(crate) fn place(&self, id: u64) -> Place {
        self.search(id, Key::of(id, self.buckets))
    }

    fn search(&self, id: u64, key: Key) -> Place {
        let found = self.index.find(key, |place| self.id(place) == id);
        found.unwrap_or(Place::NONE)
    }

    /// Returns the place of a row. It is created unless it is there.
    pub fn create(&mut self, id: u64) -> Place {
        let place = self.place(id);
        if place != Place::NONE {
            return place;
        }
        let place = self.insert(id);
        let (dimension, head) = (self.layout.dimension, self.layout.head());
        let numbers = bytemuck::cast_slice_mut(&mut self.chunks.row_mut(place)[head..]);
        let (values, state) = numbers.split_at_mut(dimension);
        self.new_rows.write(id, values);
        row::initialize(&self.optimizer, state);
        place
    }

    /// Returns whether rows have a history.
    pub fn has_history(&self) -> bool {
        self.layout.has_history
    }

    /// Returns the values and the numbers of state of a row.
    pub fn numbers_of_row(&self) -> usize {
        self.layout.dimension + self.layout.state
    }

    /// Adds a row with this history and these values and state, as another bucket had it. Returns whether the id had none.
    ///
    /// # Panics
    /// If there are not as many numbers as in a row of this table.
    pub fn restore(&mut self, id: u64, history: History, numbers: &[f32]) -> bool {
        if self.place(id) != Place::NONE {
            return false;
        }
        let place = self.insert(id);
        self.set_history(place, history);
        let words = &mut self.chunks.row_mut(place)[self.layout.head()..];
        words.copy_from_slice(bytemuck::cast_slice(numbers));
        true
    }

    /// Adds a row, which is not there, with its id. The caller writes values and state.
    fn insert(&mut self, id: u64) -> Place {
        let place = self.free.pop().unwrap_or_else(|| self.chunks.add());
        self.count += 1;
        let words = self.chunks.row_mut(place);
        words[0] = id as u32;
        words[1] = (id >> 32) as u32;
        self.set_history(place, History::default());
        self.index.insert(Key::of(id, self.buckets), place);
        place
    }

    /// Removes the row of an id. Returns whether it was there.
    pub fn remove(&mut self, id: u64) -> bool {
        let chunks = &self.chunks;
        let is_row = |place| id_of(chunks.row(place)) == id;
        let removed = self.index.remove(Key::of(id, self.buckets), is_row);
        if let Some(place) = removed {
            self.free.push(place);
            self.count -= 1;
        }
        removed.is_some()
    }

    #[inline(always)]
    fn id(&self, place: Place) -> u64 {
        id_of(self.chunks.row(place))
    }

    /// Returns the values of the row at a place.
    #[inline]
    pub fn values(&self, place: Place) -> &[f32] {
        let words = &self.chunks.row(place)[self.layout.head()..][..self.layout.dimension];
        bytemuck::cast_slice(words)
    }

    /// Returns the history of the row at a place; none if rows have no history.
    pub fn history(&self, place: Place) -> Option<History> {
        let words = self.chunks.row(place);
        self.layout.has_history.then(|| History {
            last: words[ID],
            updates: words[ID + 1],
        })
    }

    /// Sets the history of the row at a place, if rows have a history.
    fn set_history(&mut self, place: Place, history: History) {
        if self.layout.has_history {
            let words = self.chunks.row_mut(place);
            words[ID] = history.last;
            words[ID + 1] = history.updates;
        }
    }

    /// Notes an update of rows in their histories.
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
                // Parts of a fixed length are copied faster.
                let (parts, rest) = self.values(*place).as_chunks::<8>();
                for part in parts {
                    values.extend_from_slice(part);
                }
                values.extend_from_slice(rest);
                continue;
            }
            let start = values.len();
            values.resize(start + self.layout.dimension, 0.0);
            if self.reads_initial {
                self.new_rows.write(*id, &mut values[start..]);
            }
        }
    }

    /// Applies the gradients of rows, one after the other, at a learning rate. A gradient without a place is dropped.
    /// Returns whether all values and states that it has changed are finite.
    ///
    /// # Panics
    /// If there are not as many gradients as places.
    pub fn update(&mut self, places: &[Place], gradients: &[LeF32], rate: f32) -> bool {
        assert_eq!(gradients.len(), places.len() * self.layout.dimension);
        let mut changed = Changed {
            layout: self.layout,
            chunks: &mut self.chunks,
            places,
            gradients,
            finite: true,
        };
        row::update(&self.optimizer, rate, Kernel::best(), &mut changed);
        changed.finite
    }

    /// Returns the place and the id of each row, in no order.
    pub fn places(&self) -> impl Iterator<Item = (Place, u64)> {
        let places = self.index.places();
        places.map(|place| (place, self.id(place)))
    }

    /// Returns the rows as they are now. They are shared, not copied.
    pub fn share(&mut self) -> SharedRows {
        SharedRows {
            layout: self.layout,
            chunks: self.chunks.share(),
            removed: self.free.iter().copied().collect(),
        }
    }
}

/// Returns the id in the words of a row.
#[inline(always)]
fn id_of(words: &[u32]) -> u64 {
    u64::from(words[0]) | u64::from(words[1]) << 32
}

/// The rows of a bucket at one moment.
#[derive(Clone, Debug)]
pub struct SharedRows {
    layout: Layout,
    chunks: SharedChunks,
    removed: HashSet<Place>,
}

/// A row of a bucket at one moment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SharedRow<'a> {
    /// The row's id.
    pub id: u64,
    /// Its history; zeros if rows have none.
    pub history: History,
    /// Its values, and its optimizer state behind them.
    pub numbers: &'a [f32],
    /// True if it has changed since the rows were shared before.
    pub changed: bool,
}

impl SharedRows {
    /// Returns whether rows have a history.
    pub fn has_history(&self) -> bool {
        self.layout.has_history
    }

    /// Returns the bytes of the rows.
    pub fn bytes(&self) -> usize {
        self.chunks.bytes()
    }

    /// Returns the number of rows.
    pub fn count(&self) -> usize {
        self.chunks.count() - self.removed.len()
    }

    /// Returns at least the number of rows that have changed since the rows were shared before. Removed ones may count.
    pub fn changed(&self) -> usize {
        self.chunks.changed()
    }

    /// Iterates over the rows.
    pub fn iter(&self) -> impl Iterator<Item = SharedRow<'_>> {
        let present = |(place, _, _): &(Place, _, _)| !self.removed.contains(place);
        self.chunks
            .rows()
            .filter(present)
            .map(|(_, words, changed)| SharedRow {
                id: id_of(words),
                history: match self.layout.has_history {
                    true => History {
                        last: words[ID],
                        updates: words[ID + 1],
                    },
                    false => History::default(),
                },
                numbers: bytemuck::cast_slice(&words[self.layout.head()..]),
                changed,
            })
    }
}

/// Rows of an update.
struct Changed<'a> {
    layout: Layout,
    chunks: &'a mut Chunks,
    places: &'a [Place],
    gradients: &'a [LeF32],
    /// True while all changed numbers are finite.
    finite: bool,
}

impl ChangedRows for Changed<'_> {
    #[inline(always)]
    fn each(&mut self, mut change: impl FnMut(Row)) {
        let Layout { dimension, .. } = self.layout;
        let head = self.layout.head();
        let gradients = self.gradients.chunks_exact(dimension);
        let mut largest = 0;
        for (place, gradient) in self.places.iter().zip(gradients) {
            if *place == Place::NONE {
                continue;
            }
            let words = &mut self.chunks.row_mut(*place)[head..];
            let (values, state) = bytemuck::cast_slice_mut(words).split_at_mut(dimension);
            change(Row {
                values,
                state,
                gradient,
            });
            let sizes = words.iter().map(|word| word & 0x7fff_ffff);
            largest = sizes.fold(largest, u32::max);
        }
        self.finite &= largest < f32::INFINITY.to_bits();
    }
}
