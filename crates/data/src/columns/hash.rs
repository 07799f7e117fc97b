//! Hashes of texts, by which categories become ids.

use shared_proto::hash::{FNV_START, fnv1a, mix};

/// Hashes the texts of a field: FNV-1a of the field's number and the text, and then a mix of the bits, so that the
/// remainders modulo any number of buckets are evenly distributed.
#[derive(Clone, Copy)]
pub(crate) struct Hasher {
    /// The hash of the field's number.
    field: u64,
}

impl Hasher {
    /// Returns the hasher of the field with this number.
    pub(crate) fn new(field: u64) -> Self {
        Self {
            field: fnv1a(FNV_START, &field.to_le_bytes()),
        }
    }

    /// Returns the hash of a text.
    pub(crate) fn hash(self, text: &str) -> u64 {
        mix(fnv1a(self.field, text.as_bytes()))
    }
}
