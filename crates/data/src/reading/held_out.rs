//! The choice of the held-out samples, in data where they have no file of their own.

use std::path::Path;

use crate::error::InputError;
use crate::samples::memory;
use crate::shuffle;
use crate::source::DataSetup;

/// The way to choose the held-out samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HeldOut {
    /// A random share, chosen by the job's seed.
    Random,
    /// The last share, for samples in chronological order.
    Last,
}

impl HeldOut {
    /// Splits samples, or other units. Returns the indices of those to train on, and the indices of those that are held
    /// out. `path` names the data in messages.
    ///
    /// # Errors
    /// [`InputError::Invalid`] if there are fewer than two samples, or more than `u32::MAX`.
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

/// Returns the indices of the samples to train on, and the indices of a held-out share that `seed` chooses.
///
/// # Errors
/// [`InputError::Invalid`] if there are fewer than two samples, or more than `u32::MAX`.
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

/// Returns the index of the first held-out sample if the last share of the samples is held out. At least one sample is
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
