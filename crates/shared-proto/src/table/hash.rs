//! The hash of a row's id. It decides the bucket, so it is part of the protocol and of checkpoints.

/// Returns the hash of an id: the finaliser of MurmurHash3 (Appleby, `fmix64`), a bijection in which each bit of the id
/// changes each bit of the hash with a probability of about one half.
#[inline]
pub fn hash(id: u64) -> u64 {
    let mut hash = id;
    for factor in [0xff51_afd7_ed55_8ccd_u64, 0xc4ce_b9fe_1a85_ec53] {
        hash = (hash ^ (hash >> 33)).wrapping_mul(factor);
    }
    hash ^ (hash >> 33)
}

/// Returns the bucket of an id: the hash's part of its range, in `buckets` equal parts (Lemire, "Fast Random Integer
/// Generation in an Interval", 2019, section 4).
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
    fn the_hash_is_the_published_one() {
        // From the reference implementation in C.
        assert_eq!(hash(0), 0);
        assert_eq!(hash(1), 0xb456_bcfc_34c2_cb2c);
        assert_eq!(hash(u64::MAX), 0x64b5_720b_4b82_5f21);
    }

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
