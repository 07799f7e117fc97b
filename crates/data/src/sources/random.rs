//! Pictures of noise, by default in the shape of MNIST, for measurements: nothing can be learnt from them.

use rand::{RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::dataset::Dataset;
use crate::error::InputError;
use crate::samples::column::Column;
use crate::samples::memory::InMemory;
use crate::source::{DataSetup, Source};

const TRAINING: u64 = 60_000;
/// The number of held-out samples. It is small, because an evaluation interrupts the measurement.
const EVALUATION: u64 = 1_000;

/// The number of bytes of a label.
const LABEL_BYTES: u64 = 4;

/// The most bytes that all training samples can have together.
const MOST_BYTES: u64 = 1 << 36;

/// The source `random`.
pub struct Random;

impl Source for Random {
    fn open(setup: &DataSetup) -> Result<Dataset, InputError> {
        setup.only(&["samples", "size", "channels", "classes"])?;
        let count = |key, default| match setup.whole_number(key)?.unwrap_or(default) {
            0 => Err(InputError::Invalid(format!(
                "`data.options.{key}` is 0, but must be at least 1"
            ))),
            found => Ok(found),
        };
        let (training, classes) = (count("samples", TRAINING)?, count("classes", 10)?);
        let (size, channels) = (count("size", 28)?, count("channels", 1)?);
        let classes = u32::try_from(classes).map_err(|_| {
            InputError::Invalid(format!(
                "`data.options.classes` is {classes}, but must be at most {}",
                u32::MAX
            ))
        })?;
        let mut pixels = [size, size, channels].into_iter();
        let pixels = pixels.try_fold(1u64, |all, n| all.checked_mul(n));
        let bytes =
            pixels.and_then(|pixels| pixels.checked_add(LABEL_BYTES)?.checked_mul(training));
        if bytes.is_none_or(|bytes| bytes > MOST_BYTES) {
            return Err(InputError::Invalid(format!(
                "`data.options` asks for {training} samples of {channels} x {size} x {size} bytes; at most {MOST_BYTES} bytes are possible"
            )));
        }
        let mut random = ChaCha8Rng::seed_from_u64(setup.seed);
        let mut samples = |count: u64| {
            let mut pixels = vec![0; (count * channels * size * size) as usize];
            random.fill_bytes(&mut pixels);
            let labels = (0..count).map(|_| random.next_u32() % classes).collect();
            let shape = [channels, size, size].map(|n| n as usize).to_vec();
            let image = Column::bytes("image", shape, pixels, 255.0);
            let label = Column::category("label", labels, classes.into());
            let samples = InMemory::new(vec![image], vec![label])?;
            Ok::<_, InputError>(samples.not_compared())
        };
        let evaluation = EVALUATION.min(training);
        Dataset::in_memory(samples(training)?, samples(evaluation)?)
    }
}
