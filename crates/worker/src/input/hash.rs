//! Hashes of texts, by which categories become ids.

/// Hashes the texts of a field: FNV-1a of the field's number and a text, with its bits mixed (the finaliser of
/// MurmurHash3), so that the remainder by any number of buckets is even.
#[derive(Clone, Copy)]
pub(super) struct Hasher {
    /// The hash of the field's number.
    field: u64,
}

impl Hasher {
    /// Returns the hasher of the field with this number.
    pub(super) fn of(field: u64) -> Self {
        Self {
            field: fnv(0xcbf2_9ce4_8422_2325, &field.to_le_bytes()),
        }
    }

    /// Returns the hash of a text.
    pub(super) fn hash(self, text: &str) -> u64 {
        let mut hash = fnv(self.field, text.as_bytes());
        for factor in [0xff51_afd7_ed55_8ccd_u64, 0xc4ce_b9fe_1a85_ec53] {
            hash = (hash ^ (hash >> 33)).wrapping_mul(factor);
        }
        hash ^ (hash >> 33)
    }
}

fn fnv(hash: u64, bytes: &[u8]) -> u64 {
    bytes.iter().fold(hash, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}
