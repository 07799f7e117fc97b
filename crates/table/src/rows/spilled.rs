//! The rows of a bucket that are on disk.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;

use shared_proto::planted;
use shared_proto::quiet::Quiet;

use super::{Aged, Rows, id_of};
use crate::chunks::Place;
use crate::disk::{After, MemoryUse, RowFile};
use crate::index::{Index, Key};

/// The most rows that an update writes to disk beyond those that do not fit into memory, so that the next updates need
/// not write any.
const AHEAD: usize = 512;

/// The most rows that are written to disk at a time. Updates wait for the writing.
const MOST: usize = 8192;

/// Rows on disk.
#[derive(Debug)]
pub(super) struct Spilled {
    file: Arc<RowFile>,
    memory: MemoryUse,
    /// The number of rows.
    count: usize,
    /// The data by which rows on disk may be evicted, by record; empty if the table does not evict rows.
    known: HashMap<u32, Aged>,
    /// Each snapshot that may still read records has a clone.
    readers: Arc<()>,
    /// Records that were given up while a snapshot might read them.
    waiting: Vec<u32>,
    /// The number of rows that were ever read from disk.
    read: u64,
}

/// Rows on disk at one moment.
#[derive(Clone, Debug)]
pub(super) struct SharedSpilled {
    file: Arc<RowFile>,
    places: Arc<[Place]>,
    _reader: Arc<()>,
}

/// Where the row of an id is.
enum Found {
    Nowhere,
    InMemory(Place),
    OnDisk {
        place: Place,
        record: u32,
        changed: bool,
    },
}

impl Spilled {
    pub(super) fn new(file: Arc<RowFile>) -> Self {
        Self {
            memory: MemoryUse::new(&file),
            file,
            count: 0,
            known: HashMap::new(),
            readers: Arc::default(),
            waiting: Vec::new(),
            read: 0,
        }
    }

    /// Returns the number of bytes of memory that the data about rows on disk occupies.
    pub(super) fn bytes(&self) -> usize {
        // A byte of the map's table for each entry.
        self.known.capacity() * (size_of::<(u32, Aged)>() + 1)
            + self.waiting.capacity() * size_of::<u32>()
    }

    pub(super) fn known(&self, record: u32) -> Option<Aged> {
        self.known.get(&record).copied()
    }

    pub(super) fn is_known(&self, record: u32, id: u64) -> bool {
        self.known.get(&record).is_some_and(|row| row.id == id)
    }

    /// Gives up the record of a row. The record becomes free once no snapshot may still read it.
    pub(super) fn release_later(&mut self, record: u32) {
        self.count -= 1;
        self.known.remove(&record);
        self.waiting.push(record);
        if Arc::get_mut(&mut self.readers).is_some() {
            self.file.release(&self.waiting);
            self.waiting.clear();
        }
    }

    /// Returns the rows on disk as they are now, or `None` if there are none. From now on they count as unchanged.
    pub(super) fn share(&mut self, index: &mut Index) -> Option<SharedSpilled> {
        if self.count == 0 {
            return None;
        }
        let mut places = Vec::with_capacity(self.count);
        for place in index.places_mut() {
            if let Some((record, _)) = place.record() {
                places.push(*place);
                *place = Place::on_disk(record, false);
            }
        }
        places.sort_unstable_by_key(|place| place.record());
        Some(SharedSpilled {
            file: Arc::clone(&self.file),
            places: places.into(),
            _reader: Arc::clone(&self.readers),
        })
    }
}

impl SharedSpilled {
    /// Returns the records of the rows, each with whether its row has changed since the snapshot before.
    pub(super) fn records(&self) -> impl Iterator<Item = (u32, bool)> {
        self.places.iter().filter_map(|place| place.record())
    }

    /// Calls `each` with the words of each row. If `only_changed`, omits the rows that have not changed since the
    /// snapshot before.
    pub(super) fn visit(&self, only_changed: bool, each: impl FnMut(&[u32])) -> io::Result<()> {
        let wanted = self
            .records()
            .filter(|(_, changed)| *changed || !only_changed);
        let records: Vec<u32> = wanted.map(|(record, _)| record).collect();
        self.file.read_many(&records, each)
    }
}

impl Rows {
    /// Returns the number of rows on disk.
    pub fn on_disk(&self) -> usize {
        self.spilled.as_ref().map_or(0, |spilled| spilled.count)
    }

    /// Returns the number of rows that were ever read from disk.
    pub fn read_from_disk(&self) -> u64 {
        self.spilled.as_ref().map_or(0, |spilled| spilled.read)
    }

    /// Reads the rows of ids that are on disk into memory. `places` has the places that [`Self::find`] has found. Those
    /// on disk are replaced with the rows' new places in memory.
    ///
    /// # Errors
    /// If a row cannot be read. The row is then lost.
    pub fn bring_back(&mut self, ids: &[u64], places: &mut [Place]) -> io::Result<()> {
        if self.on_disk() == 0 {
            return Ok(());
        }
        let mut words = vec![0; self.layout.stride()];
        for (id, place) in ids.iter().zip(places) {
            if place.record().is_some() {
                *place = self.bring_one_back(*id, *place, &mut words)?;
            }
        }
        Ok(())
    }

