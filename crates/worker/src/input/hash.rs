//! Hashes of texts, by which categories become ids.

/// Returns FNV-1a of a field's number and a text, with its bits mixed (the finaliser of MurmurHash3), so that the
/// remainder by any number of buckets is even.
pub(super) fn hash(field: u64, text: &str) -> u64 {
    let bytes = field.to_le_bytes().into_iter().chain(text.bytes());
    let mut hash = bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    for factor in [0xff51_afd7_ed55_8ccd_u64, 0xc4ce_b9fe_1a85_ec53] {
        hash = (hash ^ (hash >> 33)).wrapping_mul(factor);
    }
    hash ^ (hash >> 33)
}
