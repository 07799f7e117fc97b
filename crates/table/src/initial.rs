//! The values of new rows.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use rand_distr::{Distribution, StandardNormal};
use shared_proto::table::{Initializer, TableSpec};

/// Makes the values of a table's new rows.
#[derive(Clone, Debug)]
pub struct NewRows {
    initializer: Initializer,
    /// The generator of the table. Each row has a stream of its own.
    random: ChaCha8Rng,
}

impl NewRows {
    /// Returns the maker of a table's rows.
    pub fn of(spec: &TableSpec) -> Self {
        // FNV-1a. Any hash suffices that is the same on all machines and in all versions.
        let name = spec.name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3_u64)
        });
        let mut key = [0; 32];
        key[..8].copy_from_slice(&spec.seed.to_le_bytes());
        key[8..16].copy_from_slice(&name.to_le_bytes());
        Self {
            initializer: spec.initializer,
            random: ChaCha8Rng::from_seed(key),
        }
    }

    /// Writes the values of the row with this id.
    pub fn write(&mut self, id: u64, values: &mut [f32]) {
        if self.initializer == Initializer::Zeros {
            return values.fill(0.0);
        }
        self.random.set_stream(id);
        self.random.set_word_pos(0);
        match self.initializer {
            Initializer::Zeros => (),
            Initializer::Uniform { limit } => {
                for value in values {
                    // 24 bits, as many as the significand of an f32 has: from -1 to 1 in equal steps.
                    let step = (self.random.next_u32() >> 8) as f32;
                    *value = limit * (step * (2.0 / 16_777_215.0) - 1.0);
                }
            }
            Initializer::Normal { deviation } => {
                for value in values {
                    let normal: f32 = StandardNormal.sample(&mut self.random);
                    *value = deviation * normal;
                }
            }
        }
    }
}
