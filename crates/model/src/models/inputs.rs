use candle_core::{DType, Error, Result, Tensor, bail};
use candle_nn::{Init, VarBuilder};
use nn::Embedding;
use shared_proto::hash::{FNV_START, fnv1a, mix};
use shared_proto::table::Initializer;

use crate::input::{Field, ValueType};
use crate::tables::{Embeddings, Table};
use crate::{Batch, Feature, Ragged, Setup};

/// The inputs of a model: numbers, which are joined into one row for each sample, and ids.
pub(super) struct Inputs {
    numbers: Vec<String>,
    /// The length of the row of numbers; 0 if there are none.
    pub(super) width: usize,
    ids: Vec<Ids>,
    dtype: DType,
}

/// The most ids of an input whose vectors are a variable.
const MOST_CATEGORIES: usize = 1 << 32;

/// An input of ids.
struct Ids {
    name: String,
    /// Each id is below this number.
    categories: usize,
    /// The number of ids in each sample; `None` if it differs between samples.
    count: Option<usize>,
}

impl Inputs {
    /// Returns all inputs of the data.
    pub(super) fn new(setup: &Setup, vars: &VarBuilder) -> Result<Self> {
        match setup.data.inputs.is_empty() {
            true => bail!("the data has no input"),
            false => Self::some_of(setup, vars, |_| true),
        }
    }

    /// Returns the inputs of the data for whose names `takes` returns true.
    pub(super) fn some_of(
        setup: &Setup,
        vars: &VarBuilder,
        takes: impl Fn(&str) -> bool,
    ) -> Result<Self> {
        let mut inputs = Self {
            numbers: Vec::new(),
            width: 0,
            ids: Vec::new(),
            dtype: vars.dtype(),
        };
        let fields = setup.data.inputs.iter();
        for field in fields.filter(|field| takes(&field.name)) {
            let is_id = matches!(field.values, ValueType::U32 | ValueType::I64);
            match field.categories {
                Some(categories) if is_id => inputs.ids.push(Ids {
                    name: field.name.clone(),
                    categories: categories as usize,
                    count: (!field.ragged).then(|| field.elements()),
                }),
                None if !is_id && !field.ragged => {
                    inputs.numbers.push(field.name.clone());
                    inputs.width += field.elements();
                }
                _ => return Err(unknown(field)),
            }
        }
        Ok(inputs)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.width == 0 && self.ids.is_empty()
    }

    /// Returns a key for each sample, which is the same for samples with the same ids. Only inputs with the same number
    /// of ids in each sample count; `None` if the data has no such input.
    pub(super) fn keys(&self, batch: &Batch) -> Result<Option<Vec<i64>>> {
        let mut hashes: Option<Vec<u64>> = None;
        for ids in self.ids.iter().filter(|ids| ids.count.is_some()) {
            let ids = batch.input_of(&ids.name)?.to_dtype(DType::I64)?;
            let ids = ids.reshape((ids.dim(0)?, ()))?.to_vec2::<i64>()?;
            let hashes = hashes.get_or_insert_with(|| vec![FNV_START; ids.len()]);
            for (hash, ids) in hashes.iter_mut().zip(ids) {
                for id in ids {
                    *hash = fnv1a(*hash, &id.to_le_bytes());
                }
            }
        }
        let key = |hash: u64| mix(hash).cast_signed();
        Ok(hashes.map(|hashes| hashes.into_iter().map(key).collect()))
    }

    /// Returns the numbers of a batch, of shape `[samples, width]`; `None` if the data has no numbers.
    pub(super) fn numbers(&self, batch: &Batch) -> Result<Option<Tensor>> {
        let row = |name: &String| {
            let values = batch.input_of(name)?.to_dtype(self.dtype)?;
            values.reshape((values.dim(0)?, ()))
        };
        match self.numbers.as_slice() {
            [] => Ok(None),
            [name] => row(name).map(Some),
            names => {
                let rows = names.iter().map(row).collect::<Result<Vec<_>>>()?;
                Tensor::cat(&rows, 1).map(Some)
            }
        }
    }

