//! The tables that a model asks for, and the rows of the current step.

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{Device, Error, Result, Tensor, Var, bail};
use parking_lot::Mutex;
use shared_proto::job::Job;
use shared_proto::step::{RowGradients, Want, WantedRows};
use shared_proto::table::TableSpec;

use super::distinct::{Distinct, column_salt};
use super::settings::Table;
use crate::input::{Batch, Feature, Signature, ValueType};

/// The tables that a model asks for while it is built.
#[derive(Debug, Default)]
pub struct Tables {
    job: Job,
    by_name: Mutex<BTreeMap<String, Declared>>,
}

/// A table of a model.
#[derive(Clone, Debug)]
struct Declared {
    spec: TableSpec,
    columns: Vec<String>,
    separate: bool,
    rows: Rows,
}

/// The rows of the step that is being computed, of shape `[rows, dimension]`.
type Rows = Arc<Mutex<Option<Tensor>>>;

/// A model's handle to a table.
#[derive(Clone, Debug)]
pub struct Embeddings {
    table: String,
    dimension: usize,
    columns: Vec<String>,
    rows: Rows,
}

/// The way in which the rows of a sample's ids become one vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pool {
    /// The sum of the rows.
    Sum,
    /// The mean of the rows; zeros for a sample without ids.
    Mean,
}

impl Tables {
    /// Returns a collection without tables. The job's seed determines the initial values of rows, and the settings in
    /// the job's `tables` override those of the model.
    pub fn new(job: &Job) -> Self {
        Self {
            job: job.clone(),
            by_name: Mutex::default(),
        }
    }

    /// Adds a table for data with these fields.
    pub(crate) fn add(&self, name: &str, table: &Table, data: &Signature) -> Result<Embeddings> {
        let spec = self.job.table(table.spec(name, self.job.seed));
        spec.check()
            .map_err(|refusal| Error::msg(refusal.message))?;
        if table.columns.is_empty() {
            bail!("table {name:?} has no column; name the inputs that have its ids with `column`");
        }
        for column in &table.columns {
            let field = data.inputs.iter().find(|field| field.name == *column);
            match field.map(|field| field.values) {
                Some(ValueType::U32 | ValueType::I64) => {}
                Some(values) => bail!(
                    "table {name:?} takes ids, but input {column:?} is {values}; ids are whole numbers"
                ),
                None => bail!(
                    "table {name:?} names input {column:?}, which the data does not have; it has {}",
                    data.input_names()
                ),
            }
        }
        let declared = Declared {
            spec,
            columns: table.columns.clone(),
            separate: table.separate,
            rows: Rows::default(),
        };
        let handle = Embeddings {
            table: name.to_owned(),
            dimension: declared.spec.dimension as usize,
            columns: declared.columns.clone(),
            rows: Arc::clone(&declared.rows),
        };
        match self.by_name.lock().insert(name.to_owned(), declared) {
            None => Ok(handle),
            Some(_) => bail!("the model asks for table {name:?} twice; share one handle"),
        }
    }

    /// Returns the tables, sorted by name.
    pub fn into_model(self) -> ModelTables {
        ModelTables(self.by_name.into_inner().into_values().collect())
    }
}

impl Embeddings {
    /// Returns the number of values in a row.
    pub fn dimension(&self) -> usize {
        self.dimension
    }

    /// Returns the rows of the ids in a column. For ids of shape `[samples, ...]`, the rows have the shape `[samples,
    /// ..., dimension]`.
    ///
    /// # Errors
    /// If the table does not have the column, if samples have different numbers of ids, or candle's.
    pub fn lookup(&self, batch: &Batch, column: &str) -> Result<Tensor> {
        self.check(column)?;
        match batch.inputs().get(column) {
            Some(Feature::Dense(_)) => self.gather(batch.rows_of(&self.table, column)?),
            Some(Feature::Ragged(_)) => {
                bail!("samples have different numbers of {column:?}; pool their rows with `bag`")
            }
            None => bail!("there is no input {column:?}"),
        }
    }

    /// Returns the rows of all ids in a column, one after the other, of shape `[ids, dimension]`.
    pub(crate) fn all_rows(&self, batch: &Batch, column: &str) -> Result<Tensor> {
        self.check(column)?;
        self.gather(&batch.rows_of(&self.table, column)?.flatten_all()?)
    }

