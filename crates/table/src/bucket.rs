//! A bucket: its rows, the admission of ids, and the eviction of rows.

use std::collections::{HashSet, VecDeque};
use std::io;
use std::sync::Arc;

use optimizer::row::RowRates;
use shared_proto::hash::mix;
use shared_proto::payload::LeF32;
use shared_proto::planted;
use shared_proto::table::{Admission, Age, Capacity, Eviction, EvictionOrder, TableSpec};

use crate::disk::{After, RowFile};
use crate::hash::hash;
use crate::rows::{Aged, History, Place, Rows, SharedRows};
use crate::sketch::Sketch;

/// The number of updates from one search for rows to evict to the next, if the table's settings give none.
const SEARCH_INTERVAL: u32 = 256;

/// The number of updates after which a row may be evicted because its values are small. A new row may begin with zeros.
const YOUNG: u32 = 16;

/// A bucket of a table.
#[derive(Debug)]
pub struct Bucket {
    pub(crate) rows: Rows,
    admission: Admission,
    eviction: Eviction,
    max_rows: usize,
    /// The bucket's number in its table. Because of it, the buckets of a table search for rows to evict at different
    /// updates, and draw different random numbers from the table's seed.
    pub(crate) number: u32,
    seed: u64,
    /// Counts the gradients of ids, if the table admits rows by their count.
    pub(crate) sketch: Option<Sketch>,
    /// The number of updates that the bucket has taken.
    pub(crate) updates: u64,
    /// The time of the newest update: in seconds since 1970 if the table evicts rows by seconds, otherwise in updates.
    /// It does not go back if the server's clock does.
    pub(crate) time: u32,
    /// The rows that were evicted since the bucket was last shared. `None` before it is shared for the first time, and
    /// after it has evicted more rows than it holds and more than 1,024.
    shared: Option<Evicted>,
    /// The places of rows that were read, the newest last.
    read: VecDeque<Read>,
    /// The number of times that rows have left their places.
    moved: u64,
}

/// Rows that were read together. A worker that reads rows sends their gradients next, so their places are found once.
#[derive(Debug)]
struct Read {
    ids: Vec<u64>,
    places: Vec<Place>,
    /// The value of [`Bucket::moved`] when the places were found. If that has changed since, a place may be another
    /// row's.
    moved: u64,
}

/// The most lists of read rows that a bucket remembers, and the most rows of a list.
const REMEMBERED: usize = 8;
const REMEMBERED_ROWS: usize = 4096;

/// Rows that were evicted since a bucket was last shared, and have not been created again.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Evicted {
    /// The number of the checkpoint for which the bucket was shared.
    pub since: u64,
    /// The rows' ids.
    pub ids: HashSet<u64>,
}

/// The outcome of an update.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Updated {
    /// True if an update has made a number NaN or infinite.
    pub non_finite: bool,
    /// The number of rows that were created.
    pub created: usize,
    /// The number of ids that have no row and got none.
    pub refused: usize,
    /// The number of rows that were evicted.
    pub evicted: usize,
}

/// A bucket at one moment.
#[derive(Clone, Debug)]
pub struct SharedBucket {
    /// The rows.
    pub rows: SharedRows,
    /// The rows that were evicted since the bucket was shared before. A checkpoint then has only the changed rows.
    /// `None` if a checkpoint must have all rows: the bucket was not shared before, or has evicted too many rows since.
    pub changes: Option<Evicted>,
    /// The counts of gradients, if rows are admitted by them.
    pub sketch: Option<Sketch>,
    /// The number of updates that the bucket has taken.
    pub updates: u64,
    /// The time of the newest update, in seconds since 1970 or in updates.
    pub time: u32,
}

impl Bucket {
    /// Returns the bucket with this number, without rows. The settings must have passed [`TableSpec::check`].
    pub fn new(spec: &TableSpec, number: u32) -> Self {
        let part = |capacity: Capacity| capacity.rows.div_ceil(u64::from(spec.buckets.max(1)));
        Self {
            rows: Rows::new(spec),
            number,
            seed: spec.seed,
            admission: spec.admission,
            eviction: spec.eviction,
            max_rows: spec
                .eviction
                .capacity
                .map_or(usize::MAX, |capacity| part(capacity) as usize),
            sketch: match spec.admission {
                Admission::Sights { width, .. } => Some(Sketch::new(width as usize)),
                Admission::All | Admission::Chance { .. } => None,
            },
            updates: 0,
            time: 0,
            shared: None,
            read: VecDeque::new(),
            moved: 0,
        }
    }

    /// Returns the bucket with a file for rows that do not fit into the server's memory. The bucket must not have rows
    /// yet. Without a file, all rows stay in memory.
    pub fn spilling_to(mut self, file: Option<&Arc<RowFile>>) -> Self {
        if let Some(file) = file {
            self.rows.spill_to(Arc::clone(file));
        }
        self
    }

