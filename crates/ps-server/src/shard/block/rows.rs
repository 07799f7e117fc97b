//! The contents of a bucket of a table: rows.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use metrics::{Counter, Gauge, counter, gauge};
use optimizer::row::RowRates;
use optimizer::{Norms, StaleStep, Update, VariableRule};
use shared_proto::payload::{self, Elements, LeF32};
use shared_proto::planted;
use shared_proto::table::hash::hash;
use shared_proto::table::{Rows, SavedRows, TableSpec};
use shared_proto::values::Values;
use shared_proto::wire;
use table::bucket::{Bucket, Updated};
use table::disk::RowFile;

use super::contents::{Contents, Limit, RowsLost, SharedValues, Wanted, squares};
use super::heat::Heat;
use super::row_staleness::RowStaleness;

/// The options for the rows of a bucket.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct BucketStorage<'a> {
    /// The file for rows that do not fit into memory; `None` if all rows stay in memory.
    pub(crate) file: Option<&'a Arc<RowFile>>,
    /// The number of hottest ids to keep.
    pub(crate) hottest_ids: usize,
}

/// A bucket of a table.
#[derive(Debug)]
pub(super) struct TableRows {
    bucket: Bucket,
    heat: Heat,
    staleness: RowStaleness,
    /// Scratch memory for the factors of rows.
    factors: Vec<f32>,
    dimension: usize,
    counters: Counters,
    counted: Counted,
    /// The number of rows created, of ids refused a row, and of rows evicted, since the bucket came to this server.
    created: u64,
    refused: u64,
    evicted: u64,
    /// True if the rows of a checkpoint had a number that is NaN or infinite.
    restored_non_finite: bool,
}

/// What the metrics count for a bucket at present.
#[derive(Clone, Copy, Debug, Default)]
struct Counted {
    bytes: usize,
    on_disk: usize,
    read_from_disk: u64,
}

impl TableRows {
    /// Returns a bucket without rows.
    pub(super) fn new(spec: &TableSpec, number: u32, storage: BucketStorage<'_>) -> Self {
        let bucket = Bucket::new(spec, number).spilling_to(storage.file);
        Self::of(spec, bucket, storage, false)
    }

    /// Returns a bucket with the rows of a checkpoint.
    ///
    /// # Errors
    /// If they are not the rows of this bucket.
    pub(super) fn restored(
        spec: &TableSpec,
        number: u32,
        saved: &SavedRows,
        storage: BucketStorage<'_>,
    ) -> Result<Self, String> {
        let mut bucket = Bucket::new(spec, number).spilling_to(storage.file);
        if !planted!(RowsNotRestored) {
            bucket = bucket.restored(spec, saved)?;
        }
        let finite = payload::all_finite(payload::elements(&saved.numbers));
        Ok(Self::of(spec, bucket, storage, !finite))
    }

    fn of(
        spec: &TableSpec,
        bucket: Bucket,
        storage: BucketStorage<'_>,
        restored_non_finite: bool,
    ) -> Self {
        let counters = Counters::new(&spec.name);
        counters.rows.increment(bucket.rows().len() as f64);
        let mut rows = Self {
            bucket,
            heat: Heat::new(storage.hottest_ids),
            staleness: RowStaleness::new(spec.buckets),
            factors: Vec::new(),
            dimension: spec.dimension as usize,
            counters,
            counted: Counted::default(),
            created: 0,
            refused: 0,
            evicted: 0,
            restored_non_finite,
        };
        rows.count_bytes();
        rows
    }

    /// Updates the metrics of the bucket's memory and of its rows on disk.
    fn count_bytes(&mut self) {
        let rows = self.bucket.rows();
        let now = Counted {
            bytes: self.bucket.bytes(),
            on_disk: rows.on_disk(),
            read_from_disk: rows.read_from_disk(),
        };
        let before = std::mem::replace(&mut self.counted, now);
        let more = |now: usize, before: usize| now as f64 - before as f64;
        self.counters.bytes.increment(more(now.bytes, before.bytes));
        let on_disk = more(now.on_disk, before.on_disk);
        self.counters.on_disk.increment(on_disk);
        let read = now.read_from_disk - before.read_from_disk;
        self.counters.read_from_disk.increment(read);
    }

    /// Multiplies the gradients of rows by their factors, adds them up, and limits the sum. Returns the ids of the rows
    /// in `sum`.
    fn sum(&self, rows: Vec<(f32, &Rows)>, limit: Limit, sum: &mut Vec<f32>) -> Vec<u64> {
        let ids = union(&rows);
        sum.clear();
        sum.resize(ids.len() * self.dimension, 0.0);
        for (factor, rows) in rows {
            add(factor, rows, &ids, self.dimension, sum);
        }
        limit.apply(sum);
        ids
    }

