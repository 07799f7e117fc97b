//! A field of all samples, held in memory.

use std::ops::Range;

use half::f16;
use shared_proto::payload;

use super::field::{Field, Scale, ValueType};
use crate::error::InputError;

/// The number of values that are converted to bytes at once for the digest.
const DIGEST_PART: usize = 1 << 16;

/// A field of all samples, with its values in their own type, for example bytes.
#[derive(Clone, Debug)]
pub struct Column {
    field: Field,
    values: Values,
    /// For bytes that become `f32` in a batch: the number by which each byte is divided. `None` if a batch has the values
    /// as they are.
    divisor: Option<f32>,
    /// For ragged fields: the index of the first value of each sample, and then the end of the last sample.
    offsets: Option<Vec<usize>>,
    /// For ragged fields: the weight of each value; `None` if all values have the same weight.
    weights: Option<Vec<f32>>,
}

/// A column of a batch.
#[derive(Clone, Debug)]
pub struct BatchColumn {
    /// The column's name, and the type and shape of its values in each sample.
    pub field: Field,
    /// The values of all samples, one after the other.
    pub values: Values,
    /// For ragged fields: the index in `values` of the first value of each sample, and then the end of the last sample.
    pub offsets: Option<Vec<usize>>,
    /// For ragged fields: the weight of each value; `None` if all values have the same weight.
    pub weights: Option<Vec<f32>>,
}

/// Values of one type.
#[derive(Clone, Debug)]
pub enum Values {
    /// Bytes.
    U8(Vec<u8>),
    /// Numbers of half precision.
    F16(Vec<f16>),
    /// Numbers.
    F32(Vec<f32>),
    /// Ids.
    U32(Vec<u32>),
    /// Ids of any size.
    I64(Vec<i64>),
}

/// Runs the same expression for values of each type.
macro_rules! for_each_type {
    ($of:expr, $values:ident => $body:expr) => {
        match $of {
            Values::U8($values) => $body,
            Values::F16($values) => $body,
            Values::F32($values) => $body,
            Values::U32($values) => $body,
            Values::I64($values) => $body,
        }
    };
}

/// Runs the same expression for values of each type. The results become values of the same type.
macro_rules! map_type {
    ($of:expr, $values:ident => $body:expr) => {
        match $of {
            Values::U8($values) => Values::U8($body),
            Values::F16($values) => Values::F16($body),
            Values::F32($values) => Values::F32($body),
            Values::U32($values) => Values::U32($body),
            Values::I64($values) => Values::I64($body),
        }
    };
}

impl Values {
    /// Returns the number of values.
    pub fn len(&self) -> usize {
        for_each_type!(self, values => values.len())
    }

    /// Returns whether there are no values.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the type of the values.
    pub fn value_type(&self) -> ValueType {
        match self {
            Self::U8(_) => ValueType::U8,
            Self::F16(_) => ValueType::F16,
            Self::F32(_) => ValueType::F32,
            Self::U32(_) => ValueType::U32,
            Self::I64(_) => ValueType::I64,
        }
    }
}

impl Column {
    /// Returns a column of numbers. Each sample has this shape, and `values` has one sample after another.
    pub fn numbers(name: &str, shape: Vec<usize>, values: Vec<f32>) -> Self {
        Self::new(Field::numbers(name, shape), Values::F32(values))
    }

    /// Returns a column of bytes, for example of pictures. A batch has each byte as an `f32`, divided by `divisor`.
    pub fn bytes(name: &str, shape: Vec<usize>, values: Vec<u8>, divisor: f32) -> Self {
        Self {
            divisor: Some(divisor),
            ..Self::new(Field::numbers(name, shape), Values::U8(values))
        }
    }

    /// Returns a column of one id in each sample, below `categories`: a category, or a class to predict.
    pub fn category(name: &str, ids: Vec<u32>, categories: u64) -> Self {
        Self::new(Field::category(name, categories), Values::U32(ids))
    }

    /// Returns a target that is 0 or 1.
    pub fn binary(name: &str, values: Vec<f32>) -> Self {
        Self::new(Field::binary(name), Values::F32(values))
    }

    /// Returns a column of values of any type. Batches have the values in the same type.
    pub fn values(name: &str, shape: Vec<usize>, values: Values) -> Self {
        let field = Field {
            values: values.value_type(),
            ..Field::numbers(name, shape)
        };
        Self::new(field, values)
    }