    /// Returns the rows.
    pub fn rows(&self) -> &Rows {
        &self.rows
    }

    /// Returns the number of bytes of memory for rows, index, sketch and the ids of evicted rows.
    pub fn bytes(&self) -> usize {
        let evicted = self
            .shared
            .as_ref()
            .map_or(0, |evicted| evicted.ids.capacity());
        // A byte of the set's table for each id.
        self.rows.bytes()
            + self.sketch.as_ref().map_or(0, Sketch::bytes)
            + evicted * (size_of::<u64>() + 1)
    }

    /// Appends the values of the rows of `ids`. Brings rows on disk back into memory, and remembers the places of the
    /// rows. Creates no rows.
    ///
    /// # Errors
    /// If a row on disk cannot be read.
    pub fn read(&mut self, ids: &[u64], values: &mut Vec<f32>) -> io::Result<()> {
        let mut places = self.remembered(ids).unwrap_or_default();
        if planted!(ReadsCreate) {
            for id in ids {
                self.rows.create(*id);
            }
        }
        self.rows.find(ids, &mut places);
        self.rows.bring_back(ids, &mut places)?;
        self.rows.read(ids, &places, values);
        // Rows that now go to disk leave the places that were found.
        let moved = self.moved;
        self.moved += u64::from(self.rows.spill(After::Read));
        if ids.is_empty() || ids.len() > REMEMBERED_ROWS {
            return Ok(());
        }
        if self.read.len() == REMEMBERED {
            self.read.pop_front();
        }
        self.read.push_back(Read {
            ids: ids.to_vec(),
            places,
            moved,
        });
        Ok(())
    }

    /// Takes the places of rows that were read together, if no row has left its place since.
    fn remembered(&mut self, ids: &[u64]) -> Option<Vec<Place>> {
        let number = self.read.iter().position(|read| read.ids == ids)?;
        let read = self.read.remove(number)?;
        (read.moved == self.moved).then_some(read.places)
    }

    /// Applies the gradients of ids at their learning rates. Each id must occur only once. `now` is the time in seconds
    /// since 1970.
    ///
    /// # Errors
    /// If a row on disk cannot be read. Then nothing has changed.
    pub fn update(
        &mut self,
        ids: &[u64],
        gradients: &[LeF32],
        rates: RowRates<'_>,
        now: u32,
    ) -> io::Result<Updated> {
        let mut outcome = Updated::default();
        let mut places = match self.remembered(ids) {
            Some(places) => places,
            None => {
                let mut places = Vec::new();
                self.rows.find(ids, &mut places);
                self.rows.bring_back(ids, &mut places)?;
                places
            }
        };
        for (id, place) in ids.iter().zip(&mut places) {
            if *place != Place::NONE {
                continue;
            }
            // Another worker may have created the row since it was read.
            *place = self.rows.place(*id);
            if *place != Place::NONE {
                continue;
            }
            if !self.rows.is_full() && self.admits(*id) {
                *place = self.rows.create(*id);
                if let Some(evicted) = &mut self.shared {
                    evicted.ids.remove(id);
                }
                outcome.created += 1;
            } else {
                outcome.refused += 1;
            }
        }
        outcome.non_finite = !self.rows.update(&places, gradients, rates, self.draw());
        self.updates = self.updates.saturating_add(1);
        self.time = match self.eviction.age {
            Some(Age::Seconds(_)) => self.time.max(now),
            _ => self.time.saturating_add(1),
        };
        places.retain(|place| *place != Place::NONE);
        self.rows.note_update(&places, self.time);
        outcome.evicted = self.evict();
        self.make_room();
        Ok(outcome)
    }

    /// Writes rows to disk if the server has no memory for them, and gives free memory back.
    pub(crate) fn make_room(&mut self) {
        self.moved += u64::from(self.rows.spill(After::Update)) + u64::from(self.rows.shrink());
    }

    /// Returns the seed of this update's stochastic rounding: different for each update and bucket, and the same again
    /// after a restore.
    fn draw(&self) -> u64 {
        let of_bucket = mix(self.seed ^ u64::from(self.number));
        mix(of_bucket.wrapping_add(self.updates))
    }

    /// Decides whether an id without a row gets one.
    fn admits(&mut self, id: u64) -> bool {
        match (self.admission, &mut self.sketch) {
            _ if planted!(AdmitsAtOnce) => true,
            (Admission::Sights { count, .. }, Some(sketch)) => sketch.count(id) >= count,
            (Admission::Chance { probability }, _) => {
                // The number of the update makes each draw another one, and the same one again after a restore.
                let draw = hash(hash(id ^ self.seed).wrapping_add(self.updates)) >> 40;
                (draw as f32) < probability * 16_777_216.0
            }
            _ => true,
        }
    }