    /// Reads the row of an id, which may be at the place `guess` on disk, into memory. Returns its place there, or
    /// [`Place::NONE`] if the id has no row. `words` is scratch memory.
    fn bring_one_back(&mut self, id: u64, guess: Place, words: &mut [u32]) -> io::Result<Place> {
        let (place, record, changed) = match self.read_one(id, guess, words)? {
            Found::Nowhere => return Ok(Place::NONE),
            Found::InMemory(place) => return Ok(place),
            Found::OnDisk {
                place,
                record,
                changed,
            } => (place, record, changed),
        };
        if self.chunks.is_full() {
            return Err(io::Error::other(
                "a bucket has as many rows in memory as it can have",
            ));
        }
        if let Some(spilled) = &mut self.spilled {
            spilled.read += 1;
            spilled.release_later(record);
        }
        let to = self.chunks.add();
        self.chunks.row_mut(to).copy_from_slice(words);
        if !changed {
            self.chunks.set_unchanged(to);
        }
        self.index.replace(Key::new(id, self.buckets), place, to);
        Ok(to)
    }

    /// Finds the row of an id, which may be at the place `guess` on disk. If the row is on disk, reads its words into
    /// `words`.
    fn read_one(&self, id: u64, guess: Place, words: &mut [u32]) -> io::Result<Found> {
        let Some(spilled) = &self.spilled else {
            return Ok(Found::Nowhere);
        };
        let mut failure = None;
        let mut is_row = |place: Place| match place.record() {
            None => id_of(self.chunks.row(place)) == id,
            Some((record, _)) => match spilled.file.read(record, words) {
                Ok(()) => id_of(words) == id,
                Err(error) => {
                    failure = Some(error);
                    false
                }
            },
        };
        let found = match is_row(guess) {
            true => Some(guess),
            // The keys of two ids are equal.
            false => self.index.find(Key::new(id, self.buckets), is_row),
        };
        match (failure, found) {
            (Some(error), _) => Err(error),
            (None, None) => Ok(Found::Nowhere),
            (None, Some(place)) => Ok(match place.record() {
                None => Found::InMemory(place),
                Some((record, changed)) => Found::OnDisk {
                    place,
                    record,
                    changed,
                },
            }),
        }
    }

    /// Appends the values of the rows of ids, and for each id whether it has a row. Ids may come in any order and more
    /// than once. Changes nothing: rows on disk stay there.
    ///
    /// # Errors
    /// If a row on disk cannot be read.
    pub fn look_up(
        &self,
        ids: &[u64],
        values: &mut Vec<f32>,
        present: &mut Vec<bool>,
    ) -> io::Result<()> {
        let mut places = Vec::new();
        self.find(ids, &mut places);
        let mut words = vec![0; self.layout.stride()];
        for (id, mut place) in ids.iter().zip(places) {
            let mut on_disk = false;
            if place.record().is_some() {
                match self.read_one(*id, place, &mut words)? {
                    Found::Nowhere => place = Place::NONE,
                    Found::InMemory(found) => place = found,
                    Found::OnDisk { .. } => on_disk = true,
                }
            }
            present.push(place != Place::NONE);
            if on_disk {
                self.layout.read(&words, values);
            } else {
                self.read(&[*id], &[place], values);
            }
        }
        Ok(())
    }

    /// Writes the least recently used rows to disk if the server has more rows in memory than it may have. Returns
    /// whether rows have left their places.
    pub(crate) fn spill(&mut self, after: After) -> bool {
        static LOG: Quiet = Quiet::new();
        let bytes = self.bytes() - self.chunks.free_bytes();
        let Some(spilled) = &mut self.spilled else {
            return false;
        };
        spilled.memory.set(bytes);
        let surplus = spilled.memory.surplus(after);
        if surplus == 0 {
            return false;
        }
        let stride = self.layout.stride();
        let rows = surplus.div_ceil(stride * size_of::<u32>());
        let rows = (rows + rows.min(AHEAD)).min(MOST);
        let places = self.chunks.least_used(rows);
        let mut words = Vec::with_capacity(places.len() * stride);
        for place in &places {
            words.extend_from_slice(self.chunks.row(*place));
        }
        let records = match spilled.file.write(&words) {
            Ok(records) => records,
            Err(error) => {
                if let Some(left_out) = LOG.admit() {
                    tracing::warn!(
                        left_out,
                        "rows cannot be written to disk: {error}; they stay in memory, which is more than the limit"
                    );
                }
                return false;
            }
        };
        for ((place, record), words) in places.iter().zip(records).zip(words.chunks(stride)) {
            self.move_to_disk(*place, record, words);
        }
        if let Some(spilled) = &mut self.spilled {
            let bytes = self.chunks.bytes() + self.index.bytes() + spilled.bytes();
            spilled.memory.set(bytes - self.chunks.free_bytes());
        }
        !places.is_empty()
    }

    fn move_to_disk(&mut self, place: Place, record: u32, words: &[u32]) {
        let aged = self.layout.has_history.then(|| self.aged_in_memory(place));
        let Some(spilled) = &mut self.spilled else {
            return;
        };
        spilled.count += 1;
        if let Some(aged) = aged {
            spilled.known.insert(record, aged);
        }
        let changed = self.chunks.has_changed(place) && !planted!(SpilledAsUnchanged);
        let to = Place::on_disk(record, changed);
        let key = Key::new(id_of(words), self.buckets);
        self.index.replace(key, place, to);
        self.chunks.remove(place);
    }
}
