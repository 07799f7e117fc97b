//! Data sets: read whole, kept as small as they come, and made into batches.
//!
//! Everything here is deterministic: with the same files and seed, sample i is the same on every
//! worker. Files are not trusted: what is wrong with one is said with its name and the place in it.

mod csv;
mod digits;
mod idx;
mod random;

use std::io;
use std::path::PathBuf;

use bytes::Bytes;
use candle_core::{Device, Tensor, bail};
use sha2::{Digest, Sha256};
use shared_proto::job::{Data, DataKind};

use crate::model::Batch;

/// What is learnt from, and what is only measured.
#[derive(Clone, Debug)]
pub struct Dataset {
    /// Samples to learn from.
    pub training: Samples,
    /// Samples held out.
    pub evaluation: Samples,
    /// Shape of each sample.
    pub sample_shape: Vec<usize>,
    /// Labels are below this.
    pub classes: usize,
}

/// Labelled samples.
#[derive(Clone, Debug)]
pub struct Samples {
    features: Features,
    labels: Vec<u32>,
    sample_shape: Vec<usize>,
}

#[derive(Clone, Debug)]
enum Features {
    /// Numbers that are divided by the second when a batch is made: a quarter of the memory.
    Bytes(Vec<u8>, f32),
    Floats(Vec<f32>),
}

impl Dataset {
    /// SHA-256 of all samples: by it the coordinator knows whether workers have the same data.
    pub fn digest(&self) -> Bytes {
        let mut hash = Sha256::new();
        for samples in [&self.training, &self.evaluation] {
            match &samples.features {
                Features::Bytes(values, _) => hash.update(values),
                Features::Floats(values) => {
                    values.iter().for_each(|v| hash.update(v.to_le_bytes()));
                }
            }
            let labels = samples.labels.iter();
            labels.for_each(|label| hash.update(label.to_le_bytes()));
        }
        Bytes::copy_from_slice(&hash.finalize())
    }
}

impl Samples {
    /// How many.
    pub fn len(&self) -> usize {
        self.labels.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.labels.is_empty()
    }

    /// The samples of these numbers, in this order.
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

    /// The samples of these numbers, as samples of their own.
    fn select(&self, indices: &[u32]) -> Self {
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
        }
    }
}

fn rows<T: Copy>(values: &[T], size: usize, indices: &[u32]) -> Vec<T> {
    let row = |index: &u32| &values[*index as usize * size..][..size];
    indices.iter().flat_map(row).copied().collect()
}

/// Reads the data set that a job names. `seed` decides which samples of a CSV file are held
/// out, and what random ones are.
///
/// # Errors
/// What is wrong, in which file, and where in it.
pub fn load(data: &Data, seed: u64) -> Result<Dataset, InputError> {
    let place = || data.dir.as_deref().ok_or(InputError::NoPlace);
    match data.kind {
        DataKind::Digits => digits::load(),
        DataKind::Mnist | DataKind::FashionMnist => idx::load(place()?),
        DataKind::Csv => csv::load(place()?, data, seed),
        DataKind::Random => Ok(random::load(seed)),
    }
}

/// Why there is no data.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InputError {
    /// The job does not say where the files are.
    #[error("`data.dir` is absent; it must say where the data's files are")]
    NoPlace,
    /// A file is not there.
    #[error("{} has no {names}; put the file there, or let `data.dir` name another folder", folder.display())]
    Missing {
        /// Where it should be.
        folder: PathBuf,
        /// The names that it may have.
        names: String,
    },
    /// A file cannot be read.
    #[error("{} cannot be read: {source}", path.display())]
    Unreadable {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A binary file does not hold what it should.
    #[error("{}, byte {offset}: {problem}", path.display())]
    Bytes {
        /// Which file.
        path: PathBuf,
        /// Where, in its uncompressed content.
        offset: u64,
        /// What was found, and what was expected.
        problem: String,
    },
    /// A text file does not hold what it should.
    #[error("{}, line {line}: {problem}", path.display())]
    Line {
        /// Which file.
        path: PathBuf,
        /// Where, from 1.
        line: u64,
        /// What was found, and what was expected.
        problem: String,
    },
}
