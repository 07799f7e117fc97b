//! Memory for the rows of a bucket.

use std::mem::take;
use std::sync::Arc;

/// The largest number of rows in a chunk. After a snapshot, the first change of a row copies its chunk, so a chunk is
/// small.
const CHUNK: usize = 128;

/// The place of a row in its bucket: in memory, or in the file of the table's rows on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place(pub(crate) u32);

/// Set in the place of a row on disk.
const ON_DISK: u32 = 1 << 31;

/// Set in the place of a row on disk that has changed since the last snapshot.
const CHANGED: u32 = 1 << 30;

impl Place {
    /// The place of a row that is not there.
    pub const NONE: Self = Self(u32::MAX);

    /// The most records that a file may have, so that a place can name each of them.
    pub(crate) const RECORDS: u32 = CHANGED - 1;

    /// Returns the place of a row on disk. The record must be below [`RECORDS`](Self::RECORDS).
    pub(crate) fn on_disk(record: u32, changed: bool) -> Self {
        Self(ON_DISK | record | if changed { CHANGED } else { 0 })
    }

    /// Returns whether this is the place of a row in memory.
    #[inline(always)]
    pub(crate) fn is_in_memory(self) -> bool {
        self.0 < ON_DISK
    }

    /// Returns the record of a row on disk, and whether the row has changed since the last snapshot.
    pub(crate) fn record(self) -> Option<(u32, bool)> {
        let on_disk = !self.is_in_memory() && self != Self::NONE;
        on_disk.then_some((self.0 & (CHANGED - 1), self.0 & CHANGED != 0))
    }

    fn chunk(self) -> usize {
        self.0 as usize / CHUNK
    }

    fn row(self) -> usize {
        self.0 as usize % CHUNK
    }
}

/// Rows of a fixed number of words, in chunks. A chunk that a snapshot shares is copied when a row of it changes; all
/// others change in place.
#[derive(Debug)]
pub(crate) struct Chunks {
    stride: usize,
    /// The number of rows in a full chunk.
    full: usize,
    chunks: Vec<Words>,
    /// The marks of each chunk. They are in a vector of their own, so that the entries of `chunks` are close together
    /// when rows are read.
    marks: Vec<Marks>,
    /// The number of rows in the last chunk, including removed rows.
    last: usize,
    /// The places of removed rows.
    free: Vec<Place>,
    /// The chunk at which the last search for rows that were not used has ended.
    hand: usize,
}

/// The state of the rows of a chunk.
#[derive(Clone, Copy, Debug, Default)]
struct Marks {
    /// The rows that were not removed.
    present: Bits,
    /// The rows that have changed since the last snapshot.
    changed: Bits,
    /// The rows that were changed or read from disk since the last search for unused rows came past them.
    used: Bits,
}

/// A bit for each row of a chunk.
#[derive(Clone, Copy, Debug, Default)]
struct Bits([u64; CHUNK / 64]);

impl Bits {
    #[inline(always)]
    fn set(&mut self, row: usize, on: bool) {
        let bit = 1 << (row % 64);
        match on {
            true => self.0[row / 64] |= bit,
            false => self.0[row / 64] &= !bit,
        }
    }

    fn get(&self, row: usize) -> bool {
        self.0[row / 64] >> (row % 64) & 1 == 1
    }

    fn count(&self) -> usize {
        self.0.iter().map(|bits| bits.count_ones() as usize).sum()
    }
}

#[derive(Debug)]
enum Words {
    Own(Box<[u32]>),
    // The box keeps its memory when the words are shared, and when they are no longer.
    Shared(Arc<Box<[u32]>>),
}

/// The rows of a bucket at one moment.
#[derive(Clone, Debug)]
pub(crate) struct SharedChunks {
    stride: usize,
    chunks: Vec<(Arc<Box<[u32]>>, Marks)>,
}

/// Returns the number of rows in a full chunk. Allocators have four sizes from one power of two to the next, and a
/// chunk nearly fills one of them.
fn full(stride: usize) -> usize {
    let most = CHUNK * stride * size_of::<u32>();
    let step = most.ilog2() - 2;
    (most >> step << step) / (stride * size_of::<u32>())
}

impl Chunks {
    /// Returns memory without rows. A row has `stride` words, at least one.
    pub(crate) fn new(stride: usize) -> Self {
        let full = full(stride);
        Self {
            stride,
            full,
            chunks: Vec::new(),
            marks: Vec::new(),
            last: full,
            free: Vec::new(),
            hand: 0,
        }
    }

