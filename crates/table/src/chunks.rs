//! Memory for the rows of a bucket.

use std::mem::take;
use std::sync::Arc;

/// The largest number of rows in a chunk. After a snapshot, the first change of a row copies its chunk, so a chunk is small.
const CHUNK: usize = 128;

/// The place of a row in its bucket. It stays the same until the row is removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place(pub(crate) u32);

impl Place {
    /// The place of a row that is not there.
    pub const NONE: Self = Self(u32::MAX);

    fn chunk(self) -> usize {
        self.0 as usize / CHUNK
    }

    fn row(self) -> usize {
        self.0 as usize % CHUNK
    }
}

/// Rows of a fixed number of words, in chunks. A chunk that a snapshot shares is copied when a row of it changes; all others
/// change in place.
#[derive(Debug)]
pub(crate) struct Chunks {
    stride: usize,
    /// Rows in a full chunk.
    full: usize,
    chunks: Vec<Words>,
    /// The rows of each chunk that have changed since the last snapshot. They are apart from the chunks, so that those are
    /// close together when rows are read.
    changed: Vec<Bits>,
    /// Rows in the last chunk.
    last: usize,
}

/// A bit for each row of a chunk.
type Bits = [u64; CHUNK / 64];

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
    chunks: Vec<(Arc<Box<[u32]>>, Bits)>,
    /// Rows in the last chunk.
    last: usize,
}

/// Returns the number of rows in a full chunk. Allocators have four sizes from one power of two to the next, and a chunk
/// nearly fills one of them.
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
            changed: Vec::new(),
            last: full,
        }
    }

    /// Returns whether there is no place for another row.
    pub(crate) fn is_full(&self) -> bool {
        self.last == self.full && self.chunks.len() >= u32::MAX as usize / CHUNK
    }

    /// Adds a row of any words. The chunks are not full.
    pub(crate) fn add(&mut self) -> Place {
        if self.last == self.full {
            self.chunks.push(Words::default());
            self.changed.push(Bits::default());
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

    /// Returns the words of a row that is to change.
    #[inline(always)]
    pub(crate) fn row_mut(&mut self, place: Place) -> &mut [u32] {
        let (chunk, row) = (place.chunk(), place.row());
        self.changed[chunk][row / 64] |= 1 << (row % 64);
        &mut self.chunks[chunk].as_mut()[row * self.stride..][..self.stride]
    }

    /// Returns the bytes that the rows occupy.
    pub(crate) fn bytes(&self) -> usize {
        // All chunks but the last have the same size.
        let others = self.chunks.len().saturating_sub(1) * self.full * self.stride;
        let last = self.chunks.last().map_or(0, |chunk| chunk.as_slice().len());
        (others + last) * size_of::<u32>()
            + self.chunks.capacity() * size_of::<Words>()
            + self.changed.capacity() * size_of::<Bits>()
    }

    /// Returns all rows as they are now, and which of them have changed since the last call. They are shared, not copied.
    pub(crate) fn share(&mut self) -> SharedChunks {
        let chunks = self.chunks.iter_mut().zip(&mut self.changed);
        let share = |(words, changed): (&mut Words, &mut Bits)| (words.share(), take(changed));
        SharedChunks {
            stride: self.stride,
            chunks: chunks.map(share).collect(),
            last: self.last,
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
    /// Returns the bytes of the rows.
    pub(crate) fn bytes(&self) -> usize {
        let words: usize = self.chunks.iter().map(|(words, _)| words.len()).sum();
        words * size_of::<u32>()
    }

    /// Returns the number of rows.
    pub(crate) fn count(&self) -> usize {
        let others = self.chunks.len().saturating_sub(1) * full(self.stride);
        let last = if self.chunks.is_empty() { 0 } else { self.last };
        others + last
    }

    /// Returns the number of rows that have changed since the snapshot before.
    pub(crate) fn changed(&self) -> usize {
        let bits = self.chunks.iter().flat_map(|(_, changed)| changed);
        bits.map(|bits| bits.count_ones() as usize).sum()
    }

    /// Iterates over the rows, each with whether it has changed since the snapshot before.
    pub(crate) fn rows(&self) -> impl Iterator<Item = (Place, &[u32], bool)> {
        let full = full(self.stride);
        let chunks = self.chunks.iter().enumerate();
        chunks.flat_map(move |(number, (words, changed))| {
            let count = match number + 1 == self.chunks.len() {
                true => self.last,
                false => full,
            };
            let rows = words.chunks_exact(self.stride).take(count).enumerate();
            rows.map(move |(row, words)| {
                let place = Place((number * CHUNK + row) as u32);
                (place, words, changed[row / 64] >> (row % 64) & 1 == 1)
            })
        })
    }
}
