//! Memory for the rows of a bucket.

use std::sync::Arc;

/// Rows in a full chunk. After a snapshot, the first change of a row copies its chunk, so a chunk is small.
pub(crate) const CHUNK: usize = 128;

/// The place of a row in its bucket. It stays the same until the row is removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place(u32);

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
    chunks: Vec<Chunk>,
}

/// The words of up to [`CHUNK`] rows.
#[derive(Debug)]
struct Chunk {
    words: Words,
    /// The rows that have changed since the last snapshot: a bit for each.
    changed: [u64; CHUNK / 64],
}

#[derive(Debug)]
enum Words {
    Own(Vec<u32>),
    Shared(Arc<Vec<u32>>),
}

/// The rows of a bucket at one moment.
#[derive(Clone, Debug)]
pub(crate) struct SharedChunks {
    stride: usize,
    chunks: Vec<(Arc<Vec<u32>>, [u64; CHUNK / 64])>,
}

impl Chunks {
    /// Returns memory without rows. A row has `stride` words, at least one.
    pub(crate) fn new(stride: usize) -> Self {
        Self {
            stride,
            chunks: Vec::new(),
        }
    }

    /// Adds a row of zeros.
    pub(crate) fn add(&mut self) -> Place {
        let full = CHUNK * self.stride;
        let is_full = |chunk: &Chunk| chunk.words.as_slice().len() == full;
        if self.chunks.last().is_none_or(is_full) {
            self.chunks.push(Chunk {
                words: Words::Own(Vec::new()),
                changed: [0; CHUNK / 64],
            });
        }
        let number = self.chunks.len() - 1;
        let words = self.chunks[number].words.to_mut();
        let row = words.len() / self.stride;
        if words.len() == words.capacity() {
            // The memory at most doubles, so that a bucket of few rows stays small.
            let more = words.len().max(self.stride).min(full - words.len());
            words.reserve_exact(more);
        }
        words.resize(words.len() + self.stride, 0);
        Place((number * CHUNK + row) as u32)
    }

    /// Returns the words of a row.
    #[inline(always)]
    pub(crate) fn row(&self, place: Place) -> &[u32] {
        let words = self.chunks[place.chunk()].words.as_slice();
        &words[place.row() * self.stride..][..self.stride]
    }

    /// Returns the words of a row that is to change.
    #[inline(always)]
    pub(crate) fn row_mut(&mut self, place: Place) -> &mut [u32] {
        let chunk = &mut self.chunks[place.chunk()];
        let row = place.row();
        chunk.changed[row / 64] |= 1 << (row % 64);
        &mut chunk.words.to_mut()[row * self.stride..][..self.stride]
    }

    /// Returns the bytes that the rows occupy.
    pub(crate) fn bytes(&self) -> usize {
        let of = |chunk: &Chunk| chunk.words.capacity() * size_of::<u32>() + size_of::<Chunk>();
        self.chunks.iter().map(of).sum()
    }

    /// Returns all rows as they are now, and which of them have changed since the last call. They are shared, not copied.
    pub(crate) fn share(&mut self) -> SharedChunks {
        let share = |chunk: &mut Chunk| (chunk.words.share(), std::mem::take(&mut chunk.changed));
        SharedChunks {
            stride: self.stride,
            chunks: self.chunks.iter_mut().map(share).collect(),
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
    fn to_mut(&mut self) -> &mut Vec<u32> {
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
        if let Self::Shared(words) = std::mem::replace(self, Self::Own(Vec::new())) {
            *self = Self::Own(Arc::unwrap_or_clone(words));
        }
    }

    fn share(&mut self) -> Arc<Vec<u32>> {
        let words = match std::mem::replace(self, Self::Own(Vec::new())) {
            Self::Own(words) => Arc::new(words),
            Self::Shared(words) => words,
        };
        *self = Self::Shared(Arc::clone(&words));
        words
    }

    fn capacity(&self) -> usize {
        match self {
            Self::Own(words) => words.capacity(),
            Self::Shared(words) => words.capacity(),
        }
    }
}

impl SharedChunks {
    /// Returns the bytes of the rows.
    pub(crate) fn bytes(&self) -> usize {
        let words: usize = self.chunks.iter().map(|(words, _)| words.len()).sum();
        words * size_of::<u32>()
    }

    /// Iterates over the rows, each with whether it has changed since the snapshot before.
    pub(crate) fn rows(&self) -> impl Iterator<Item = (Place, &[u32], bool)> {
        let chunks = self.chunks.iter().enumerate();
        chunks.flat_map(|(number, (words, changed))| {
            let rows = words.chunks_exact(self.stride).enumerate();
            rows.map(move |(row, words)| {
                let place = Place((number * CHUNK + row) as u32);
                (place, words, changed[row / 64] >> (row % 64) & 1 == 1)
            })
        })
    }
}
