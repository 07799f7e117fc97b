//! Samples that are held in memory, as small as they come.

use std::ops::Range;

use candle_core::{Device, Tensor, bail};
use shared_proto::payload;

use super::dataset::{Dataset, Pass, Samples};
use super::error::InputError;
use crate::model::Batch;
use crate::shuffle;

/// The values that are converted to bytes at once for the digest.
const DIGEST_PART: usize = 1 << 16;

/// Labelled samples in memory.
#[derive(Clone, Debug)]
pub struct InMemory {
    pub(super) features: Features,
    labels: Vec<u32>,
    sample_shape: Vec<usize>,
    /// False if workers need not have the same samples.
    compared: bool,
    /// The order of the pass that was read last.
    order: Option<(Pass, Vec<u32>)>,
}

#[derive(Clone, Debug)]
pub(super) enum Features {
    /// Numbers that are divided by the second when a batch is made: a quarter of the memory.
    Bytes(Vec<u8>, f32),
    Floats(Vec<f32>),
}

impl InMemory {
    /// Returns samples of single bytes, sample after sample. A model is given each byte divided by `divisor`.
    ///
    /// # Errors
    /// [`InputError::Invalid`] if there are not as many samples as labels.
    pub fn bytes(
        sample_shape: Vec<usize>,
        values: Vec<u8>,
        divisor: f32,
        labels: Vec<u32>,
    ) -> Result<Self, InputError> {
        Self::new(sample_shape, Features::Bytes(values, divisor), labels)
    }

    /// Returns samples of `f32`, sample after sample.
    ///
    /// # Errors
    /// [`InputError::Invalid`] if there are not as many samples as labels.
    pub fn floats(
        sample_shape: Vec<usize>,
        values: Vec<f32>,
        labels: Vec<u32>,
    ) -> Result<Self, InputError> {
        Self::new(sample_shape, Features::Floats(values), labels)
    }

    fn new(
        sample_shape: Vec<usize>,
        features: Features,
        labels: Vec<u32>,
    ) -> Result<Self, InputError> {
        let found = match &features {
            Features::Bytes(values, _) => values.len(),
            Features::Floats(values) => values.len(),
        };
        let size: usize = sample_shape.iter().product();
        if size == 0 || size.checked_mul(labels.len()) != Some(found) {
            return Err(InputError::Invalid(format!(
                "there are {found} values for {} labels; each sample has shape {sample_shape:?}, which is {size} values",
                labels.len()
            )));
        }
        Ok(Self {
            features,
            labels,
            sample_shape,
            compared: true,
            order: None,
        })
    }

    /// Lets workers train together without comparing these samples, because each worker makes them from the seed.
    #[must_use]
    pub fn not_compared(mut self) -> Self {
        self.compared = false;
        self
    }

    /// Returns the number of samples.
    pub fn len(&self) -> usize {
        self.labels.len()
    }

    /// Returns whether there are no samples.
    pub fn is_empty(&self) -> bool {
        self.labels.is_empty()
    }

    /// Returns the shape of each sample.
    pub fn sample_shape(&self) -> &[usize] {
        &self.sample_shape
    }

    /// Returns the highest label.
    fn highest_label(&self) -> Option<u32> {
        self.labels.iter().copied().max()
    }

    /// Returns a batch of the samples with these numbers, in this order.
    ///
    /// # Errors
    /// If no number is given, or one that is not there, or candle's.
    pub fn batch(&self, indices: &[u32], device: &Device) -> candle_core::Result<Batch> {
        if indices.is_empty() {
            bail!("a batch of no samples was asked for; it needs at least one");
        }
        if let Some(index) = indices.iter().find(|i| **i as usize >= self.len()) {
            bail!(
                "there is no sample {index}; there are {}, from 0",
                self.len()
            );
        }
        let size: usize = self.sample_shape.iter().product();
        let ranges = || {
            let start = |index: &u32| *index as usize * size;
            indices.iter().map(move |i| start(i)..start(i) + size)
        };
        let mut inputs: Vec<f32> = Vec::with_capacity(indices.len() * size);
        match &self.features {
            Features::Bytes(values, divisor) => {
                for range in ranges() {
                    inputs.extend(values[range].iter().map(|v| f32::from(*v) / divisor));
                }
            }
            Features::Floats(values) => {
                for range in ranges() {
                    inputs.extend_from_slice(&values[range]);
                }
            }
        }
        let targets: Vec<u32> = indices.iter().map(|i| self.labels[*i as usize]).collect();
        let mut shape = vec![indices.len()];
        shape.extend(&self.sample_shape);
        Ok(Batch {
            inputs: Tensor::from_vec(inputs, shape, device)?,
            targets: Tensor::from_vec(targets, indices.len(), device)?,
        })
    }