    /// Multiplies each gradient by its factor, and applies the limited sum. `factors` has the factor of each row's
    /// step; it is empty if all are 1. Returns whether all changed values are finite.
    fn apply(
        &mut self,
        gradients: &[(f32, &Values)],
        rate: f32,
        factors: &[f32],
        limit: Limit,
        sum: &mut Vec<f32>,
    ) -> Result<bool, RowsLost> {
        let rates = RowRates { rate, factors };
        let rows: Vec<(f32, &Rows)> = gradients.iter().filter_map(rows_of).collect();
        if let [(1.0, rows)] = rows[..]
            && limit.is_off()
        {
            return match rows.values.as_f32() {
                Some(gradients) => self.update_rows(&rows.ids, gradients, rates),
                None => {
                    sum.clear();
                    sum.resize(rows.values.len(), 0.0);
                    rows.values.copy_to(sum);
                    self.update_rows(&rows.ids, payload::in_place(sum), rates)
                }
            };
        }
        let ids = self.sum(rows, limit, sum);
        self.update_rows(&ids, payload::in_place(sum), rates)
    }

    fn update_rows(
        &mut self,
        ids: &[u64],
        gradients: &[LeF32],
        rates: RowRates<'_>,
    ) -> Result<bool, RowsLost> {
        // Only a table that evicts rows after some seconds looks at the time.
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let now = now.map_or(0, |since| since.as_secs() as u32);
        let updated = self.bucket.update(ids, gradients, rates, now)?;
        self.counters.count(&updated);
        self.counters.updated.increment(ids.len() as u64);
        self.heat.count_update(ids);
        self.created += updated.created as u64;
        self.refused += updated.refused as u64;
        self.evicted += updated.evicted as u64;
        self.count_bytes();
        Ok(!updated.non_finite)
    }
}

impl Drop for TableRows {
    fn drop(&mut self) {
        self.counters
            .rows
            .decrement(self.bucket.rows().len() as f64);
        self.counters.bytes.decrement(self.counted.bytes as f64);
        self.counters.on_disk.decrement(self.counted.on_disk as f64);
    }
}

impl Contents for TableRows {
    fn initialize(&mut self, _: &Elements, _: &VariableRule) {
        // The table's settings decide a row's initial values. `Shard::initialize` refuses others.
    }

    fn initialized(&self) -> bool {
        true
    }

    fn values(&mut self, wanted: &Wanted, _: &VariableRule) -> Result<Elements, RowsLost> {
        let mut values = Vec::with_capacity(wanted.ids.len() * self.dimension);
        self.bucket.read(&wanted.ids, &mut values)?;
        self.counters.read.increment(wanted.ids.len() as u64);
        self.heat.read += wanted.ids.len() as u64;
        self.count_bytes();
        Ok(values.into())
    }

    fn update(
        &mut self,
        gradients: &[(f32, &Values)],
        _: &VariableRule,
        update: Update,
        limit: Limit,
        sum: &mut Vec<f32>,
    ) -> Result<bool, RowsLost> {
        self.staleness.clear();
        self.apply(gradients, update.learning_rate, &[], limit, sum)
    }

    fn update_stale(
        &mut self,
        gradient: &Values,
        rule: &VariableRule,
        update: Update,
        step: StaleStep,
    ) -> Result<(bool, Norms), RowsLost> {
        let mut factors = std::mem::take(&mut self.factors);
        factors.clear();
        if let (Values::Rows(rows), Some(stale)) = (gradient, rule.stale_steps()) {
            self.staleness
                .note(&rows.ids, step.staleness, stale, &mut factors);
        }
        let (one, rate) = ([(1.0, gradient)], update.learning_rate);
        let updated = self.apply(&one, rate, &factors, Limit::OFF, &mut Vec::new());
        self.factors = factors;
        Ok((updated?, Norms::default()))
    }

    fn squares(&self, gradients: &[(f32, &Values)], limit: Limit, sum: &mut Vec<f32>) -> f64 {
        self.sum(gradients.iter().filter_map(rows_of).collect(), limit, sum);
        squares(sum)
    }

    fn all_finite(&self) -> bool {
        !self.restored_non_finite
    }

    fn bytes(&self) -> usize {
        self.bucket.bytes()
    }

    fn add_rows(&mut self, spec: &TableSpec, saved: &SavedRows) -> Result<(), String> {
        let rows = self.bucket.rows().len();
        let added = self.bucket.add(spec, saved);
        let more = self.bucket.rows().len() - rows;
        self.counters.rows.increment(more as f64);
        self.count_bytes();
        self.restored_non_finite |= !payload::all_finite(payload::elements(&saved.numbers));
        added
    }

    fn look_up(
        &self,
        ids: &[u64],
        values: &mut Vec<f32>,
        present: &mut Vec<bool>,
    ) -> Result<(), RowsLost> {
        Ok(self.bucket.rows().look_up(ids, values, present)?)
    }

    fn row_counts(&self) -> Option<wire::TableReport> {
        Some(wire::TableReport {
            rows: self.bucket.rows().len() as u64,
            bytes: self.bucket.bytes() as u64,
            created: self.created,
            refused: self.refused,
            evicted: self.evicted,
            on_disk: self.bucket.rows().on_disk() as u64,
        })
    }