    /// Returns the pooled rows of each sample's ids in a column, of shape `[samples, dimension]`. If the ids have
    /// weights, each row is multiplied by the weight of its id, and a mean is the sum divided by the sum of the
    /// weights.
    ///
    /// # Errors
    /// If the table does not have the column, or candle's.
    pub fn bag(&self, batch: &Batch, column: &str, pool: Pool) -> Result<Tensor> {
        self.check(column)?;
        let rows = self.gather(batch.rows_of(&self.table, column)?)?;
        match batch.inputs().get(column) {
            Some(Feature::Dense(_)) if rows.rank() == 2 => Ok(rows),
            Some(Feature::Dense(_)) => {
                let size = rows.dim(candle_core::D::Minus1)?;
                let rows = rows.reshape((batch.samples(), (), size))?;
                match pool {
                    Pool::Sum => rows.sum(1),
                    Pool::Mean => rows.mean(1),
                }
            }
            Some(Feature::Ragged(ids)) => {
                let device = &rows.device().clone();
                let size = rows.dim(1)?;
                let counts = ids.offsets.windows(2).map(|ends| ends[1] - ends[0]);
                let sums = Tensor::zeros((batch.samples(), size), rows.dtype(), device)?;
                if ids.values.elem_count() == 0 {
                    return Ok(sums);
                }
                let owners = counts.clone().enumerate();
                let owners =
                    owners.flat_map(|(sample, count)| std::iter::repeat_n(sample as u32, count));
                let owners = Tensor::from_iter(owners, device)?;
                let (rows, weights) = match &ids.weights {
                    None => {
                        let counts = counts.map(|count| count as f32);
                        (rows, Tensor::from_iter(counts, device)?)
                    }
                    Some(weights) => {
                        let weights = weights.to_dtype(rows.dtype())?;
                        let zeros = Tensor::zeros(batch.samples(), rows.dtype(), device)?;
                        let totals = zeros.index_add(&owners, &weights, 0)?;
                        (rows.broadcast_mul(&weights.unsqueeze(1)?)?, totals)
                    }
                };
                let sums = sums.index_add(&owners, &rows, 0)?;
                match pool {
                    Pool::Sum => Ok(sums),
                    Pool::Mean => {
                        // A sample without ids has the sum 0.
                        let none = weights.eq(0f32)?.to_dtype(rows.dtype())?;
                        sums.broadcast_div(&(weights + none)?.unsqueeze(1)?)
                    }
                }
            }
            None => bail!("there is no input {column:?}"),
        }
    }

    fn check(&self, column: &str) -> Result<()> {
        match self.columns.iter().any(|known| known == column) {
            true => Ok(()),
            false => bail!(
                "table {:?} has no column {column:?}; it has {:?}",
                self.table,
                self.columns
            ),
        }
    }

    /// Returns the rows at these indices.
    fn gather(&self, places: &Tensor) -> Result<Tensor> {
        let rows = self.rows.lock().clone();
        match rows {
            Some(rows) => nn::lookup(&rows, places),
            None => bail!("the rows of table {:?} are not there", self.table),
        }
    }
}

/// The tables of a built model, sorted by name.
#[derive(Clone, Debug, Default)]
pub struct ModelTables(Vec<Declared>);

impl ModelTables {
    /// Returns the specifications of the tables, as servers have them.
    pub fn specs(&self) -> Vec<TableSpec> {
        self.0.iter().map(|table| table.spec.clone()).collect()
    }

    /// Returns the distinct ids of each table in the batches of one step. Sets the index of the row of each id in the
    /// batches.
    ///
    /// # Errors
    /// If a batch lacks a column, or candle's.
    pub fn distinct(&self, batches: &mut [Batch]) -> Result<Vec<Arc<WantedRows>>> {
        let mut all: Vec<Arc<WantedRows>> = Vec::with_capacity(self.0.len());
        for (number, table) in self.0.iter().enumerate() {
            let mut earlier = self.0[..number].iter().zip(&all);
            let same = earlier.find(|(other, _)| other.has_ids_of(table));
            let rows = match same.map(|(other, rows)| (other, rows.ids.clone())) {
                None => table.distinct(number, batches)?,
                Some((other, ids)) => {
                    table.share_places(other, batches)?;
                    Arc::new(WantedRows { table: number, ids })
                }
            };
            all.push(rows);
        }
        Ok(all)
    }

