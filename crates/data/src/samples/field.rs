//! The parts of a sample, by name.

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

/// The change of a target: the model learns `(label - mean) / deviation`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scale {
    /// The mean of the training labels.
    pub mean: f64,
    /// Their standard deviation, or 1 if all are equal.
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
    /// Its name, as in the data: a column, or `image`.
    pub name: String,
    /// The type of its values in a batch.
    pub values: ValueType,
    /// Its shape in one sample; empty for a single value.
    pub shape: Vec<usize>,
    /// For ids: each is below this number.
    pub categories: Option<u64>,
    /// True if samples have different numbers of values.
    pub ragged: bool,
    /// For targets that are numbers: how they were changed.
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

/// The parts of each sample of a data set.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Signature {
    /// The inputs of the model.
    pub inputs: Vec<Field>,
    /// What the model is to predict.
    pub targets: Vec<Field>,
}

impl Signature {
    /// Returns the names of the inputs, for messages.
    pub fn input_names(&self) -> String {
        let names: Vec<&str> = self.inputs.iter().map(|field| &*field.name).collect();
        names.join(", ")
    }

    /// Returns the input of data that has a single one.
    ///
    /// # Errors
    /// [`InputError::Fields`] lists the inputs otherwise.
    pub fn input(&self) -> Result<&Field, InputError> {
        only(&self.inputs, "input")
    }

    /// Returns the target of data that has a single one.
    ///
    /// # Errors
    /// [`InputError::Fields`] lists the targets otherwise.
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