    /// Creates the vectors of ids, named `name`: a table with rows on the servers if the job sets `model.tables`,
    /// otherwise a variable `name.INPUT.weight` of shape `[categories, size]` for each input of ids.
    pub(super) fn vectors_of(
        &self,
        setup: &Setup,
        name: &str,
        size: usize,
        init: Init,
        vars: &VarBuilder,
    ) -> Result<Vectors> {
        if setup.settings.tables {
            return self.table(setup, name, size, init);
        }
        if let Some(ids) = self.ids.iter().find(|ids| ids.categories > MOST_CATEGORIES) {
            bail!(
                "input {:?} has ids up to {}, too many for a variable with a vector of each; set model.tables = true",
                ids.name,
                ids.categories
            );
        }
        let vars = vars.pp(name);
        let table =
            |ids: &Ids| Embedding::with_init(ids.categories, size, init, vars.pp(&ids.name));
        let weights = self.ids.iter().map(table).collect::<Result<_>>()?;
        Ok(Vectors::Variables(weights))
    }

    /// Creates a table with rows on the servers for all inputs of ids.
    pub(super) fn table(
        &self,
        setup: &Setup,
        name: &str,
        size: usize,
        init: Init,
    ) -> Result<Vectors> {
        let Some(first) = self.ids.first() else {
            bail!(
                "the data has no input of ids, so table {name:?} would have no rows; the inputs are {}",
                setup.data.input_names()
            );
        };
        let mut table = Table::dim(size as u32).initializer(initializer(init)?);
        for ids in &self.ids {
            table = table.column(&ids.name);
        }
        if self.ids.iter().any(|ids| ids.name != first.name) {
            table = table.separate_columns();
        }
        setup.table(name, table).map(Vectors::Table)
    }

    /// Returns the vectors of a batch's ids, for each input of ids.
    pub(super) fn vectors(&self, vectors: &Vectors, batch: &Batch) -> Result<Vec<Looked>> {
        let looked = |(number, ids): (usize, &Ids)| match vectors {
            Vectors::Variables(weights) => ids.variable(&weights[number], batch),
            Vectors::Table(table) => ids.rows(table, batch),
        };
        self.ids.iter().enumerate().map(looked).collect()
    }

    /// Returns the number of vectors that a sample has side by side. A ragged input has one, the sum of its vectors.
    pub(super) fn vector_count(&self) -> usize {
        self.ids.iter().map(|ids| ids.count.unwrap_or(1)).sum()
    }
}

fn unknown(field: &Field) -> Error {
    Error::msg(format!(
        "input {field} is neither numbers nor ids below a number that the data source gives; write a model of your own for it"
    ))
}

/// Converts the initial values of a variable to those of a table's rows.
fn initializer(init: Init) -> Result<Initializer> {
    Ok(match init {
        Init::Const(0.0) => Initializer::Zeros,
        Init::Randn { mean: 0.0, stdev } => Initializer::Normal {
            deviation: stdev as f32,
        },
        other => bail!("rows of tables cannot begin with {other:?}"),
    })
}

impl Ids {
    /// Returns the rows of a variable for the ids of a batch.
    fn variable(&self, weight: &Embedding, batch: &Batch) -> Result<Looked> {
        match batch.inputs().get(&self.name) {
            Some(Feature::Dense(ids)) => {
                let ids = ids.to_dtype(DType::U32)?;
                let ids = ids.reshape((ids.dim(0)?, self.count.unwrap_or(1)))?;
                weight.forward(&ids).map(Looked::Dense)
            }
            Some(Feature::Ragged(ids)) if ids.values.elem_count() == 0 => {
                // The weight has a gradient in each step, also if no sample of a batch has an id.
                let none = Tensor::zeros(1, DType::U32, ids.values.device())?;
                let rows = weight.forward(&none)?;
                // candle computes no gradient through a product with the number 0.
                Ok(Looked::none((&rows * rows.zeros_like()?)?, none, ids))
            }
            Some(Feature::Ragged(ids)) => {
                let rows = weight.forward(&ids.values.to_dtype(DType::U32)?)?;
                Looked::ragged(rows, ids)
            }
            None => bail!("the batch has no input {:?}", self.name),
        }
    }