    /// Sets the scale by which the values of a target have been standardised.
    #[must_use]
    pub fn scaled(mut self, scale: Option<Scale>) -> Self {
        self.field.scale = scale;
        self
    }

    /// Marks the values as ids, each below `categories`.
    #[must_use]
    pub fn below(mut self, categories: u64) -> Self {
        self.field.categories = Some(categories);
        self
    }

    /// Returns a column with a list of ids, of any length, for each sample. Sample `i` has the ids from `offsets[i]` to
    /// `offsets[i + 1]`. `weights` has the weight of each id; none if all ids have the same weight. If `categories` is
    /// given, each id is below it.
    pub fn ragged(
        name: &str,
        ids: Values,
        offsets: Vec<usize>,
        weights: Option<Vec<f32>>,
        categories: Option<u64>,
    ) -> Self {
        let field = Field {
            values: ids.value_type(),
            categories,
            ragged: true,
            ..Field::numbers(name, Vec::new())
        };
        Self {
            offsets: Some(offsets),
            weights,
            ..Self::new(field, ids)
        }
    }

    fn new(field: Field, values: Values) -> Self {
        Self {
            field,
            values,
            divisor: None,
            offsets: None,
            weights: None,
        }
    }

    /// Returns the column's field: its name, and the type and shape of its values.
    pub fn field(&self) -> &Field {
        &self.field
    }

    /// Returns the number of samples.
    ///
    /// # Errors
    /// [`InputError::Invalid`] if the values are no whole number of samples, if offsets or weights do not fit the
    /// values, or if an id is not below the number of categories.
    pub fn samples(&self) -> Result<usize, InputError> {
        let (name, found) = (&self.field.name, self.values.len());
        let wrong = |what| Err(InputError::Invalid(format!("{name:?}: {what}")));
        if let Some(limit) = self.field.categories
            && let Some(id) = self.beyond(limit)
        {
            return wrong(format!(
                "{id} is not below {limit}, the number of categories, or is no whole number"
            ));
        }
        if let Some(offsets) = &self.offsets {
            let ordered = offsets.is_sorted() && offsets.last() == Some(&found);
            let weighted = self.weights.as_ref().is_none_or(|w| w.len() == found);
            return match ordered && weighted {
                true => Ok(offsets.len() - 1),
                false => wrong(format!("offsets or weights do not fit the {found} values")),
            };
        }
        match self.field.elements() {
            0 => wrong(format!("shape {:?} has no values", self.field.shape)),
            size if found % size != 0 => wrong(format!(
                "{found} values are no whole number of samples; each has shape {:?}, which is {size} values",
                self.field.shape
            )),
            size => Ok(found / size),
        }
    }

    /// Returns the first id that is not a whole number below `limit`; `None` if all are.
    fn beyond(&self, limit: u64) -> Option<String> {
        let ids = |id: &i128| *id < 0 || *id >= i128::from(limit);
        let integer = |id: Option<i128>| id.map(|id| id.to_string());
        match &self.values {
            Values::U32(values) => integer(values.iter().map(|v| i128::from(*v)).find(ids)),
            Values::I64(values) => integer(values.iter().map(|v| i128::from(*v)).find(ids)),
            Values::U8(values) => integer(values.iter().map(|v| i128::from(*v)).find(ids)),
            Values::F32(values) => {
                let fits = |v: &f32| *v >= 0.0 && v.fract() == 0.0 && f64::from(*v) < limit as f64;
                values.iter().find(|v| !fits(v)).map(f32::to_string)
            }
            Values::F16(_) => None,
        }
    }

    /// Returns the values in the type in which the column holds them.
    pub(crate) fn plain_values(&self) -> &Values {
        &self.values
    }

    /// Converts the column to a column of a batch.
    pub fn into_batch(self) -> BatchColumn {
        BatchColumn {
            values: match (self.values, self.divisor) {
                (Values::U8(values), Some(divisor)) => {
                    let scaled = values.iter().map(|value| f32::from(*value) / divisor);
                    Values::F32(scaled.collect())
                }
                (values, _) => values,
            },
            field: self.field,
            offsets: self.offsets,
            weights: self.weights,
        }
    }

