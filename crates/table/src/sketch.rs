//! How often ids have been seen, counted approximately.

use crate::hash::hash;

/// The number of rows of counters.
const DEPTH: usize = 4;

/// A count-min sketch (Cormode and Muthukrishnan, "An Improved Data Stream Summary", 2005, section 3) with conservative
/// update (Estan and Varghese, "New Directions in Traffic Measurement and Accounting", 2002, section 3.3): only the
/// smallest counters of an id grow.
///
/// A count is never too small. With `width` counters in a row, and n sights in all, it is too large by more than
/// `e · n / width` with a probability of at most `e^-4`, which is 1.8 %.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sketch {
    /// The rows of counters, back to back. A counter stays at its largest value.
    counters: Vec<u8>,
}

impl Sketch {
    /// Returns a sketch of `width` counters in each of four rows, a byte each.
    pub fn new(width: usize) -> Self {
        Self {
            counters: vec![0; DEPTH * width.max(1)],
        }
    }

    /// Returns the sketch with these counters, which must have the size of `like`.
    pub(crate) fn of_counters(counters: &[u8], like: &Self) -> Result<Self, String> {
        match counters.len() == like.counters.len() {
            true => Ok(Self {
                counters: counters.to_vec(),
            }),
            false => Err(format!(
                "its sketch has {} counters; {} were expected",
                counters.len(),
                like.counters.len()
            )),
        }
    }

    /// Returns the counters, row after row.
    pub(crate) fn counters(&self) -> &[u8] {
        &self.counters
    }

    /// Counts a sight of an id, and returns how often it has been seen, at most 255.
    pub fn count(&mut self, id: u64) -> u8 {
        let width = self.counters.len() / DEPTH;
        let places = places(id, width);
        let count = places.map(|place| self.counters[place]).into_iter().min();
        let count = count.unwrap_or(0).saturating_add(1);
        for place in places {
            self.counters[place] = self.counters[place].max(count);
        }
        count
    }

    /// Returns the number of bytes of the counters.
    pub fn bytes(&self) -> usize {
        self.counters.len()
    }
}

/// Returns the index of an id's counter in each row. All of them are made from two hashes (Kirsch and Mitzenmacher,
/// "Less Hashing, Same Performance", 2006).
fn places(id: u64, width: usize) -> [usize; DEPTH] {
    // Another hash than the one that has chosen the bucket, of which all ids of a bucket have a part in common.
    let hash = hash(id ^ 0x9e37_79b9_7f4a_7c15);
    let (first, step) = (hash >> 32, hash & 0xffff_ffff | 1);
    std::array::from_fn(|row| {
        let mixed = (first + row as u64 * step) & 0xffff_ffff;
        row * width + ((mixed * width as u64) >> 32) as usize
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_never_too_small_and_seldom_too_large() {
        // Ids in the manner of Zipf.
        let mut sketch = Sketch::new(8192);
        let sights = |id: u64| 20_000 / id;
        let mut all = 0;
        for id in 1..=20_000u64 {
            for _ in 0..sights(id) {
                sketch.count(id);
                all += 1;
            }
        }
        let allowed = std::f64::consts::E * all as f64 / 8192.0;
        let mut beyond = 0;
        for id in 1..=20_000u64 {
            let (found, truth) = (u64::from(sketch.counted(id)), sights(id));
            assert!(found >= truth.min(255), "{id}: {found}, not {truth}");
            beyond += u64::from(found as f64 > truth as f64 + allowed);
        }
        assert!(beyond < 20_000 * 18 / 1000, "{beyond}");
    }

    impl Sketch {
        fn counted(&self, id: u64) -> u8 {
            let places = places(id, self.counters.len() / DEPTH);
            places
                .map(|place| self.counters[place])
                .into_iter()
                .min()
                .unwrap_or(0)
        }
    }

    #[test]
    fn an_id_is_admitted_at_its_third_sight_and_no_other_is() {
        let mut sketch = Sketch::new(1 << 12);
        assert_eq!(
            [sketch.count(5), sketch.count(5), sketch.count(6)],
            [1, 2, 1]
        );
        assert_eq!([sketch.count(5), sketch.count(6)], [3, 2]);
        let mut full = Sketch::new(16);
        for _ in 0..300 {
            full.count(9);
        }
        assert_eq!(full.count(9), 255);
    }
}