    /// Returns the rows of a table for the ids of a batch.
    fn rows(&self, table: &Embeddings, batch: &Batch) -> Result<Looked> {
        match batch.inputs().get(&self.name) {
            Some(Feature::Dense(_)) => {
                let rows = table.all_rows(batch, &self.name)?;
                let size = rows.dim(1)?;
                let shape = (batch.samples(), self.count.unwrap_or(1), size);
                rows.reshape(shape).map(Looked::Dense)
            }
            Some(Feature::Ragged(ids)) if ids.values.elem_count() == 0 => {
                let device = ids.values.device();
                let rows = Tensor::zeros((1, table.dimension()), DType::F32, device)?;
                let none = Tensor::zeros(1, DType::U32, device)?;
                Ok(Looked::none(rows, none, ids))
            }
            Some(Feature::Ragged(ids)) => Looked::ragged(table.all_rows(batch, &self.name)?, ids),
            None => bail!("the batch has no input {:?}", self.name),
        }
    }
}

/// The vectors of ids.
pub(super) enum Vectors {
    /// A variable for each input of ids.
    Variables(Vec<Embedding>),
    /// A table for all inputs of ids.
    Table(Embeddings),
}

/// The vectors of the ids of a batch, each multiplied by the weight of its id.
pub(super) enum Looked {
    /// Of shape `[samples, ids, size]`.
    Dense(Tensor),
    /// The vectors of a ragged input.
    Ragged {
        /// Of shape `[ids of all samples, size]`.
        rows: Tensor,
        /// The sample of each row.
        owners: Tensor,
        samples: usize,
    },
}

impl Looked {
    /// Returns the vectors of a batch in which no sample has an id. `rows` is a single row of zeros.
    fn none(rows: Tensor, owners: Tensor, ids: &Ragged) -> Self {
        Self::Ragged {
            rows,
            owners,
            samples: ids.offsets.len() - 1,
        }
    }

    fn ragged(mut rows: Tensor, ids: &Ragged) -> Result<Self> {
        if let Some(weights) = &ids.weights {
            let weights = weights.to_dtype(rows.dtype())?;
            rows = rows.broadcast_mul(&weights.unsqueeze(1)?)?;
        }
        let owners = ids.offsets.windows(2).enumerate();
        let owners = owners.flat_map(|(i, ends)| std::iter::repeat_n(i as u32, ends[1] - ends[0]));
        Ok(Self::Ragged {
            owners: Tensor::from_iter(owners, rows.device())?,
            samples: ids.offsets.len() - 1,
            rows,
        })
    }

    /// Returns the sum of each sample's vectors, of shape `[samples, size]`.
    pub(super) fn sum(&self) -> Result<Tensor> {
        match self {
            Self::Dense(vectors) => nn::sum_of_vectors(vectors),
            Self::Ragged {
                rows,
                owners,
                samples,
            } => {
                let zeros = Tensor::zeros((*samples, rows.dim(1)?), rows.dtype(), rows.device())?;
                zeros.index_add(owners, rows, 0)
            }
        }
    }

    /// Returns the squares of all elements.
    pub(super) fn squares(&self) -> Result<Self> {
        Ok(match self {
            Self::Dense(vectors) => Self::Dense(vectors.sqr()?),
            Self::Ragged {
                rows,
                owners,
                samples,
            } => Self::Ragged {
                rows: rows.sqr()?,
                owners: owners.clone(),
                samples: *samples,
            },
        })
    }

    /// Returns each sample's vectors side by side, or their sum if the input is ragged.
    pub(super) fn joined(&self) -> Result<Tensor> {
        match self {
            Self::Dense(vectors) => vectors.flatten_from(1),
            Self::Ragged { .. } => self.sum(),
        }
    }
}