    /// Copies the samples at these indices, in this order, to a new column.
    pub(crate) fn select(&self, samples: &[u32]) -> Self {
        let (values, offsets, weights) = match &self.offsets {
            None => {
                let size = self.field.elements();
                (
                    map_type!(&self.values, values => rows(values, size, samples)),
                    None,
                    None,
                )
            }
            Some(offsets) => {
                let mut ends = vec![0];
                for range in ranges(offsets, samples) {
                    ends.push(ends.last().copied().unwrap_or(0) + range.len());
                }
                let values = map_type!(&self.values, values => parts(values, offsets, samples));
                let weights = self.weights.as_ref();
                (
                    values,
                    Some(ends),
                    weights.map(|weights| parts(weights, offsets, samples)),
                )
            }
        };
        Self {
            field: self.field.clone(),
            values,
            divisor: self.divisor,
            offsets,
            weights,
        }
    }

    /// Appends a column of the same field.
    pub(crate) fn append(&mut self, more: Self) {
        let end = self.values.len();
        match (&mut self.values, more.values) {
            (Values::U8(values), Values::U8(more)) => values.extend(more),
            (Values::F16(values), Values::F16(more)) => values.extend(more),
            (Values::F32(values), Values::F32(more)) => values.extend(more),
            (Values::U32(values), Values::U32(more)) => values.extend(more),
            (Values::I64(values), Values::I64(more)) => values.extend(more),
            _ => unreachable!("columns of one field have one type"),
        }
        if let (Some(offsets), Some(more)) = (&mut self.offsets, more.offsets) {
            offsets.extend(more.into_iter().skip(1).map(|offset| end + offset));
        }
        if let (Some(weights), Some(more)) = (&mut self.weights, more.weights) {
            weights.extend(more);
        }
    }

    /// Passes the content to `hash`, for the digest of the data.
    pub(crate) fn digest(&self, hash: &mut dyn FnMut(&[u8])) {
        match &self.values {
            Values::U8(values) => hash(values),
            Values::F32(values) => {
                for part in values.chunks(DIGEST_PART) {
                    hash(&payload::to_bytes(part));
                }
            }
            Values::F16(values) => in_parts(values, |v| v.to_le_bytes(), hash),
            Values::U32(values) => in_parts(values, |v| v.to_le_bytes(), hash),
            Values::I64(values) => in_parts(values, |v| v.to_le_bytes(), hash),
        }
        if let Some(offsets) = &self.offsets {
            in_parts(offsets, |offset| (offset as u64).to_le_bytes(), hash);
        }
        if let Some(weights) = &self.weights {
            in_parts(weights, f32::to_le_bytes, hash);
        }
    }
}

fn in_parts<T: Copy, const N: usize>(
    values: &[T],
    bytes: impl Fn(T) -> [u8; N],
    hash: &mut dyn FnMut(&[u8]),
) {
    for part in values.chunks(DIGEST_PART) {
        let part: Vec<u8> = part.iter().flat_map(|value| bytes(*value)).collect();
        hash(&part);
    }
}

fn rows<T: Copy>(values: &[T], size: usize, samples: &[u32]) -> Vec<T> {
    let mut rows = Vec::with_capacity(size * samples.len());
    for sample in samples {
        rows.extend_from_slice(&values[*sample as usize * size..][..size]);
    }
    rows
}

/// Returns the range of values of each of these samples.
fn ranges<'a>(offsets: &'a [usize], samples: &'a [u32]) -> impl Iterator<Item = Range<usize>> + 'a {
    let range = |sample: &u32| offsets[*sample as usize]..offsets[*sample as usize + 1];
    samples.iter().map(range)
}

/// Returns the values of these samples of a ragged field.
fn parts<T: Copy>(values: &[T], offsets: &[usize], samples: &[u32]) -> Vec<T> {
    let parts = ranges(offsets, samples).map(|range| &values[range]);
    parts.flatten().copied().collect()
}

/// Converts columns of `rows` numbers each to a vector of rows.
pub(crate) fn by_rows(columns: &[Vec<f32>], rows: usize) -> Vec<f32> {
    /// The number of rows that are written together, so that they stay in the cache until all columns are written.
    const BLOCK: usize = 128;
    let mut all = vec![0.0; rows * columns.len()];
    for (block, start) in all
        .chunks_mut(BLOCK * columns.len())
        .zip((0..).step_by(BLOCK))
    {
        for (number, column) in columns.iter().enumerate() {
            let to = block.iter_mut().skip(number).step_by(columns.len());
            for (to, value) in to.zip(&column[start..]) {
                *to = *value;
            }
        }
    }
    all
}
