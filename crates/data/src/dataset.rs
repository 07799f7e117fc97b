//! A data set: samples to train on, and samples that are held out.

use std::fmt;
use std::io;
use std::path::Path;

use bytes::Bytes;
use sha2::{Digest, Sha256};
use shared_proto::job::run_dir;

use crate::error::InputError;
use crate::features::fitted::Fitted;
use crate::samples::Samples;
use crate::samples::field::Signature;
use crate::samples::memory::{InMemory, check_equal};

/// The samples that a job trains on, and those that it holds out for evaluation.
pub struct Dataset {
    /// The samples to train on.
    pub training: Box<dyn Samples>,
    /// The samples that are held out.
    pub evaluation: Box<dyn Samples>,
    /// The fields of each sample.
    pub signature: Signature,
    /// The fitted parameters of columns, and the meaning of labels; `None` for data without either.
    pub transforms: Option<Fitted>,
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
    /// Returns a data set of samples in memory.
    ///
    /// # Errors
    /// [`InputError::Invalid`] if either part is empty, or if their fields differ.
    pub fn in_memory(training: InMemory, evaluation: InMemory) -> Result<Self, InputError> {
        for (part, name) in [(&training, "to train on"), (&evaluation, "held out")] {
            if part.is_empty() {
                return Err(InputError::Invalid(format!(
                    "there is no sample {name}; at least one is needed"
                )));
            }
        }
        let signature = training.signature();
        check_equal(&signature, &evaluation.signature())?;
        Ok(Self {
            signature,
            training: Box::new(training),
            evaluation: Box::new(evaluation),
            transforms: None,
        })
    }

    /// Returns the SHA-256 of all samples. The coordinator compares the digests of the workers to check that they have
    /// the same data. The digest is empty for data that is not compared.
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

/// Writes the parameters of columns and the meaning of labels to a file beside the weights. For data without either,
/// removes the file of an earlier run.
///
/// # Errors
/// [`InputError::Unwritable`].
pub fn save_transforms(transforms: Option<&Fitted>, weights: &Path) -> Result<(), InputError> {
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
