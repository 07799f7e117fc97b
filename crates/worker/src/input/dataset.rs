//! A data set: samples to train on, and samples that are held out.

use std::fmt;
use std::io;
use std::ops::Range;
use std::path::Path;

use bytes::Bytes;
use candle_core::Device;
use sha2::{Digest, Sha256};
use shared_proto::job::run_dir;

use super::batch::Batch;
use super::error::InputError;
use super::field::Signature;
use super::fitted::Fitted;

/// The samples that a job trains on, and those that it holds out to measure.
pub struct Dataset {
    /// The samples to train on.
    pub training: Box<dyn Samples>,
    /// The samples that are held out.
    pub evaluation: Box<dyn Samples>,
    /// The fields of each sample.
    pub signature: Signature,
    /// The parameters of a table's columns, and the names of classes; none for data without either.
    pub transforms: Option<Fitted>,
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
        order: Order,
        positions: Range<u64>,
        device: &Device,
    ) -> Result<Batch, InputError>;

    /// Hands the content of all samples to `hash`. Workers with different content do not train together. By default
    /// nothing is handed over, and the data is not compared.
    fn digest(&self, _hash: &mut dyn FnMut(&[u8])) {}
}

/// The order of a pass over samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// The order in which the samples are stored, to measure.
    Stored,
    /// An order of the pass's own, to train.
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
            .field("signature", &self.signature)
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

/// Writes the parameters of columns and the names of classes beside a file of weights. For data without either, removes
/// those of an earlier run.
///
/// # Errors
/// [`InputError::Unwritable`].
pub(crate) fn save_transforms(
    transforms: Option<&Fitted>,
    weights: &Path,
) -> Result<(), InputError> {
    let path = weights.with_file_name(run_dir::TRANSFORMS);
    match transforms {
        Some(fitted) => fitted.save(&path),
        None => match std::fs::remove_file(&path) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                Err(InputError::Unwritable { path, source })
            }
            _ => Ok(()),
        },
    }
}

/// Reads one batch, and checks that it has a sample for each position.
///
/// # Errors
/// Those of the samples, and [`InputError::Invalid`] for a batch of another size.
pub(crate) fn read(
    samples: &mut dyn Samples,
    order: Order,
    positions: Range<u64>,
    device: &Device,
) -> Result<Batch, InputError> {
    let expected = (positions.end - positions.start) as usize;
    let batch = samples.read(order, positions.clone(), device)?;
    let mut sizes = batch.sizes()?;
    sizes.push(("the batch", batch.samples()));
    if let Some((name, size)) = sizes.into_iter().find(|(_, size)| *size != expected) {
        return Err(InputError::Invalid(format!(
            "the data source has returned {size} samples of {name} for the {expected} positions from {} on; `Samples::read` returns one for every position",
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
            _: Order,
            positions: Range<u64>,
            device: &Device,
        ) -> Result<Batch, InputError> {
            let left = (positions.end - positions.start) as usize - self.left_out;
            Ok(Batch::of(left)
                .with_input("x", Tensor::zeros((left, 3), DType::F32, device)?)
                .with_target("y", Tensor::zeros(left, DType::U32, device)?))
        }
    }

    #[test]
    fn a_batch_with_too_few_samples_is_refused() {
        let read = |left_out| {
            read(
                &mut Filtered { left_out },
                Order::Stored,
                2..6,
                &Device::Cpu,
            )
        };
        assert_eq!(read(0).unwrap().input().unwrap().dims(), [4, 3]);
        let error = read(1).unwrap_err().to_string();
        assert!(
            error.contains("3 samples of x") && error.contains("4 positions"),
            "{error}"
        );
    }
}