    /// Returns whether there is no place for another row.
    pub(crate) fn is_full(&self) -> bool {
        let most = ON_DISK as usize / CHUNK;
        self.free.is_empty() && self.last == self.full && self.chunks.len() >= most
    }

    /// Returns the number of rows.
    pub(crate) fn count(&self) -> usize {
        let others = self.chunks.len().saturating_sub(1) * self.full;
        let last = if self.chunks.is_empty() { 0 } else { self.last };
        others + last - self.free.len()
    }

    /// Adds a row with arbitrary words. The chunks must not be full.
    pub(crate) fn add(&mut self) -> Place {
        let place = self.free.pop().unwrap_or_else(|| self.append());
        self.marks[place.chunk()].present.set(place.row(), true);
        place
    }

    fn append(&mut self) -> Place {
        if self.last == self.full {
            self.chunks.push(Words::default());
            self.marks.push(Marks::default());
            self.last = 0;
        }
        let number = self.chunks.len() - 1;
        let row = self.last;
        self.last += 1;
        let words = &mut self.chunks[number];
        if words.as_slice().len() == row * self.stride {
            // The memory at most doubles, so that a bucket of few rows stays small. All further chunks begin with theirs.
            let rows = match number {
                0 => (2 * row).clamp(1, self.full),
                _ => self.full,
            };
            words.grow(rows * self.stride);
        }
        Place((number * CHUNK + row) as u32)
    }

    /// Returns the words of a row.
    #[inline(always)]
    pub(crate) fn row(&self, place: Place) -> &[u32] {
        let words = self.chunks[place.chunk()].as_slice();
        &words[place.row() * self.stride..][..self.stride]
    }

    /// Returns the words of a row, to be changed. Marks the row as changed and used.
    #[inline(always)]
    pub(crate) fn row_mut(&mut self, place: Place) -> &mut [u32] {
        let (chunk, row) = (place.chunk(), place.row());
        let marks = &mut self.marks[chunk];
        marks.changed.set(row, true);
        marks.used.set(row, true);
        &mut self.chunks[chunk].as_mut()[row * self.stride..][..self.stride]
    }

    /// Returns whether a row has changed since the last snapshot.
    pub(crate) fn has_changed(&self, place: Place) -> bool {
        self.marks[place.chunk()].changed.get(place.row())
    }

    /// Marks a row as unchanged since the last snapshot.
    pub(crate) fn set_unchanged(&mut self, place: Place) {
        self.marks[place.chunk()].changed.set(place.row(), false);
    }

    /// Removes a row.
    pub(crate) fn remove(&mut self, place: Place) {
        let marks = &mut self.marks[place.chunk()];
        marks.present.set(place.row(), false);
        marks.changed.set(place.row(), false);
        marks.used.set(place.row(), false);
        self.free.push(place);
    }

    /// Returns approximately the `count` least recently used rows: those that were neither changed nor read from disk
    /// since the search came past them before (the clock algorithm: Corbató, A Paging Experiment with the Multics
    /// System, 1968).
    pub(crate) fn least_used(&mut self, count: usize) -> Vec<Place> {
        let mut found = Vec::with_capacity(count);
        // The second round finds all rows that the first one has passed.
        for _ in 0..2 * self.chunks.len() {
            if found.len() >= count {
                break;
            }
            self.hand = (self.hand + 1) % self.chunks.len();
            let marks = &mut self.marks[self.hand];
            for row in 0..self.full {
                if !marks.present.get(row) || found.len() >= count {
                    continue;
                }
                let used = marks.used.get(row);
                if !used {
                    found.push(Place((self.hand * CHUNK + row) as u32));
                }
                // A row that is found is not found again in the second round.
                marks.used.set(row, !used);
            }
        }
        found
    }

