//! A data set: samples to train on, and samples that are held out.

use std::fmt;
use std::ops::Range;

use bytes::Bytes;
use candle_core::Device;
use sha2::{Digest, Sha256};

use super::error::InputError;
use crate::model::Batch;

/// The samples that a job trains on, and those that it holds out to measure.
pub struct Dataset {
    /// The samples to train on.
    pub training: Box<dyn Samples>,
    /// The samples that are held out.
    pub evaluation: Box<dyn Samples>,
    /// The shape of each sample.
    pub sample_shape: Vec<usize>,
    /// The number of classes; labels are below it.
    pub classes: usize,
}

/// Samples that are read by position. The coordinator leases positions to workers; the samples themselves decide
/// which sample a position of a pass stands for, for example a place in a shuffled order, or a place in a range of
/// a file.
pub trait Samples: Send {
    /// Returns the number of samples, which is the number of positions in each pass.
    fn count(&self) -> u64;

    /// Reads the samples at these positions of a pass, as one batch. Each sample has one position in each pass, and
    /// it is the same on every worker.
    ///
    /// # Errors
    /// [`InputError`] names what cannot be read.
    fn read(
        &mut self,
        pass: Pass,
        positions: Range<u64>,
        device: &Device,
    ) -> Result<Batch, InputError>;

    /// Hands the content of all samples to `hash`. Workers with different content do not train together. By default
    /// nothing is handed over, and the data is not compared.
    fn digest(&self, _hash: &mut dyn FnMut(&[u8])) {}
}

/// A pass over samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// A pass in the order in which the samples are stored, to measure.
    Stored,
    /// A pass in an order of its own, to train.
    Shuffled {
        /// The job's seed.
        seed: u64,
        /// The number of the pass, from 0.
        epoch: u32,
    },
}

impl fmt::Debug for Dataset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dataset")
            .field("training", &self.training.count())
            .field("evaluation", &self.evaluation.count())
            .field("sample_shape", &self.sample_shape)
            .field("classes", &self.classes)
            .finish()
    }
}

impl Dataset {
    /// Returns the SHA-256 of all samples, by which the coordinator knows whether workers have the same data. It is
    /// empty for data that is not compared.
    pub fn digest(&self) -> Bytes {
        let mut hash = Sha256::new();
        let mut compared = false;
        for samples in [&self.training, &self.evaluation] {
            samples.digest(&mut |content| {
                compared = true;
                hash.update(content);
            });
        }
        match compared {
            true => Bytes::copy_from_slice(&hash.finalize()),
            false => Bytes::new(),
        }
    }
}

/// Reads one batch, and checks that it has a sample for each position.
///
/// # Errors
/// Those of the samples, and [`InputError::Invalid`] for a batch of another size.
pub(crate) fn read(
    samples: &mut dyn Samples,
    pass: Pass,
    positions: Range<u64>,
    device: &Device,
) -> Result<Batch, InputError> {
    let expected = (positions.end - positions.start) as usize;
    let batch = samples.read(pass, positions.clone(), device)?;
    let (inputs, targets) = (batch.inputs.dim(0)?, batch.targets.dim(0)?);
    if inputs != expected || targets != expected {
        return Err(InputError::Invalid(format!(
            "the data source has returned {inputs} inputs and {targets} targets for the {expected} positions from {} on; `Samples::read` returns one of each for every position",
            positions.start
        )));
    }
    Ok(batch)
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Tensor};

    /// A source that leaves out bad samples.
    struct Filtered {
        left_out: usize,
    }

    impl Samples for Filtered {
        fn count(&self) -> u64 {
            10
        }

        fn read(
            &mut self,
            _: Pass,
            positions: Range<u64>,
            device: &Device,
        ) -> Result<Batch, InputError> {
            let left = (positions.end - positions.start) as usize - self.left_out;
            Ok(Batch {
                inputs: Tensor::zeros((left, 3), DType::F32, device)?,
                targets: Tensor::zeros(left, DType::U32, device)?,
            })
        }
    }

    #[test]
    fn a_batch_with_too_few_samples_is_refused() {
        let read = |left_out| read(&mut Filtered { left_out }, Pass::Stored, 2..6, &Device::Cpu);
        assert_eq!(read(0).unwrap().inputs.dims(), [4, 3]);
        let error = read(1).unwrap_err().to_string();
        assert!(
            error.contains("3 inputs") && error.contains("4 positions"),
            "{error}"
        );
    }
}
