//! The order in which samples are taken. Every worker computes the same order from the seed.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Returns the samples in the order of an epoch: a permutation of `0..samples`. `samples` must be below 2^32.
pub fn order(seed: u64, epoch: u32, samples: usize) -> Vec<u32> {
    permutation(seed, epoch, Purpose::Samples, samples)
}

/// Returns an order of the samples, of which the last ones are held out for evaluation. It differs from the order of
/// each epoch.
pub(crate) fn held_out(seed: u64, samples: usize) -> Vec<u32> {
    permutation(seed, 0, Purpose::HeldOut, samples)
}

/// Returns the order of the chunks of streamed data in an epoch.
pub(crate) fn chunks(seed: u64, epoch: u32, chunks: usize) -> Vec<u32> {
    permutation(seed, epoch, Purpose::Chunks, chunks)
}

/// Returns the order of the samples in a window of streamed data.
pub(crate) fn window(seed: u64, epoch: u32, window: u64, samples: usize) -> Vec<u32> {
    permutation(seed, epoch, Purpose::Window(window), samples)
}

/// The use of an order. Different uses have different orders.
#[derive(Clone, Copy)]
enum Purpose {
    Samples,
    HeldOut,
    Chunks,
    Window(u64),
}

fn permutation(seed: u64, epoch: u32, purpose: Purpose, samples: usize) -> Vec<u32> {
    let (number, window) = match purpose {
        Purpose::Samples => (0, 0),
        Purpose::HeldOut => (1, 0),
        Purpose::Chunks => (2, 0),
        Purpose::Window(window) => (3, window),
    };
    let mut key = [0; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    key[8..12].copy_from_slice(&epoch.to_le_bytes());
    key[12] = number;
    key[16..24].copy_from_slice(&window.to_le_bytes());
    let mut random = ChaCha8Rng::from_seed(key);
    let mut order: Vec<u32> = (0u32..).take(samples).collect();
    // Fisher and Yates.
    for last in (1..order.len()).rev() {
        order.swap(last, random.random_range(0..=last));
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_sample_comes_once() {
        for samples in [0, 1, 2, 3, 100, 1437] {
            for epoch in 0..3 {
                let mut order = order(7, epoch, samples);
                order.sort_unstable();
                assert!(order.into_iter().eq((0u32..).take(samples)));
            }
        }
    }

    #[test]
    fn seed_epoch_and_purpose_decide() {
        assert_eq!(order(7, 1, 100), order(7, 1, 100));
        assert_ne!(order(7, 1, 100), order(7, 2, 100));
        assert_ne!(order(7, 1, 100), order(8, 1, 100));
        assert_ne!(order(7, 0, 100), held_out(7, 100));
    }

    #[test]
    fn each_place_is_as_likely() {
        // 6 orders of 3 samples; 1000 of each are expected, give or take 30.
        let mut counts = std::collections::BTreeMap::new();
        for seed in 0..6000 {
            *counts.entry(order(seed, 0, 3)).or_insert(0) += 1;
        }
        assert_eq!(counts.len(), 6);
        assert!(
            counts.values().all(|n| (850..1150).contains(n)),
            "{counts:?}"
        );
    }

    #[test]
    fn the_order_is_pinned() {
        // Workers of different versions must agree, and a job must go on after an upgrade as it
        // began: a change here is a change of the protocol.
        assert_eq!(order(1, 0, 10), [0, 1, 5, 4, 8, 9, 2, 7, 3, 6]);
    }
}
