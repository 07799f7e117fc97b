//! A bucket: its rows, and the decisions which ids get a row and which rows are removed.

use std::collections::HashSet;

use shared_proto::payload::LeF32;
use shared_proto::table::{Admission, Age, Capacity, Eviction, First, TableSpec};

use crate::hash::hash;
use crate::rows::{History, Place, Rows, SharedRows};
use crate::sketch::Sketch;

/// The updates from one search for rows to remove to the next, if the table does not say.
const EVERY: u32 = 256;

/// A bucket of a table.
#[derive(Debug)]
pub struct Bucket {
    rows: Rows,
    admission: Admission,
    eviction: Eviction,
    /// The most rows of this bucket.
    most: usize,
    /// Counts the gradients of ids, if rows are admitted by it.
    sketch: Option<Sketch>,
    /// The updates that the bucket has taken.
    updates: u64,
    /// The ids of rows that were removed since the bucket was shared, and have not come back.
    removed: HashSet<u64>,
    /// Memory that updates use again.
    places: Vec<Place>,
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
    /// The number of rows that were removed.
    pub removed: usize,
}

/// A bucket at one moment.
#[derive(Clone, Debug)]
pub struct SharedBucket {
    /// The rows.
    pub rows: SharedRows,
    /// The ids of rows that were removed since the bucket was shared before.
    pub removed: Vec<u64>,
    /// The counts of gradients, if rows are admitted by them.
    pub sketch: Option<Sketch>,
    /// The updates that the bucket has taken.
    pub updates: u64,
}

impl Bucket {
    /// Returns a bucket without rows.
    pub fn new(spec: &TableSpec) -> Self {
        let part = |capacity: Capacity| capacity.rows.div_ceil(u64::from(spec.buckets.max(1)));
        Self {
            rows: Rows::new(spec),
            admission: spec.admission,
            eviction: spec.eviction,
            most: spec
                .eviction
                .capacity
                .map_or(usize::MAX, |capacity| part(capacity) as usize),
            sketch: match spec.admission {
                Admission::Sights { width, .. } => Some(Sketch::new(width as usize)),
                Admission::All | Admission::Chance { .. } => None,
            },
            updates: 0,
            removed: HashSet::new(),
            places: Vec::new(),
        }
    }

    /// Returns a bucket as it was shared.
    pub fn restored(spec: &TableSpec, shared: &SharedBucket) -> Self {
        let mut bucket = Self::new(spec);
        for row in shared.rows.iter() {
            bucket.rows.restore(row.id, row.history, row.numbers);
        }
        bucket.sketch.clone_from(&shared.sketch);
        bucket.updates = shared.updates;
        bucket
    }

    /// Returns the rows.
    pub fn rows(&self) -> &Rows {
        &self.rows
    }

    /// Returns the bytes of rows, index and sketch.
    pub fn bytes(&self) -> usize {
        self.rows.bytes() + self.sketch.as_ref().map_or(0, Sketch::bytes)
    }

    /// Appends the values of the rows of ids. It creates no row.
    pub fn read(&self, ids: &[u64], values: &mut Vec<f32>) {
        let mut places = Vec::with_capacity(ids.len());
        self.rows.find(ids, &mut places);
        self.rows.read(ids, &places, values);
    }

    /// Applies the gradients of ids, each of which is there once, at a learning rate. `now` is the time in seconds.
    pub fn update(&mut self, ids: &[u64], gradients: &[LeF32], rate: f32, now: u32) -> Updated {
        let mut outcome = Updated::default();
        let mut places = std::mem::take(&mut self.places);
        self.rows.find(ids, &mut places);
        for (id, place) in ids.iter().zip(&mut places) {
            if *place != Place::NONE {
                continue;
            }
            if self.admits(*id) {
                *place = self.rows.create(*id);
                self.removed.remove(id);
                outcome.created += 1;
            } else {
                outcome.refused += 1;
            }
        }
        outcome.non_finite = !self.rows.update(&places, gradients, rate);
        self.updates += 1;
        let time = match self.eviction.age {
            Some(Age::Seconds(_)) => now,
            _ => self.updates as u32,
        };
        places.retain(|place| *place != Place::NONE);
        self.rows.note_update(&places, time);
        self.places = places;
        outcome.removed = self.evict(time);
        outcome
    }

    /// Decides whether an id without a row gets one.
    fn admits(&mut self, id: u64) -> bool {
        match (self.admission, &mut self.sketch) {
            (Admission::Sights { count, .. }, Some(sketch)) => sketch.count(id) >= count,
            (Admission::Chance { probability }, _) => {
                // The number of the update makes each draw another one, and the same one again after a restore.
                let draw = hash(hash(id).wrapping_add(self.updates)) >> 40;
                (draw as f32) < probability * 16_777_216.0
            }
            _ => true,
        }
    }

    /// Removes rows. Returns their number.
    fn evict(&mut self, now: u32) -> usize {
        let before = self.rows.len();
        let every = match self.eviction.every {
            0 => EVERY,
            every => every,
        };
        let searches = self.eviction.age.is_some() || self.eviction.below.is_some();
        if searches && self.updates.is_multiple_of(u64::from(every)) {
            let ended: Vec<u64> = self.ended(now).collect();
            self.remove(&ended);
        }
        if let Some(capacity) = self.eviction.capacity
            && self.rows.len() > self.most
        {
            let surplus = self.first(
                capacity.first,
                self.rows.len() - self.most + self.most / 16,
                now,
            );
            self.remove(&surplus);
        }
        before - self.rows.len()
    }

    /// Returns the ids of rows that are too old or too small.
    fn ended(&self, now: u32) -> impl Iterator<Item = u64> {
        let age = self
            .eviction
            .age
            .map(|(Age::Updates(age) | Age::Seconds(age))| age);
        let ended = move |place: Place| {
            let since = |history: History| now.wrapping_sub(history.last);
            let old =
                age.is_some_and(|age| self.rows.history(place).is_some_and(|h| since(h) >= age));
            let small = |below: f32| {
                self.rows
                    .values(place)
                    .iter()
                    .all(|value| value.abs() < below)
            };
            old || self.eviction.below.is_some_and(small)
        };
        let places = self.rows.places();
        places
            .filter(move |(place, _)| ended(*place))
            .map(|(_, id)| id)
    }

    /// Returns the ids of so many rows that are removed first, at this time.
    fn first(&self, first: First, count: usize, now: u32) -> Vec<u64> {
        let key = |(place, id): (Place, u64)| {
            let History { last, updates } = self.rows.history(place).unwrap_or_default();
            match first {
                // The id makes the order complete, so that a restored bucket removes the same rows.
                First::Oldest => (false, last, updates, id),
                // Not those of this update, or else no new row would ever stay.
                First::Rarest => (last == now, updates, last, id),
            }
        };
        let mut keys: Vec<_> = self.rows.places().map(key).collect();
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
            self.removed.insert(*id);
        }
    }

    /// Returns the bucket as it is now. Its rows are shared, not copied.
    pub fn share(&mut self) -> SharedBucket {
        let mut removed: Vec<u64> = std::mem::take(&mut self.removed).into_iter().collect();
        removed.sort_unstable();
        SharedBucket {
            rows: self.rows.share(),
            removed,
            sketch: self.sketch.clone(),
            updates: self.updates,
        }
    }
}
