//! Tables in the memory of one process: for training without servers, evaluation and predictions.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use candle_core::{Error, Result};
use shared_proto::payload;
use shared_proto::step::WantedRows;
use shared_proto::table::hash::bucket;
use shared_proto::table::{SavedRows, TableSpec};
use table::bucket::Bucket;

/// The rows of tables in a checkpoint, by table name and bucket number. The rows of a bucket may be in several parts,
/// the newest first; each row is in one part.
pub type SavedTables = BTreeMap<String, BTreeMap<u32, Vec<SavedRows>>>;

/// A source of the rows of a model's tables.
pub trait RowSource {
    /// Returns the values of rows: one vector for each table, row after row.
    ///
    /// # Errors
    /// If rows cannot be read.
    fn read(&mut self, rows: &[Arc<WantedRows>]) -> Result<Vec<Vec<f32>>>;
}

/// A function that returns the source of these tables' rows. It is called only for a model that has tables.
pub type RowsOf<'a> = Box<dyn Fn(Vec<TableSpec>) -> Result<Box<dyn RowSource>> + 'a>;

/// Returns a source of the rows of a checkpoint, with all rows in memory.
///
/// # Errors
/// If a bucket is missing, or does not fit its table.
pub fn restored(specs: Vec<TableSpec>, saved: &SavedTables) -> Result<Box<dyn RowSource>> {
    Ok(Box::new(LocalTables::restored(specs, saved)?))
}

/// The tables of a model, with all their rows.
#[derive(Debug, Default)]
pub struct LocalTables(Vec<LocalTable>);

#[derive(Debug)]
struct LocalTable {
    spec: TableSpec,
    buckets: Vec<Bucket>,
}

impl LocalTables {
    /// Returns tables without rows.
    pub fn new(specs: Vec<TableSpec>) -> Self {
        let table = |spec: TableSpec| LocalTable {
            buckets: (0..spec.buckets).map(|n| Bucket::new(&spec, n)).collect(),
            spec,
        };
        Self(specs.into_iter().map(table).collect())
    }

    fn restored(specs: Vec<TableSpec>, saved: &SavedTables) -> Result<Self> {
        let table = |spec: TableSpec| {
            let Some(rows) = saved.get(&spec.name) else {
                return Err(Error::msg(format!(
                    "there are no rows of table {:?}; they are in the run's last checkpoint",
                    spec.name
                )));
            };
            let restore = |number| {
                restored_bucket(&spec, number, rows.get(&number)).map_err(|why| {
                    Error::msg(format!(
                        "bucket {number} of table {:?} cannot be read: {why}",
                        spec.name
                    ))
                })
            };
            let buckets = (0..spec.buckets).map(restore).collect::<Result<_>>()?;
            Ok(LocalTable { buckets, spec })
        };
        specs
            .into_iter()
            .map(table)
            .collect::<Result<_>>()
            .map(Self)
    }

    /// Returns the tables in the format of a checkpoint.
    pub fn into_saved(self) -> Result<SavedTables> {
        let saved = self.0.into_iter().map(|table| {
            let buckets = (0u32..).zip(table.buckets);
            let buckets =
                buckets.map(|(number, mut bucket)| Ok((number, vec![bucket.share(0).to_bytes()?])));
            Ok((table.spec.name, buckets.collect::<Result<_>>()?))
        });
        saved.collect()
    }

    /// Applies the gradients of rows. `gradients` has one vector for each table, row after row. The learning rates are
    /// `scale` times those of the tables.
    pub fn update(
        &mut self,
        rows: &[Arc<WantedRows>],
        gradients: &mut [Vec<f32>],
        scale: f64,
    ) -> Result<()> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let now = now.map_or(0, |since| since.as_secs() as u32);
        for ((table, rows), gradients) in self.0.iter_mut().zip(rows).zip(gradients) {
            let rate = (f64::from(table.spec.optimizer.learning_rate()) * scale) as f32;
            let width = table.spec.dimension as usize;
            let gradients = payload::in_place(gradients);
            let mut start = 0;
            // Each bucket takes each step, as on a server, where the number of a bucket's updates counts.
            for (number, of_table) in (0u32..).zip(&mut table.buckets) {
                let rest = &rows.ids[start..];
                let count = rest.partition_point(|id| bucket(*id, table.spec.buckets) <= number);
                let gradients = &gradients[start * width..][..count * width];
                of_table.update(&rest[..count], gradients, rate.into(), now)?;
                start += count;
            }
        }
        Ok(())
    }
}

impl RowSource for LocalTables {
    fn read(&mut self, rows: &[Arc<WantedRows>]) -> Result<Vec<Vec<f32>>> {
        let tables = self.0.iter_mut().zip(rows);
        let read = tables.map(|(table, rows)| {
            let mut values = Vec::with_capacity(rows.ids.len() * table.spec.dimension as usize);
            let mut rest = &rows.ids[..];
            for (number, of_table) in (0u32..).zip(&mut table.buckets) {
                let count = rest.partition_point(|id| bucket(*id, table.spec.buckets) <= number);
                let ids;
                (ids, rest) = rest.split_at(count);
                of_table.read(ids, &mut values)?;
            }
            Ok(values)
        });
        read.collect()
    }
}

/// Returns a bucket with the rows of a checkpoint.
fn restored_bucket(
    spec: &TableSpec,
    number: u32,
    parts: Option<&Vec<SavedRows>>,
) -> std::result::Result<Bucket, String> {
    let parts = parts.and_then(|parts| parts.split_first());
    let (newest, older) = parts.ok_or("it is not in the checkpoint")?;
    let mut bucket = Bucket::of_bytes(spec, number, newest)?;
    for rows in older {
        bucket.add(spec, rows)?;
    }
    Ok(bucket)
}