    /// Sets the rows of a step, which the model's handles look up.
    pub fn set(&self, rows: &StepRows) {
        for (table, rows) in self.0.iter().zip(&rows.0) {
            *table.rows.lock() = Some(rows.as_tensor().clone());
        }
    }

    /// Converts pulled values to the rows of a step. `pulled` has the values of each table, row after row, and loses
    /// them.
    ///
    /// # Errors
    /// If values are missing, or candle's.
    pub fn rows(
        &self,
        wanted: &[Arc<WantedRows>],
        pulled: &mut [Vec<f32>],
        device: &Device,
    ) -> Result<StepRows> {
        let tables = self.0.iter().zip(wanted).zip(pulled);
        let rows = tables.map(|((table, wanted), pulled)| {
            let width = table.spec.dimension as usize;
            let (count, mut values) = (wanted.ids.len(), std::mem::take(pulled));
            if values.len() < count * width {
                bail!(
                    "{} of {count} rows of table {:?} were pulled",
                    values.len() / width,
                    table.spec.name
                );
            }
            // candle has no tensors without elements, so a step without ids gets one row of zeros.
            values.resize(count.max(1) * width, 0.0);
            Var::from_vec(values, (count.max(1), width), device)
        });
        rows.collect::<Result<_>>().map(StepRows)
    }
}

impl Declared {
    /// Returns whether this table and another have the same ids in each step.
    fn has_ids_of(&self, other: &Self) -> bool {
        (&self.columns, self.separate) == (&other.columns, other.separate)
    }

    /// Copies the indices of rows in batches from another table that has the same ids.
    fn share_places(&self, other: &Self, batches: &mut [Batch]) -> Result<()> {
        for batch in batches {
            for column in &self.columns {
                let places = batch.rows_of(&other.spec.name, column)?.clone();
                batch.set_rows(&self.spec.name, column, places);
            }
        }
        Ok(())
    }

    fn distinct(&self, number: usize, batches: &mut [Batch]) -> Result<Arc<WantedRows>> {
        let mut ids = Distinct::default();
        for batch in &*batches {
            for column in &self.columns {
                let salt = self.separate.then(|| column_salt(column));
                ids.add(batch.ids_of(column)?, salt)?;
            }
        }
        let (ids, places) = ids.finish();
        let mut places = places.as_slice();
        for batch in batches {
            for column in &self.columns {
                let of = batch.ids_of(column)?;
                let (own, rest) = places.split_at(of.elem_count());
                places = rest;
                let own = Tensor::from_slice(own, of.shape(), &Device::Cpu)?;
                batch.set_rows(&self.spec.name, column, own);
            }
        }
        Ok(Arc::new(WantedRows { table: number, ids }))
    }
}

/// The rows of a step, a variable for each table.
#[derive(Debug)]
pub struct StepRows(Vec<Var>);

impl StepRows {
    /// Returns the variables, in the order of the tables.
    pub fn vars(&self) -> &[Var] {
        &self.0
    }

    /// Returns the gradients of each table's rows, row after row; zeros if the loss does not depend on the table.
    pub fn gradients(&self, store: &GradStore) -> Result<Vec<Vec<f32>>> {
        let of = |rows: &Var| match store.get(rows) {
            Some(gradient) => gradient.flatten_all()?.to_vec1(),
            None => Ok(vec![0.0; rows.elem_count()]),
        };
        self.0.iter().map(of).collect()
    }
}

/// Returns what a step must pull to have these rows. Tables without rows are left out.
pub fn wants(rows: &[Arc<WantedRows>]) -> impl Iterator<Item = Want> {
    let with_rows = rows.iter().filter(|rows| !rows.ids.is_empty());
    with_rows.map(|rows| Want::Rows(Arc::clone(rows)))
}

/// Returns the gradients of a step's rows. `values` has the gradients of each table, row after row.
pub fn gradients(rows: &[Arc<WantedRows>], values: Vec<Vec<f32>>) -> Vec<RowGradients> {
    let gradients = rows.iter().zip(values).map(|(rows, mut values)| {
        if rows.ids.is_empty() {
            // The row that stands for none (see `ModelTables::rows`).
            values.clear();
        }
        RowGradients {
            rows: Arc::clone(rows),
            values: values.into(),
        }
    });
    gradients.collect()
}
