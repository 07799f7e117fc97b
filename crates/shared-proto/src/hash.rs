//! Hashes that are the same on all machines and in all versions.

/// The state of [`fnv1a`] before the first byte.
pub const FNV_START: u64 = 0xcbf2_9ce4_8422_2325;

/// Returns the FNV-1a hash (Fowler, Noll and Vo; RFC 9923) of some bytes. `state` is [`FNV_START`], or the hash of the
/// preceding bytes.
pub fn fnv1a(state: u64, bytes: &[u8]) -> u64 {
    bytes.iter().fold(state, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// Returns the bits mixed: the finaliser of MurmurHash3 (Appleby, `fmix64`), a bijection in which each bit of the input
/// changes each bit of the output with a probability of about one half.
#[inline]
pub fn mix(bits: u64) -> u64 {
    let mut hash = bits;
    for factor in [0xff51_afd7_ed55_8ccd_u64, 0xc4ce_b9fe_1a85_ec53] {
        hash = (hash ^ (hash >> 33)).wrapping_mul(factor);
    }
    hash ^ (hash >> 33)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hashes_are_the_published_ones() {
        // From the reference implementations in C.
        assert_eq!(mix(0), 0);
        assert_eq!(mix(1), 0xb456_bcfc_34c2_cb2c);
        assert_eq!(mix(u64::MAX), 0x64b5_720b_4b82_5f21);
        assert_eq!(fnv1a(FNV_START, b""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(fnv1a(FNV_START, b"a"), 0xaf63_dc4c_8601_ec8c);
        assert_eq!(fnv1a(FNV_START, b"foobar"), 0x8594_4171_f739_67e8);
    }
}
