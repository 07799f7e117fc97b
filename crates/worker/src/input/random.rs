//! Noise in the shape of MNIST, for measurements: nothing can be learnt from it.

use rand::{RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::{Dataset, Features, Samples};

const PIXELS: usize = 28 * 28;
const CLASSES: u32 = 10;
const TRAINING: usize = 60_000;
/// Few, because their measurement interrupts what is measured.
const EVALUATION: usize = 1_000;

pub(super) fn load(seed: u64) -> Dataset {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut samples = |count: usize| {
        let mut pixels = vec![0; count * PIXELS];
        random.fill_bytes(&mut pixels);
        Samples {
            features: Features::Bytes(pixels, 255.0),
            labels: (0..count).map(|_| random.next_u32() % CLASSES).collect(),
            sample_shape: vec![1, 28, 28],
        }
    };
    Dataset {
        training: samples(TRAINING),
        evaluation: samples(EVALUATION),
        sample_shape: vec![1, 28, 28],
        classes: CLASSES as usize,
    }
}
