//! Samples that are computed together.

use std::collections::BTreeMap;
use std::ops::Range;

use candle_core::{Device, Result, Tensor, bail};

/// Samples that are computed together: named inputs and targets, each with one entry for each sample.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    samples: usize,
    inputs: BTreeMap<String, Feature>,
    targets: BTreeMap<String, Tensor>,
    weights: Option<Tensor>,
    /// For each table and column, the index of each id's row among the rows of the step, as `u32`.
    rows: BTreeMap<(String, String), Tensor>,
}

/// An input of a batch.
#[derive(Clone, Debug)]
pub enum Feature {
    /// A tensor of shape `[samples, ...shape of the field]`.
    Dense(Tensor),
    /// A list of values for each sample.
    Ragged(Ragged),
}

/// Lists of values, one for each sample, of any length.
#[derive(Clone, Debug)]
pub struct Ragged {
    /// The values of all samples, one after the other.
    pub values: Tensor,
    /// The index in `values` at which each sample begins, then the end of the last sample. There is one more offset
    /// than samples.
    pub offsets: Vec<usize>,
    /// The weight of each value, as `f32`; `None` if all values have the same weight.
    pub weights: Option<Tensor>,
}

impl Ragged {
    /// Returns the values of some of the samples.
    fn part(&self, samples: Range<usize>) -> Result<Self> {
        let Some(offsets) = self.offsets.get(samples.start..=samples.end) else {
            bail!("there are no samples {samples:?} in a batch");
        };
        let (start, end) = (offsets[0], offsets[samples.len()]);
        let part = |values: &Tensor| values.narrow(0, start, end - start);
        Ok(Self {
            values: part(&self.values)?,
            offsets: offsets.iter().map(|offset| offset - start).collect(),
            weights: self.weights.as_ref().map(part).transpose()?,
        })
    }
}

impl Batch {
    /// Returns a batch of this number of samples without inputs and targets.
    pub fn new(samples: usize) -> Self {
        Self {
            samples,
            ..Self::default()
        }
    }

    /// Adds an input of shape `[samples, ...]`.
    #[must_use]
    pub fn with_input(mut self, name: &str, values: Tensor) -> Self {
        self.inputs.insert(name.to_owned(), Feature::Dense(values));
        self
    }

    /// Adds an input that has a list of values for each sample.
    #[must_use]
    pub fn with_ragged(mut self, name: &str, values: Ragged) -> Self {
        self.inputs.insert(name.to_owned(), Feature::Ragged(values));
        self
    }

    /// Adds a target of shape `[samples, ...]`.
    #[must_use]
    pub fn with_target(mut self, name: &str, values: Tensor) -> Self {
        self.targets.insert(name.to_owned(), values);
        self
    }

    /// Sets the weights of the samples in the loss, `f32` of shape `[samples]`.
    #[must_use]
    pub fn with_weights(mut self, weights: Tensor) -> Self {
        self.weights = Some(weights);
        self
    }

    /// Returns the number of samples.
    pub fn samples(&self) -> usize {
        self.samples
    }

    /// Returns the only input.
    ///
    /// # Errors
    /// If there is not exactly one input, or if it is ragged.
    pub fn input(&self) -> Result<&Tensor> {
        match self.inputs.values().next() {
            Some(Feature::Dense(values)) if self.inputs.len() == 1 => Ok(values),
            _ => bail!(
                "the batch has no single dense input; ask for one of {:?} by its name",
                self.inputs.keys()
            ),
        }
    }

    /// Returns the dense input of this name.
    ///
    /// # Errors
    /// If there is no such input, or if it is ragged.
    pub fn input_of(&self, name: &str) -> Result<&Tensor> {
        match self.inputs.get(name) {
            Some(Feature::Dense(values)) => Ok(values),
            Some(Feature::Ragged(_)) => {
                bail!("input {name:?} has any number of values in each sample; ask with `ragged`")
            }
            None => bail!(
                "there is no input {name:?}; there are {:?}",
                self.inputs.keys()
            ),
        }
    }

    /// Returns the ragged input of this name, which has a list of values for each sample.
    ///
    /// # Errors
    /// If there is no such input, or if it is dense.
    pub fn ragged(&self, name: &str) -> Result<&Ragged> {
        match self.inputs.get(name) {
            Some(Feature::Ragged(values)) => Ok(values),
            Some(Feature::Dense(_)) => bail!("input {name:?} is dense; ask with `input_of`"),
            None => bail!(
                "there is no input {name:?}; there are {:?}",
                self.inputs.keys()
            ),
        }
    }