    fn heat(&self) -> Option<&Heat> {
        Some(&self.heat)
    }

    fn share(&mut self, checkpoint: u64) -> SharedValues {
        let shared = self.bucket.share(checkpoint);
        // The ids of evicted rows are no longer the bucket's.
        self.count_bytes();
        SharedValues::Rows(shared)
    }
}

fn rows_of<'a>((factor, values): &(f32, &'a Values)) -> Option<(f32, &'a Rows)> {
    match values {
        Values::Rows(rows) => Some((*factor, rows)),
        // `ShardMap::read_values` reads rows for the buckets of tables.
        Values::Dense(_) => None,
    }
}

/// Returns all ids of several lists, each once, in the order of their hashes.
fn union(lists: &[(f32, &Rows)]) -> Vec<u64> {
    let ids = lists.iter().flat_map(|(_, rows)| &rows.ids);
    let mut ids: Vec<u64> = ids.copied().collect();
    ids.sort_unstable_by_key(|id| hash(*id));
    ids.dedup();
    ids
}

/// Adds the gradients of rows, multiplied by a factor, to `sums`, which has one row for each of `ids`. `ids` includes
/// the ids of all these rows, in the same order.
fn add(factor: f32, rows: &Rows, ids: &[u64], dimension: usize, sums: &mut [f32]) {
    let gradients = rows.values.to_vec();
    let mut sums = ids.iter().zip(sums.chunks_exact_mut(dimension));
    for (id, gradient) in rows.ids.iter().zip(gradients.chunks_exact(dimension)) {
        if let Some((_, sum)) = sums.by_ref().find(|(of, _)| *of == id) {
            for (sum, g) in sum.iter_mut().zip(gradient) {
                let before = if planted!(LastContributorsRow) {
                    0.0
                } else {
                    *sum
                };
                *sum = before + factor * g;
            }
        }
    }
}

/// The metrics of a table, which all of its buckets share.
#[derive(Debug)]
struct Counters {
    rows: Gauge,
    bytes: Gauge,
    created: Counter,
    refused: Counter,
    evicted: Counter,
    on_disk: Gauge,
    read_from_disk: Counter,
    read: Counter,
    updated: Counter,
}

impl Counters {
    fn new(table: &str) -> Self {
        let table = table.to_owned();
        Self {
            rows: gauge!("flambeau_ps_table_rows", "table" => table.clone()),
            bytes: gauge!("flambeau_ps_table_bytes", "table" => table.clone()),
            created: counter!("flambeau_ps_table_created_rows_total", "table" => table.clone()),
            refused: counter!("flambeau_ps_table_refused_ids_total", "table" => table.clone()),
            evicted: counter!("flambeau_ps_table_evicted_rows_total", "table" => table.clone()),
            on_disk: gauge!("flambeau_ps_table_rows_on_disk", "table" => table.clone()),
            read_from_disk: counter!("flambeau_ps_table_rows_read_from_disk_total", "table" => table.clone()),
            read: counter!("flambeau_ps_table_read_rows_total", "table" => table.clone()),
            updated: counter!("flambeau_ps_table_updated_rows_total", "table" => table),
        }
    }

    fn count(&self, updated: &Updated) {
        self.created.increment(updated.created as u64);
        self.refused.increment(updated.refused as u64);
        self.evicted.increment(updated.evicted as u64);
        let more = updated.created as f64 - updated.evicted as f64;
        self.rows.increment(more);
    }
}

#[cfg(test)]
mod tests {

    use shared_proto::table::{Capacity, Eviction, EvictionOrder};

    use super::*;

    /// A bucket with evicted rows becomes smaller when a checkpoint takes their ids over.
    #[test]
    fn the_metric_counts_the_bytes_that_the_bucket_has() {
        let capacity = Capacity {
            rows: 4,
            order: EvictionOrder::Oldest,
        };
        let spec = TableSpec {
            name: "item".to_owned(),
            dimension: 1,
            buckets: 1,
            eviction: Eviction {
                capacity: Some(capacity),
                ..Eviction::default()
            },
            ..TableSpec::default()
        };
        let mut rows = TableRows::new(&spec, 0, BucketStorage::default());
        assert_eq!(rows.counted.bytes, rows.bytes());
        let _ = rows.share(1);
        let mut one = [1.0];
        for id in 0..500 {
            let gradient = payload::in_place(&mut one);
            rows.update_rows(&[id], gradient, 0.1.into()).unwrap();
            assert_eq!(rows.counted.bytes, rows.bytes());
        }
        let before = rows.bytes();
        let SharedValues::Rows(shared) = rows.share(2) else {
            panic!("no rows are shared");
        };
        assert!(rows.bytes() < before);
        assert_eq!(rows.counted.bytes, rows.bytes());
        let saved = shared.to_bytes().unwrap();
        let mut restored = TableRows::new(&spec, 0, BucketStorage::default());
        restored.add_rows(&spec, &saved).unwrap();
        assert_eq!(restored.counted.bytes, restored.bytes());
    }
}
