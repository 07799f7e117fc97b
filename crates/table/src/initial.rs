//! The values of new rows.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use rand_distr::{Distribution, StandardNormal};
use shared_proto::hash::{FNV_START, fnv1a};
use shared_proto::table::{Initializer, TableSpec};

/// Makes the values of a table's new rows.
#[derive(Clone, Debug)]
pub struct NewRows {
    initializer: Initializer,
    /// The generator of the table. Each row has a stream of its own. This one stays unused and is cloned for each row:
    /// setting the stream of a used generator computes a block of numbers that is then discarded.
    random: ChaCha8Rng,
}

impl NewRows {
    /// Returns the maker of a table's rows.
    pub fn new(spec: &TableSpec) -> Self {
        let name = fnv1a(FNV_START, spec.name.as_bytes());
        let mut key = [0; 32];
        key[..8].copy_from_slice(&spec.seed.to_le_bytes());
        key[8..16].copy_from_slice(&name.to_le_bytes());
        Self {
            initializer: spec.initializer,
            random: ChaCha8Rng::from_seed(key),
        }
    }

    /// Writes the values of the row with this id.
    pub fn write(&self, id: u64, values: &mut [f32]) {
        if self.initializer == Initializer::Zeros {
            return values.fill(0.0);
        }
        let mut random = self.random.clone();
        random.set_stream(id);
        match self.initializer {
            Initializer::Zeros => (),
            Initializer::Uniform { limit } => {
                for value in values {
                    // 24 bits, as many as the significand of an f32 has: from -1 to 1 in equal steps.
                    let step = (random.next_u32() >> 8) as f32;
                    *value = limit * (step * (2.0 / 16_777_215.0) - 1.0);
                }
            }
            Initializer::Normal { deviation } => {
                for value in values {
                    let normal: f32 = StandardNormal.sample(&mut random);
                    *value = deviation * normal;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {

    use super::*;

    #[test]
    fn a_row_begins_with_the_first_numbers_of_its_stream() {
        let mut spec = TableSpec {
            name: "item".to_owned(),
            dimension: 80,
            buckets: 1,
            initializer: Initializer::Uniform { limit: 1.0 },
            seed: 7,
            ..TableSpec::default()
        };
        let mut random = NewRows::new(&spec).random;
        for normal in [false, true] {
            if normal {
                spec.initializer = Initializer::Normal { deviation: 2.0 };
            }
            for id in [0, 9, u64::MAX] {
                random.set_stream(id);
                random.set_word_pos(0);
                let mut expected = || match normal {
                    true => 2.0 * Distribution::<f32>::sample(&StandardNormal, &mut random),
                    false => (random.next_u32() >> 8) as f32 * (2.0 / 16_777_215.0) - 1.0,
                };
                let mut values = [0.0; 80];
                NewRows::new(&spec).write(id, &mut values);
                assert_eq!(values, std::array::from_fn(|_| expected()));
            }
        }
    }
}