    /// Returns the ids of a column. Those of a ragged column are concatenated over all samples.
    pub(crate) fn ids_of(&self, column: &str) -> Result<&Tensor> {
        match self.inputs.get(column) {
            Some(Feature::Dense(values)) => Ok(values),
            Some(Feature::Ragged(ragged)) => Ok(&ragged.values),
            None => bail!("there is no input {column:?}"),
        }
    }

    /// Sets the index of the row of each id of a column, among the rows of the step.
    pub(crate) fn set_rows(&mut self, table: &str, column: &str, places: Tensor) {
        let key = (table.to_owned(), column.to_owned());
        self.rows.insert(key, places);
    }

    /// Returns the index of the row of each id of a column, among the rows of the step.
    pub(crate) fn rows_of(&self, table: &str, column: &str) -> Result<&Tensor> {
        let key = (table.to_owned(), column.to_owned());
        match self.rows.get(&key) {
            Some(places) => Ok(places),
            None => bail!("the rows of column {column:?} of table {table:?} were not looked up"),
        }
    }

    /// Returns all inputs by name.
    pub fn inputs(&self) -> &BTreeMap<String, Feature> {
        &self.inputs
    }

    /// Returns the only target.
    ///
    /// # Errors
    /// If there is not exactly one target.
    pub fn target(&self) -> Result<&Tensor> {
        match self.targets.values().next() {
            Some(values) if self.targets.len() == 1 => Ok(values),
            _ => bail!(
                "the batch has no single target; ask for one of {:?} by its name",
                self.targets.keys()
            ),
        }
    }

    /// Returns the target of this name.
    ///
    /// # Errors
    /// If there is no such target.
    pub fn target_of(&self, name: &str) -> Result<&Tensor> {
        match self.targets.get(name) {
            Some(values) => Ok(values),
            None => bail!(
                "there is no target {name:?}; there are {:?}",
                self.targets.keys()
            ),
        }
    }

    /// Returns the weights of the samples in the loss; `None` if all samples have the same weight.
    pub fn weights(&self) -> Option<&Tensor> {
        self.weights.as_ref()
    }

    /// Returns the dense inputs, by name.
    #[doc(hidden)]
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.inputs
            .iter()
            .filter_map(|(name, feature)| match feature {
                Feature::Dense(tensor) => Some((name.as_str(), tensor)),
                Feature::Ragged(_) => None,
            })
    }

    /// Returns a copy of the batch in a device's memory.
    ///
    /// # Errors
    /// candle's.
    #[doc(hidden)]
    pub fn to_device(&self, device: &Device) -> Result<Self> {
        let there = |values: &Tensor| values.to_device(device);
        let input = |feature: &Feature| -> Result<Feature> {
            Ok(match feature {
                Feature::Dense(values) => Feature::Dense(there(values)?),
                Feature::Ragged(values) => Feature::Ragged(Ragged {
                    values: there(&values.values)?,
                    offsets: values.offsets.clone(),
                    weights: values.weights.as_ref().map(there).transpose()?,
                }),
            })
        };
        let inputs = self.inputs.iter();
        let targets = self.targets.iter();
        Ok(Self {
            samples: self.samples,
            inputs: inputs
                .map(|(name, feature)| Ok((name.clone(), input(feature)?)))
                .collect::<Result<_>>()?,
            targets: targets
                .map(|(name, values)| Ok((name.clone(), there(values)?)))
                .collect::<Result<_>>()?,
            weights: self.weights.as_ref().map(there).transpose()?,
            rows: self
                .rows
                .iter()
                .map(|(key, places)| Ok((key.clone(), there(places)?)))
                .collect::<Result<_>>()?,
        })
    }

    /// Returns a batch of some of the samples, which shares the memory of this batch. It lacks the indices of table
    /// rows.
    ///
    /// # Errors
    /// If the batch does not have these samples, or candle's.
    pub fn part(&self, samples: Range<usize>) -> Result<Self> {
        let part = |values: &Tensor| values.narrow(0, samples.start, samples.len());
        let input = |feature: &Feature| -> Result<Feature> {
            Ok(match feature {
                Feature::Dense(values) => Feature::Dense(part(values)?),
                Feature::Ragged(values) => Feature::Ragged(values.part(samples.clone())?),
            })
        };
        let inputs = self.inputs.iter();
        let targets = self.targets.iter();
        Ok(Self {
            samples: samples.len(),
            inputs: inputs
                .map(|(name, feature)| Ok((name.clone(), input(feature)?)))
                .collect::<Result<_>>()?,
            targets: targets
                .map(|(name, values)| Ok((name.clone(), part(values)?)))
                .collect::<Result<_>>()?,
            weights: self.weights.as_ref().map(part).transpose()?,
            rows: BTreeMap::new(),
        })
    }
}
