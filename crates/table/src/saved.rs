//! A bucket to bytes and back.

use std::io;

use shared_proto::payload;
use shared_proto::planted;
use shared_proto::table::hash::bucket;
use shared_proto::table::{Changes, SavedRows, Storage, TableSpec, ids_to_bytes};

use crate::bucket::{Bucket, SharedBucket};
use crate::disk::After;
use crate::rows::History;
use crate::sketch::Sketch;

/// The number of rows that a bucket takes from a checkpoint before it checks again whether the server has memory for
/// them.
const ROWS_AT_A_TIME: usize = 1024;

impl SharedBucket {
    /// Returns the bucket as bytes, in memory of their own: only the changed rows if `changes` is set, otherwise all
    /// rows.
    ///
    /// # Errors
    /// If rows on disk cannot be read.
    pub fn to_bytes(&self) -> io::Result<SavedRows> {
        let (mut ids, mut history, mut numbers) = (Vec::new(), Vec::new(), Vec::new());
        let mut lacking = usize::from(planted!(RowNotSaved));
        self.rows.visit(self.changes.is_some(), |row| {
            if lacking > 0 {
                lacking -= 1;
                return;
            }
            ids.push(row.id);
            if self.rows.has_history() {
                history.extend_from_slice(&row.history.last.to_le_bytes());
                history.extend_from_slice(&row.history.updates.to_le_bytes());
            }
            numbers.extend_from_slice(row.numbers);
        })?;
        Ok(SavedRows {
            ids: ids_to_bytes(&ids),
            history: history.into(),
            numbers: payload::share(&numbers.into()),
            counts: match &self.sketch {
                Some(sketch) if planted!(SightsNotSaved) => vec![0; sketch.counters().len()].into(),
                Some(sketch) => sketch.counters().to_vec().into(),
                None => Default::default(),
            },
            updates: self.updates,
            time: self.time,
            changes: self.changes.as_ref().map(|evicted| {
                let mut removed: Vec<u64> = evicted.ids.iter().copied().collect();
                if planted!(EvictedNotSaved) {
                    removed.clear();
                }
                removed.sort_unstable();
                Changes {
                    since: evicted.since,
                    removed: ids_to_bytes(&removed),
                }
            }),
        })
    }
}

impl Bucket {
    /// Returns a bucket as it was saved by a table of the same settings.
    ///
    /// # Errors
    /// If the bytes are not those of a bucket with this number of such a table.
    pub fn of_bytes(spec: &TableSpec, number: u32, saved: &SavedRows) -> Result<Self, String> {
        Self::new(spec, number).restored(spec, saved)
    }

    /// Returns this bucket, which must not have rows yet, with what a bucket of a table of the same settings has saved.
    ///
    /// # Errors
    /// As [`of_bytes`](Self::of_bytes), or if rows on disk cannot be read.
    pub fn restored(mut self, spec: &TableSpec, saved: &SavedRows) -> Result<Self, String> {
        self.add(spec, saved)?;
        if let Some(sketch) = &mut self.sketch {
            *sketch = Sketch::of_counters(&saved.counts, sketch)?;
        }
        self.updates = saved.updates;
        self.time = saved.time;
        Ok(self)
    }

    /// Adds saved rows. The bucket must not have any of them yet.
    ///
    /// # Errors
    /// As [`of_bytes`](Self::of_bytes), or if the bucket already has one of the rows.
    pub fn add(&mut self, spec: &TableSpec, saved: &SavedRows) -> Result<(), String> {
        let number = self.number;
        let rows = &mut self.rows;
        let (ids, rest) = saved.ids.as_chunks::<8>();
        let (histories, rest_of_history) = saved.history.as_chunks::<8>();
        let whole = saved.numbers.len() / size_of::<f32>() * size_of::<f32>();
        let numbers = saved.numbers.slice(..whole);
        let numbers = payload::elements(&numbers);
        let expected_histories = if rows.has_history() { ids.len() } else { 0 };
        let expected = ids.len() * rows.numbers_of_row();
        if !rest.is_empty() || !rest_of_history.is_empty() || histories.len() != expected_histories
        {
            return Err(format!(
                "it has {} bytes of ids and {} of histories; {expected_histories} histories were expected",
                saved.ids.len(),
                saved.history.len()
            ));
        }
        if saved.numbers.len() != expected * size_of::<f32>() {
            return Err(format!(
                "its {} rows have {} bytes of numbers; {} were expected",
                ids.len(),
                saved.numbers.len(),
                expected * size_of::<f32>()
            ));
        }
        let mut row = Vec::with_capacity(rows.numbers_of_row());
        let mut histories = histories.iter();
        for (id, numbers) in ids.iter().zip(numbers.chunks(rows.numbers_of_row())) {
            let id = u64::from_le_bytes(*id);
            if bucket(id, spec.buckets) != number {
                return Err(format!(
                    "its row {id} belongs to another bucket than {number}"
                ));
            }
            let saved_history = histories.next().filter(|_| !planted!(AgesNotRestored));
            let history = saved_history.map_or_else(History::default, |bytes| {
                let [a, b, c, d, e, f, g, h] = *bytes;
                History {
                    last: u32::from_le_bytes([a, b, c, d]),
                    updates: u32::from_le_bytes([e, f, g, h]),
                }
            });
            if history.last > saved.time {
                return Err(format!(
                    "its row {id} was last updated at time {}, after the bucket's {}",
                    history.last, saved.time
                ));
            }
            if rows.is_full() {
                return Err("it has more rows than a bucket can hold".to_owned());
            }
            row.clear();
            row.extend(numbers.iter().map(|number| number.get()));
            if spec.storage != Storage::F32 && !rows.fits(&row) {
                return Err(format!(
                    "its row {id} has a value that is too large for the table's storage, {:?}",
                    spec.storage
                ));
            }
            let is_new = rows.restore(id, history, &row);
            if !is_new.map_err(|error| format!("its rows on disk cannot be read: {error}"))? {
                return Err(format!("it has row {id} twice"));
            }
            if rows.len().is_multiple_of(ROWS_AT_A_TIME) {
                rows.spill(After::Update);
            }
        }
        self.make_room();
        Ok(())
    }
}
