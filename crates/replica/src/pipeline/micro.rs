//! A step's batches, cut into micro-batches.

use std::ops::Range;

use model::Batch;

/// A part of one of a step's batches.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct MicroBatch {
    /// The index of the batch in the step.
    pub(super) batch: usize,
    /// The indices of the micro-batch's samples in the batch, at least one.
    pub(super) samples: Range<usize>,
    /// The micro-batch's share of the batch's samples.
    pub(super) share_of_batch: f64,
    /// The micro-batch's share of the step's samples.
    pub(super) share: f64,
    /// True if this is the last micro-batch of the batch.
    pub(super) is_last: bool,
}

/// Cuts each batch into at most `most` micro-batches. Their numbers of samples differ by at most one.
pub(super) fn micro_batches(batches: &[Batch], most: usize) -> Vec<MicroBatch> {
    let sizes: Vec<usize> = batches.iter().map(Batch::samples).collect();
    cut(&sizes, most)
}

fn cut(sizes: &[usize], most: usize) -> Vec<MicroBatch> {
    let all: usize = sizes.iter().sum();
    let mut micro_batches = Vec::new();
    for (batch, size) in sizes.iter().copied().enumerate() {
        let count = most.clamp(1, size.max(1));
        for number in 0..count {
            let samples = number * size / count..(number + 1) * size / count;
            if samples.is_empty() {
                continue;
            }
            let part = samples.len() as f64;
            micro_batches.push(MicroBatch {
                batch,
                share_of_batch: part / size as f64,
                share: part / all as f64,
                samples,
                is_last: number + 1 == count,
            });
        }
    }
    micro_batches
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn each_sample_is_in_one_micro_batch(sizes in proptest::collection::vec(0usize..50, 1..4), most in 1usize..60) {
            let parts = cut(&sizes, most);
            for (batch, size) in sizes.iter().enumerate() {
                let own: Vec<&MicroBatch> = parts.iter().filter(|part| part.batch == batch).collect();
                prop_assert_eq!(own.len(), most.min(*size));
                let samples: Vec<usize> = own.iter().flat_map(|part| part.samples.clone()).collect();
                prop_assert_eq!(samples, (0..*size).collect::<Vec<_>>());
                let lasts = own.iter().filter(|part| part.is_last).count();
                prop_assert_eq!(lasts, usize::from(*size > 0));
                let sizes: Vec<usize> = own.iter().map(|part| part.samples.len()).collect();
                if let (Some(least), Some(most)) = (sizes.iter().min(), sizes.iter().max()) {
                    prop_assert!(most - least <= 1);
                    let shares: f64 = own.iter().map(|part| part.share_of_batch).sum();
                    prop_assert!((shares - 1.0).abs() < 1e-9);
                }
            }
            if !parts.is_empty() {
                let shares: f64 = parts.iter().map(|part| part.share).sum();
                prop_assert!((shares - 1.0).abs() < 1e-9);
            }
        }
    }
}
