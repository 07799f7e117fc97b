//! The named fields of a sample.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::error::InputError;

/// The type of values in a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValueType {
    /// Bytes.
    U8,
    /// Numbers of half precision.
    F16,
    /// Numbers of single precision.
    F32,
    /// Ids below 2^32.
    U32,
    /// Ids of any size.
    I64,
}

impl fmt::Display for ValueType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::U8 => "u8",
            Self::F16 => "f16",
            Self::F32 => "f32",
            Self::U32 => "u32",
            Self::I64 => "i64",
        })
    }
}

/// The standardisation of a target: the model learns `(label - mean) / deviation`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scale {
    /// The mean of the training labels.
    pub mean: f64,
    /// The standard deviation of the training labels, or 1 if all labels are equal.
    pub deviation: f64,
}

impl Scale {
    /// Returns a label as the model learns it.
    pub fn apply(&self, label: f64) -> f64 {
        (label - self.mean) / self.deviation
    }

    /// Returns a prediction in the unit of the labels.
    pub fn undo(&self, output: f64) -> f64 {
        output * self.deviation + self.mean
    }
}

/// A part of each sample: an input of the model, or a target.
#[derive(Clone, Debug, PartialEq)]
pub struct Field {
    /// The name of the field in the data, for example the name of a column, or `image`.
    pub name: String,
    /// The type of the values in a batch.
    pub values: ValueType,
    /// The shape of the values in one sample; empty for a single value.
    pub shape: Vec<usize>,
    /// The number below which all ids are; 2 for a target that is 0 or 1; `None` for other numbers, and for ids without a
    /// limit.
    pub categories: Option<u64>,
    /// True if samples have different numbers of values.
    pub ragged: bool,
    /// The standardisation of a target of numbers; `None` if the model learns the labels as they are.
    pub scale: Option<Scale>,
}

impl Field {
    /// Returns a field of numbers of this shape.
    pub fn numbers(name: &str, shape: Vec<usize>) -> Self {
        Self {
            name: name.to_owned(),
            values: ValueType::F32,
            shape,
            categories: None,
            ragged: false,
            scale: None,
        }
    }

    /// Returns a field of one id below `categories`: a category, or a class to predict.
    pub fn category(name: &str, categories: u64) -> Self {
        Self {
            name: name.to_owned(),
            values: ValueType::U32,
            shape: Vec::new(),
            categories: Some(categories),
            ragged: false,
            scale: None,
        }
    }

    /// Returns a target that is 0 or 1, as a number.
    pub fn binary(name: &str) -> Self {
        Self {
            categories: Some(2),
            ..Self::numbers(name, Vec::new())
        }
    }

    /// Returns the number of values in one sample.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// The fields of each sample of a data set.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Signature {
    /// The inputs of the model.
    pub inputs: Vec<Field>,
    /// The targets that the model predicts.
    pub targets: Vec<Field>,
}

impl Signature {
    /// Returns the names of the inputs, for messages.
    pub fn input_names(&self) -> String {
        let names: Vec<&str> = self.inputs.iter().map(|field| &*field.name).collect();
        names.join(", ")
    }

    /// Returns the only input.
    ///
    /// # Errors
    /// [`InputError::Fields`] lists the inputs if there is not exactly one.
    pub fn input(&self) -> Result<&Field, InputError> {
        only(&self.inputs, "input")
    }

    /// Returns the only target.
    ///
    /// # Errors
    /// [`InputError::Fields`] lists the targets if there is not exactly one.
    pub fn target(&self) -> Result<&Field, InputError> {
        only(&self.targets, "target")
    }
}

fn only<'a>(fields: &'a [Field], what: &'static str) -> Result<&'a Field, InputError> {
    match fields {
        [field] => Ok(field),
        _ => Err(InputError::Fields {
            what,
            names: fields.iter().map(|field| field.name.clone()).collect(),
        }),
    }
}

impl fmt::Display for Field {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, shape, .. } = self;
        write!(f, "{name:?} of {} and shape {shape:?}", self.values)?;
        if self.ragged {
            f.write_str(", any number in each sample")?;
        }
        match self.categories {
            Some(categories) => write!(f, ", below {categories}"),
            None => Ok(()),
        }
    }
}