    /// Returns the samples with these numbers, in this order, as samples of their own.
    pub(super) fn select(&self, indices: &[u32]) -> Self {
        let size: usize = self.sample_shape.iter().product();
        let features = match &self.features {
            Features::Bytes(values, divisor) => {
                Features::Bytes(rows(values, size, indices), *divisor)
            }
            Features::Floats(values) => Features::Floats(rows(values, size, indices)),
        };
        Self {
            features,
            labels: rows(&self.labels, 1, indices),
            sample_shape: self.sample_shape.clone(),
            compared: self.compared,
            order: None,
        }
    }

    /// Returns the order of a pass: the number of the sample at each position.
    fn order(&mut self, pass: Pass) -> &[u32] {
        let samples = self.len();
        self.order.take_if(|(of, _)| *of != pass);
        let fresh = || match pass {
            Pass::Stored => (0u32..).take(samples).collect(),
            Pass::Shuffled { seed, epoch } => shuffle::order(seed, epoch, samples),
        };
        &self.order.get_or_insert_with(|| (pass, fresh())).1
    }
}

impl Dataset {
    /// Returns a data set of samples in memory.
    ///
    /// # Errors
    /// [`InputError::Invalid`] if either part is empty, if their shapes differ, or if a label is not below `classes`.
    pub fn in_memory(
        training: InMemory,
        evaluation: InMemory,
        classes: usize,
    ) -> Result<Self, InputError> {
        for (part, name) in [(&training, "to train on"), (&evaluation, "held out")] {
            if part.is_empty() {
                return Err(InputError::Invalid(format!(
                    "there is no sample {name}; at least one is needed"
                )));
            }
            if let Some(label) = part.highest_label().filter(|l| *l as usize >= classes) {
                return Err(InputError::Invalid(format!(
                    "a sample {name} has label {label}; labels must be below the number of classes, {classes}"
                )));
            }
        }
        if training.sample_shape() != evaluation.sample_shape() {
            return Err(InputError::Invalid(format!(
                "samples to train on have shape {:?}, those held out {:?}; give them the same shape",
                training.sample_shape(),
                evaluation.sample_shape()
            )));
        }
        Ok(Self {
            sample_shape: training.sample_shape().to_vec(),
            training: Box::new(training),
            evaluation: Box::new(evaluation),
            classes,
        })
    }
}

impl Samples for InMemory {
    fn count(&self) -> u64 {
        self.len() as u64
    }

    fn read(
        &mut self,
        pass: Pass,
        positions: Range<u64>,
        device: &Device,
    ) -> Result<Batch, InputError> {
        let order = self.order(pass);
        let samples = order.len();
        let range = positions.start as usize..positions.end as usize;
        let Some(indices) = order.get(range).map(<[u32]>::to_vec) else {
            return Err(candle_core::Error::msg(format!(
                "positions {} to {} are not in the data, which has {samples} samples",
                positions.start, positions.end,
            ))
            .into());
        };
        Ok(self.batch(&indices, device)?)
    }

    fn digest(&self, hash: &mut dyn FnMut(&[u8])) {
        if !self.compared {
            return;
        }
        match &self.features {
            Features::Bytes(values, _) => hash(values),
            Features::Floats(values) => {
                for part in values.chunks(DIGEST_PART) {
                    hash(&payload::to_bytes(part));
                }
            }
        }
        for part in self.labels.chunks(DIGEST_PART) {
            let bytes: Vec<u8> = part.iter().flat_map(|label| label.to_le_bytes()).collect();
            hash(&bytes);
        }
    }
}

fn rows<T: Copy>(values: &[T], size: usize, indices: &[u32]) -> Vec<T> {
    let row = |index: &u32| &values[*index as usize * size..][..size];
    indices.iter().flat_map(row).copied().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_that_do_not_fit_their_labels_are_refused() {
        let samples = |values, labels| InMemory::floats(vec![2], values, labels);
        assert!(samples(vec![0.0; 4], vec![0, 1]).is_ok());
        let error = samples(vec![0.0; 5], vec![0, 1]).unwrap_err().to_string();
        assert!(error.contains("5 values for 2 labels"), "{error}");
        assert!(InMemory::bytes(vec![0], vec![], 1.0, vec![3]).is_err());
    }

    #[test]
    fn each_pass_has_an_order_of_its_own() {
        let mut samples = InMemory::floats(vec![1], vec![0.0; 5], vec![0, 1, 2, 3, 4]).unwrap();
        let mut read = |pass, positions| -> Vec<u32> {
            let batch = samples.read(pass, positions, &Device::Cpu).unwrap();
            batch.targets.to_vec1().unwrap()
        };
        let shuffled = |epoch| Pass::Shuffled { seed: 7, epoch };
        let order = shuffle::order(7, 1, 5);
        assert_eq!(read(shuffled(1), 1..4), order[1..4]);
        assert_eq!(read(Pass::Stored, 1..4), [1, 2, 3]);
        assert_eq!(read(shuffled(2), 0..5), shuffle::order(7, 2, 5));
        assert_eq!(read(shuffled(1), 4..5), order[4..]);
        let beyond = samples.read(Pass::Stored, 4..6, &Device::Cpu).unwrap_err();
        assert!(beyond.to_string().contains("4 to 6"), "{beyond}");
    }
}
