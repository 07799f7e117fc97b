//! Noise in the shape of MNIST, for measurements: nothing can be learnt from it.

use rand::{RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::column::Column;
use super::dataset::Dataset;
use super::error::InputError;
use super::memory::InMemory;
use super::source::{DataSetup, Source};

const PIXELS: usize = 28 * 28;
const CLASSES: u32 = 10;
const TRAINING: usize = 60_000;
/// The number is small, because an evaluation interrupts the measurement.
const EVALUATION: usize = 1_000;

/// The source `random`.
pub struct Random;

impl Source for Random {
    fn open(setup: &DataSetup) -> Result<Dataset, InputError> {
        setup.only(&[])?;
        let mut random = ChaCha8Rng::seed_from_u64(setup.seed);
        let mut samples = |count: usize| {
            let mut pixels = vec![0; count * PIXELS];
            random.fill_bytes(&mut pixels);
            let labels = (0..count).map(|_| random.next_u32() % CLASSES).collect();
            let image = Column::bytes("image", vec![1, 28, 28], pixels, 255.0);
            let label = Column::category("label", labels, CLASSES.into());
            let samples = InMemory::new(vec![image], vec![label])?;
            Ok::<_, InputError>(samples.not_compared())
        };
        let training = samples(TRAINING)?;
        Dataset::in_memory(training, samples(EVALUATION)?)
    }
}