    /// Evicts rows. Returns their number.
    fn evict(&mut self) -> usize {
        let before = self.rows.len();
        let interval = match self.eviction.search_interval {
            0 => SEARCH_INTERVAL,
            interval => interval,
        };
        let searches = self.eviction.age.is_some() || self.eviction.below.is_some();
        // The number keeps the buckets of a table from searching all at once.
        let turn = self.updates.wrapping_add(self.number.into());
        if searches && !planted!(NeverTooOld) && turn.is_multiple_of(u64::from(interval)) {
            let expired: Vec<u64> = self.expired().collect();
            self.remove(&expired);
        }
        if let Some(capacity) = self.eviction.capacity
            && self.rows.len() > self.max_rows
        {
            let surplus = self.rows.len() - self.max_rows + self.max_rows / 16;
            let first = self.first(capacity.order, surplus);
            self.remove(&first);
        }
        before - self.rows.len()
    }

    /// Returns the ids of rows that are too old or too small.
    fn expired(&self) -> impl Iterator<Item = u64> {
        let age = self
            .eviction
            .age
            .map(|(Age::Updates(age) | Age::Seconds(age))| age);
        let expired = move |row: &Aged| {
            let old = age.is_some_and(|age| self.time.saturating_sub(row.history.last) >= age);
            old || row.is_small && row.history.updates >= YOUNG
        };
        self.rows.aged().filter(expired).map(|row| row.id)
    }

    /// Returns the ids of the `count` rows that a full bucket evicts first.
    fn first(&self, order: EvictionOrder, count: usize) -> Vec<u64> {
        let key = |row: Aged| {
            let (id, History { last, updates }) = (row.id, row.history);
            match order {
                EvictionOrder::Oldest if planted!(EvictsNewest) => (false, !last, updates, id),
                // The id makes the order complete, so that a restored bucket evicts the same rows.
                EvictionOrder::Oldest => (false, last, updates, id),
                // Rows of the newest time come last, or else no new row would ever stay.
                EvictionOrder::Rarest => (last == self.time, updates, last, id),
            }
        };
        let mut keys: Vec<_> = self.rows.aged().map(key).collect();
        let count = count.min(keys.len());
        if count > 0 {
            keys.select_nth_unstable(count - 1);
        }
        keys.truncate(count);
        keys.into_iter().map(|(_, _, _, id)| id).collect()
    }

    fn remove(&mut self, ids: &[u64]) {
        for id in ids {
            self.rows.remove(*id);
        }
        self.moved += u64::from(!ids.is_empty());
        if let Some(evicted) = &mut self.shared {
            evicted.ids.extend(ids);
            if evicted.ids.len() > self.rows.len().max(1024) {
                self.shared = None;
            }
        }
    }

    /// Returns the bucket as it is now, for the checkpoint with this number. Its rows are shared, not copied.
    pub fn share(&mut self, checkpoint: u64) -> SharedBucket {
        let none = Evicted {
            since: checkpoint,
            ids: HashSet::new(),
        };
        SharedBucket {
            rows: self.rows.share(),
            changes: self.shared.replace(none),
            sketch: self.sketch.clone(),
            updates: self.updates,
            time: self.time,
        }
    }
}

impl SharedBucket {
    /// Returns the number of bytes of memory for rows and sketch.
    pub fn bytes(&self) -> usize {
        self.rows.bytes() + self.bytes_of_sketch()
    }

    fn bytes_of_sketch(&self) -> usize {
        self.sketch.as_ref().map_or(0, Sketch::bytes)
    }

    /// Decides whether a checkpoint gets all rows or only the changed ones. It gets only the changed rows if they are
    /// less than half of all rows, and if the bucket was last shared for the checkpoint `base`.
    pub fn build_on(&mut self, base: Option<u64>) {
        let since = self.changes.as_ref().map(|changes| changes.since);
        let few = 2 * self.rows.changed() < self.rows.count();
        if let (true, Some(changes), Some(base)) =
            (planted!(ForgottenChanges), &mut self.changes, base)
        {
            changes.since = base;
        } else if !few || since.is_none() || since != base {
            self.changes = None;
        }
    }

    /// Returns approximately how many bytes the bucket takes in a checkpoint.
    pub fn saved_bytes(&self) -> usize {
        match &self.changes {
            None => self.rows.bytes_of_row() * self.rows.count() + self.bytes_of_sketch(),
            Some(changes) => {
                let rows = self.rows.bytes_of_row() * self.rows.changed();
                rows + self.bytes_of_sketch() + changes.ids.len() * size_of::<u64>()
            }
        }
    }
}
