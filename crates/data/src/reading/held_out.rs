//! The samples that are held out of data without a file of their own.

use std::path::Path;

use crate::error::InputError;
use crate::samples::memory;
use crate::shuffle;
use crate::source::DataSetup;

/// The samples of a file that are held out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HeldOut {
    /// A share that the job's seed chooses.
    Random,
    /// The last share: the samples are in the order of time.
    Last,
}

impl HeldOut {
    /// Returns the numbers of the samples, or of other units, to train on, and of those that are held out. `path` is the
    /// place of the data.
    ///
    /// # Errors
    /// [`InputError::Invalid`] if there are less than two, or more than can be numbered.
    pub(crate) fn split(
        self,
        samples: usize,
        setup: &DataSetup,
        path: &Path,
    ) -> Result<(Vec<u32>, Vec<u32>), InputError> {
        match self {
            Self::Random => split(samples, setup, setup.seed, path),
            Self::Last => {
                memory::countable(samples)?;
                let begin = first_held_out(samples, setup, path)?;
                let mut training: Vec<u32> = (0u32..).take(samples).collect();
                let evaluation = training.split_off(begin);
                Ok((training, evaluation))
            }
        }
    }
}

/// Returns the numbers of the samples to train on, and of a share that is held out, chosen by a seed.
///
/// # Errors
/// [`InputError::Invalid`] if there are less than two samples, or more than can be numbered.
pub(crate) fn split(
    samples: usize,
    setup: &DataSetup,
    seed: u64,
    path: &Path,
) -> Result<(Vec<u32>, Vec<u32>), InputError> {
    memory::countable(samples)?;
    let begin = first_held_out(samples, setup, path)?;
    let mut training = shuffle::held_out(seed, samples);
    let evaluation = training.split_off(begin);
    Ok((training, evaluation))
}

/// Returns the number of the first sample that is held out, if the last share of the samples is. At least one sample is
/// held out, and at least one is not.
fn first_held_out(samples: usize, setup: &DataSetup, path: &Path) -> Result<usize, InputError> {
    if samples < 2 {
        let found = if samples == 0 {
            "no sample"
        } else {
            "a single sample"
        };
        return Err(InputError::Invalid(format!(
            "{}: there is {found}; at least one to learn from and one to hold out are needed",
            path.display()
        )));
    }
    let share = (samples as f64 * setup.settings.held_out).ceil() as usize;
    Ok(samples - share.clamp(1, samples - 1))
}
