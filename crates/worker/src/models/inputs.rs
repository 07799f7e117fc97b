use candle_core::{DType, Error, Result, Tensor, bail};
use candle_nn::{Init, VarBuilder};
use nn::Embedding;

use crate::input::Field;
use crate::model::{Batch, Feature, Ragged, Setup};

/// The inputs of data of any kind: numbers, which are joined into one row, and ids.
pub(super) struct Inputs {
    numbers: Vec<String>,
    /// The length of the row of numbers; 0 if there are none.
    pub(super) width: usize,
    ids: Vec<Ids>,
    dtype: DType,
}

/// An input of ids.
struct Ids {
    name: String,
    /// Each id is below this number.
    categories: usize,
    /// The ids of a sample; none if samples have different numbers of them.
    count: Option<usize>,
}

impl Inputs {
    pub(super) fn of(setup: &Setup, vars: &VarBuilder) -> Result<Self> {
        let mut inputs = Self {
            numbers: Vec::new(),
            width: 0,
            ids: Vec::new(),
            dtype: vars.dtype(),
        };
        for field in &setup.data.inputs {
            let is_id = matches!(field.dtype, DType::U32 | DType::I64);
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
        match setup.data.inputs.is_empty() {
            true => bail!("the data has no input"),
            false => Ok(inputs),
        }
    }

    /// Returns the numbers of a batch, of shape `[samples, width]`; none if the data has no numbers.
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

    /// Makes a table for each input of ids: `INPUT.weight` of shape `[categories, size]`.
    pub(super) fn tables(&self, size: usize, init: Init, vars: &VarBuilder) -> Result<Tables> {
        let table =
            |ids: &Ids| Embedding::with_init(ids.categories, size, init, vars.pp(&ids.name));
        self.ids
            .iter()
            .map(table)
            .collect::<Result<_>>()
            .map(Tables)
    }

    /// Returns the vectors of a batch's ids, for each input of ids.
    pub(super) fn vectors(&self, tables: &Tables, batch: &Batch) -> Result<Vec<Vectors>> {
        let pairs = self.ids.iter().zip(&tables.0);
        pairs
            .map(|(ids, table)| ids.vectors(table, batch))
            .collect()
    }

    /// Returns the number of vectors that a sample has, side by side.
    pub(super) fn vector_count(&self) -> usize {
        self.ids.iter().map(|ids| ids.count.unwrap_or(1)).sum()
    }
}

fn unknown(field: &Field) -> Error {
    Error::msg(format!(
        "input {field} is neither numbers nor ids below a number that the data source gives; write a model of your own for it"
    ))
}

impl Ids {
    /// Returns the vectors that a table has for the ids of a batch.
    fn vectors(&self, table: &Embedding, batch: &Batch) -> Result<Vectors> {
        match batch.inputs().get(&self.name) {
            Some(Feature::Dense(ids)) => {
                let ids = ids.to_dtype(DType::U32)?;
                let ids = ids.reshape((ids.dim(0)?, self.count.unwrap_or(1)))?;
                table.forward(&ids).map(Vectors::Dense)
            }
            Some(Feature::Ragged(ids)) => Vectors::ragged(table, ids),
            None => bail!("the batch has no input {:?}", self.name),
        }
    }
}

/// A vector for each id of each input of ids.
pub(super) struct Tables(Vec<Embedding>);

/// The vectors of the ids of a batch, each times the weight of its id.
pub(super) enum Vectors {
    /// Of shape `[samples, ids, size]`.
    Dense(Tensor),
    /// Any number in each sample.
    Ragged {
        /// Of shape `[ids of all samples, size]`.
        rows: Tensor,
        /// The sample of each row.
        owners: Tensor,
        samples: usize,
    },
}

impl Vectors {
    fn ragged(table: &Embedding, ids: &Ragged) -> Result<Self> {
        let samples = ids.offsets.len() - 1;
        let device = ids.values.device();
        if ids.values.elem_count() == 0 {
            // The table has a gradient in each step, also if no sample of a batch has an id.
            let none = Tensor::zeros(1, DType::U32, device)?;
            let rows = table.forward(&none)?;
            return Ok(Self::Ragged {
                // candle computes no gradient through a product with the number 0.
                rows: (&rows * rows.zeros_like()?)?,
                owners: none,
                samples,
            });
        }
        let mut rows = table.forward(&ids.values.to_dtype(DType::U32)?)?;
        if let Some(weights) = &ids.weights {
            let weights = weights.to_dtype(rows.dtype())?;
            rows = rows.broadcast_mul(&weights.unsqueeze(1)?)?;
        }
        let owners = ids.offsets.windows(2).enumerate();
        let owners = owners.flat_map(|(i, ends)| std::iter::repeat_n(i as u32, ends[1] - ends[0]));
        Ok(Self::Ragged {
            rows,
            owners: Tensor::from_iter(owners, device)?,
            samples,
        })
    }

    /// Returns the sum of each sample's vectors, of shape `[samples, size]`.
    pub(super) fn sum(&self) -> Result<Tensor> {
        match self {
            Self::Dense(vectors) => vectors.sum(1),
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

    /// Returns each sample's vectors side by side, or their sum if samples have different numbers of them.
    pub(super) fn joined(&self) -> Result<Tensor> {
        match self {
            Self::Dense(vectors) => vectors.flatten_from(1),
            Self::Ragged { .. } => self.sum(),
        }
    }
}
