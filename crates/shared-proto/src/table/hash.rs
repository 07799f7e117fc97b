//! The hash of a row's id. It decides the bucket, so it is part of the protocol and of checkpoints.

use crate::hash::mix;

/// Returns the hash of an id.
#[inline]
pub fn hash(id: u64) -> u64 {
    mix(id)
}

/// Returns the bucket of an id. The range of hashes is cut into `buckets` equal parts; the bucket is the part with the
/// id's hash (Lemire, "Fast Random Integer Generation in an Interval", 2019, section 4).
#[inline]
pub fn bucket(id: u64, buckets: u32) -> u32 {
    bucket_of_hash(hash(id), buckets)
}

/// Returns the bucket of the id with this hash. Buckets are consecutive ranges of hashes.
#[inline]
pub fn bucket_of_hash(hash: u64, buckets: u32) -> u32 {
    ((u128::from(hash) * u128::from(buckets)) >> 64) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn consecutive_ids_fill_buckets_evenly() {
        let mut counts = [0; 100];
        for id in 0..100_000 {
            counts[bucket(id, 100) as usize] += 1;
        }
        // Six standard deviations about the mean of 1,000.
        assert!(counts.iter().all(|count| (810..1190).contains(count)));
    }
}
