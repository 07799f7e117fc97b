//! The distinct ids of a step.

use candle_core::{DType, Result, Tensor, bail};
use shared_proto::hash::{FNV_START, fnv1a};
use shared_proto::table::hash::hash;

/// The ids of a step with their repetitions, in the order in which they were added.
#[derive(Debug, Default)]
pub(super) struct Distinct {
    ids: Vec<u64>,
}

/// The number of groups into which distinct ids are divided before they are sorted. A group fits into the first-level
/// cache.
const GROUPS: usize = 1024;

/// A distinct id.
#[derive(Clone, Copy, Debug, Default)]
struct Key {
    hash: u64,
    /// The index of the distinct id, in the order in which the distinct ids were found.
    number: u32,
}

/// Marks a place in [`Seen`] that has no id.
const FREE: u32 = u32::MAX;

/// The distinct ids that have been seen: a hash table of their indices, with linear probing. The table is small, so
/// that it stays in the second-level cache.
struct Seen {
    hashes: Vec<u64>,
    numbers: Vec<u32>,
}

impl Seen {
    /// Returns a table for at most `most` ids.
    fn new(most: usize) -> Self {
        Self {
            hashes: Vec::new(),
            numbers: vec![FREE; (2 * most).next_power_of_two()],
        }
    }

    /// Returns the index of the id with this hash. Adds the id if it is new.
    #[inline]
    fn number(&mut self, hash: u64) -> u32 {
        let mask = self.numbers.len() - 1;
        let mut place = hash as usize & mask;
        loop {
            match self.numbers[place] {
                FREE => {
                    let number = self.hashes.len() as u32;
                    self.numbers[place] = number;
                    self.hashes.push(hash);
                    return number;
                }
                number if self.hashes[number as usize] == hash => return number,
                _ => place = (place + 1) & mask,
            }
        }
    }
}

impl Distinct {
    /// Adds the values of a column as ids. With a salt, each id is a hash of the salt and the value.
    pub(super) fn add(&mut self, values: &Tensor, salt: Option<u64>) -> Result<()> {
        let start = self.ids.len();
        let values = values.flatten_all()?;
        match values.dtype() {
            DType::U32 => {
                let values = values.to_vec1::<u32>()?;
                self.ids.extend(values.into_iter().map(u64::from));
            }
            DType::I64 => {
                let values = values.to_vec1::<i64>()?;
                self.ids.extend(values.into_iter().map(i64::cast_unsigned));
            }
            other => bail!("ids are u32 or i64, not {}", other.as_str()),
        }
        if let Some(salt) = salt {
            for id in &mut self.ids[start..] {
                *id = hash(*id ^ salt);
            }
        }
        Ok(())
    }

    /// Returns the distinct ids in the order of their hashes, and for each added id its index among the distinct ids.
    pub(super) fn finish(self) -> (Vec<u64>, Vec<u32>) {
        let mut seen = Seen::new(self.ids.len());
        let mut ids = Vec::new();
        let mut places: Vec<u32> = Vec::with_capacity(self.ids.len());
        for id in &self.ids {
            let number = seen.number(hash(*id));
            if number as usize == ids.len() {
                ids.push(*id);
            }
            places.push(number);
        }
        let sorted = sorted(&seen.hashes);
        let mut place_of = vec![0; ids.len()];
        for (place, key) in (0u32..).zip(&sorted) {
            place_of[key.number as usize] = place;
        }
        for place in &mut places {
            *place = place_of[*place as usize];
        }
        let ids = sorted.iter().map(|key| ids[key.number as usize]).collect();
        (ids, places)
    }
}

/// Sorts ids by their hashes, which are distinct.
fn sorted(hashes: &[u64]) -> Vec<Key> {
    let group = |hash: u64| (hash >> (u64::BITS - GROUPS.ilog2())) as usize;
    let mut starts = [0usize; GROUPS + 1];
    for hash in hashes {
        starts[group(*hash) + 1] += 1;
    }
    for i in 0..GROUPS {
        starts[i + 1] += starts[i];
    }
    let mut keys = vec![Key::default(); hashes.len()];
    let mut next = starts;
    for (number, hash) in (0u32..).zip(hashes) {
        let place = &mut next[group(*hash)];
        let hash = *hash;
        keys[*place] = Key { hash, number };
        *place += 1;
    }
    for ends in starts.windows(2) {
        keys[ends[0]..ends[1]].sort_unstable_by_key(|key| key.hash);
    }
    keys
}

/// Returns the salt that separates a column's ids from those of other columns: FNV-1a of the column's name.
pub(super) fn column_salt(column: &str) -> u64 {
    fnv1a(FNV_START, column.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn each_id_has_the_place_of_its_row(values in prop::collection::vec(-50i64..50, 1..400), salted: bool) {
            let mut distinct = Distinct::default();
            let (one, other) = values.split_at(values.len() / 2);
            for part in [one, other] {
                let part = Tensor::from_slice(part, part.len(), &Device::Cpu).unwrap();
                distinct.add(&part, salted.then_some(9)).unwrap();
            }
            let all = distinct.ids.clone();
            let (ids, places) = distinct.finish();
            prop_assert!(ids.is_sorted_by(|one, other| hash(*one) < hash(*other)));
            for (id, place) in all.iter().zip(&places) {
                prop_assert_eq!(ids[*place as usize], *id);
            }
            let mut used = places.clone();
            used.sort_unstable();
            used.dedup();
            prop_assert_eq!(used.len(), ids.len());
        }
    }

    #[test]
    fn floats_are_no_ids() {
        let floats = Tensor::new(&[1.0f32], &Device::Cpu).unwrap();
        let error = Distinct::default().add(&floats, None).unwrap_err();
        assert!(error.to_string().contains("not f32"), "{error}");
    }
}
