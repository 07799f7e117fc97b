//! The distinct ids of a step.

use candle_core::{DType, Result, Tensor, bail};
use shared_proto::table::hash::hash;

/// Ids of a step, one for each value of its batches.
#[derive(Debug, Default)]
pub(super) struct Distinct {
    ids: Vec<u64>,
}

/// The groups into which ids are cut before they are sorted: a group fits into the first-level cache.
const GROUPS: usize = 1024;

/// An id that is to be sorted.
#[derive(Clone, Copy, Debug, Default)]
struct Key {
    hash: u64,
    /// The id's number among those of the step.
    number: u32,
}

impl Distinct {
    /// Adds the values of a column as ids. With a salt, the hash of salt and value is the id.
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

    /// Returns the distinct ids in the order of their hashes, and for each added id its place among them.
    pub(super) fn finish(self) -> (Vec<u64>, Vec<u32>) {
        let group = |hash: u64| (hash >> (u64::BITS - GROUPS.ilog2())) as usize;
        let hashes: Vec<u64> = self.ids.iter().map(|id| hash(*id)).collect();
        let mut starts = [0usize; GROUPS + 1];
        for hash in &hashes {
            starts[group(*hash) + 1] += 1;
        }
        for i in 0..GROUPS {
            starts[i + 1] += starts[i];
        }
        let mut keys = vec![Key::default(); hashes.len()];
        let mut next = starts;
        for (number, hash) in (0u32..).zip(&hashes) {
            let place = &mut next[group(*hash)];
            let hash = *hash;
            keys[*place] = Key { hash, number };
            *place += 1;
        }
        let (mut ids, mut places) = (Vec::new(), vec![0; hashes.len()]);
        let mut last = None;
        for ends in starts.windows(2) {
            let keys = &mut keys[ends[0]..ends[1]];
            keys.sort_unstable_by_key(|key| key.hash);
            for key in keys {
                if last != Some(key.hash) {
                    last = Some(key.hash);
                    ids.push(self.ids[key.number as usize]);
                }
                places[key.number as usize] = (ids.len() - 1) as u32;
            }
        }
        (ids, places)
    }
}

/// Returns the salt that keeps a column's ids apart from those of others: FNV-1a of its name.
pub(super) fn column_salt(column: &str) -> u64 {
    column.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
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