    /// Gives memory back if many places are free: more than a sixteenth of the number of rows, plus [`CHUNK`]. Moves
    /// the rows of the last chunks to free places of other chunks. Calls `moved` with each row's words, its old place
    /// and its new place.
    pub(crate) fn shrink(&mut self, mut moved: impl FnMut(&[u32], Place, Place)) {
        if self.free.len() <= CHUNK + self.count() / 16 {
            return;
        }
        // The lowest are taken first.
        self.free.sort_unstable_by(|a, b| b.cmp(a));
        while let Some(chunk) = self.chunks.len().checked_sub(1) {
            let of_chunk = self.free.partition_point(|place| place.chunk() == chunk);
            let present = self.marks[chunk].present;
            if self.free.len() - of_chunk < present.count() {
                return;
            }
            self.free.drain(..of_chunk);
            for row in (0..self.last).filter(|row| present.get(*row)) {
                let Some(to) = self.free.pop() else {
                    return;
                };
                let from = Place((chunk * CHUNK + row) as u32);
                let words = self.row(from).to_vec();
                self.row_mut(to).copy_from_slice(&words);
                let Marks { changed, used, .. } = self.marks[chunk];
                let marks = &mut self.marks[to.chunk()];
                marks.present.set(to.row(), true);
                marks.changed.set(to.row(), changed.get(row));
                marks.used.set(to.row(), used.get(row));
                moved(&words, from, to);
            }
            self.chunks.pop();
            self.marks.pop();
            self.last = self.full;
        }
    }

    /// Returns the number of bytes that the rows occupy.
    pub(crate) fn bytes(&self) -> usize {
        // All chunks but the last have the same size.
        let others = self.chunks.len().saturating_sub(1) * self.full * self.stride;
        let last = self.chunks.last().map_or(0, |chunk| chunk.as_slice().len());
        (others + last) * size_of::<u32>()
            + self.chunks.capacity() * size_of::<Words>()
            + self.marks.capacity() * size_of::<Marks>()
            + self.free.capacity() * size_of::<Place>()
    }

    /// Returns the number of bytes that free places occupy.
    pub(crate) fn free_bytes(&self) -> usize {
        self.free.len() * self.stride * size_of::<u32>()
    }

    /// Returns all rows as they are now, and which of them have changed since the last call. They are shared, not
    /// copied.
    pub(crate) fn share(&mut self) -> SharedChunks {
        let chunks = self.chunks.iter_mut().zip(&mut self.marks);
        let share = |(words, marks): (&mut Words, &mut Marks)| {
            let shared = *marks;
            marks.changed = Bits::default();
            (words.share(), shared)
        };
        SharedChunks {
            stride: self.stride,
            chunks: chunks.map(share).collect(),
        }
    }
}

impl Words {
    #[inline(always)]
    fn as_slice(&self) -> &[u32] {
        match self {
            Self::Own(words) => words,
            Self::Shared(words) => words,
        }
    }

    #[inline(always)]
    fn as_mut(&mut self) -> &mut [u32] {
        if let Self::Shared(_) = self {
            self.own();
        }
        match self {
            Self::Own(words) => words,
            Self::Shared(_) => unreachable!("the words are this chunk's own"),
        }
    }

    /// Makes the words this chunk's own, by a copy if a snapshot still uses them.
    #[cold]
    fn own(&mut self) {
        if let Self::Shared(words) = take(self) {
            *self = Self::Own(Arc::unwrap_or_clone(words));
        }
    }

    /// Adds zeros up to this number of words.
    fn grow(&mut self, count: usize) {
        let mut words = Vec::with_capacity(count);
        words.extend_from_slice(self.as_slice());
        words.resize(count, 0);
        *self = Self::Own(words.into_boxed_slice());
    }

    fn share(&mut self) -> Arc<Box<[u32]>> {
        let words = match take(self) {
            Self::Own(words) => Arc::new(words),
            Self::Shared(words) => words,
        };
        *self = Self::Shared(Arc::clone(&words));
        words
    }
}

impl Default for Words {
    fn default() -> Self {
        Self::Own(Box::default())
    }
}

impl SharedChunks {
    /// Returns the number of bytes of the rows.
    pub(crate) fn bytes(&self) -> usize {
        let words: usize = self.chunks.iter().map(|(words, _)| words.len()).sum();
        words * size_of::<u32>()
    }

    /// Returns the number of rows.
    pub(crate) fn count(&self) -> usize {
        self.chunks
            .iter()
            .map(|(_, marks)| marks.present.count())
            .sum()
    }

    /// Returns the number of rows that have changed since the snapshot before.
    pub(crate) fn changed(&self) -> usize {
        self.chunks
            .iter()
            .map(|(_, marks)| marks.changed.count())
            .sum()
    }

    /// Iterates over the rows, each with whether it has changed since the snapshot before.
    pub(crate) fn rows(&self) -> impl Iterator<Item = (&[u32], bool)> {
        self.chunks.iter().flat_map(|(words, marks)| {
            let rows = words.chunks_exact(self.stride).enumerate();
            let present = rows.filter(|(row, _)| marks.present.get(*row));
            present.map(|(row, words)| (words, marks.changed.get(row)))
        })
    }
}
