//! The staleness of the gradients of rows: how many updates have changed a row since a worker has read it.

use shared_proto::table::hash::hash;

/// The number of the last updates of a bucket that are told apart.
const MOST_UPDATES: u64 = u32::BITS as u64;

/// The rows of a set, which have a cache line together.
const WAYS: usize = 8;

/// The rows of an update for each set, and the most sets. With more of them, a row of every update would often be displaced.
const ROWS_PER_SET: usize = 2;
const MOST_SETS: usize = 1 << 14;

/// Which of a bucket's last updates have changed which row. It is a cache of the rows that were changed last: a row takes the place of the one
/// in its set that was not changed for longest, whose next gradient then counts as new. It is not in checkpoints: a few updates show it again.
#[derive(Debug)]
pub(super) struct RowStaleness {
    /// The number of the table's buckets.
    buckets: u64,
    /// A power of two of them; none before the first update.
    sets: Vec<Set>,
    /// The number of updates. It counts on from 0 again.
    updates: u16,
    factors: Factors,
}

/// The last changes of some rows.
#[derive(Clone, Copy, Debug, Default)]
#[repr(align(64))]
struct Set {
    /// The lowest bits of the hashes of the rows' ids. Rows that have them in common count as one.
    rows: [u16; WAYS],
    /// The numbers of the last updates that have changed the rows.
    last: [u16; WAYS],
    /// Bit n is set if the update with the number `last` - n has changed the row.
    updates: [u32; WAYS],
}

/// The factors of rows that none, one, two and so on of the last updates have changed.
#[derive(Debug, Default)]
struct Factors {
    /// The staleness of the gradient.
    staleness: u64,
    of_changes: Vec<f32>,
}

impl RowStaleness {
    /// Returns that of a bucket without updates, of a table with so many buckets.
    pub(super) fn new(buckets: u32) -> Self {
        Self {
            buckets: buckets.into(),
            sets: Vec::new(),
            updates: 0,
            factors: Factors::default(),
        }
    }

    /// Notes an update of rows by a gradient with this staleness in updates of the bucket; `ids` are in the order of their hashes. Appends for
    /// each id the factor of its step, which `factor` gives for the updates that have changed its row since the gradient's weights were read.
    pub(super) fn note(
        &mut self,
        ids: &[u64],
        staleness: u64,
        factor: impl Fn(f64) -> f32,
        factors: &mut Vec<f32>,
    ) {
        self.updates = self.updates.wrapping_add(1);
        self.make_sets(ids.len());
        let Some(most) = self.sets.len().checked_sub(1) else {
            return;
        };
        self.factors.compute(staleness, factor);
        let older = MOST_UPDATES.saturating_sub(staleness) as u32;
        let since = u32::MAX.checked_shr(older).unwrap_or(0);
        factors.extend(ids.iter().map(|id| {
            let hash = hash(*id);
            // The hash's place in the bucket's range, so that one set comes after the other.
            let place = hash.wrapping_mul(self.buckets) >> (u64::BITS / 2);
            let set = &mut self.sets[(place as usize * (most + 1)) >> (u64::BITS / 2)];
            let before = set.note(hash as u16, self.updates);
            self.factors.of_changes[(before & since).count_ones() as usize]
        }));
    }

    /// Makes sets for updates of so many rows. What was noted is forgotten where more are needed.
    fn make_sets(&mut self, rows: usize) {
        let wanted = rows.div_ceil(ROWS_PER_SET).next_power_of_two();
        let wanted = wanted.min(MOST_SETS);
        if rows > 0 && wanted > self.sets.len() {
            self.sets = vec![Set::default(); wanted];
        }
    }
}

impl Set {
    /// Notes that an update with this number changes a row. Returns the updates before it that have changed the row: bit n for the one that is
    /// n + 1 updates older.
    #[inline]
    fn note(&mut self, row: u16, update: u16) -> u32 {
        let ages = self.last.map(|last| update.wrapping_sub(last));
        let known = self.rows.iter().position(|known| *known == row);
        let way = known.unwrap_or_else(|| oldest(ages));
        let before = match known {
            Some(way) => {
                let others = u32::from(ages[way].saturating_sub(1));
                self.updates[way].checked_shl(others).unwrap_or(0)
            }
            None => 0,
        };
        self.rows[way] = row;
        self.last[way] = update;
        self.updates[way] = before << 1 | 1;
        before
    }
}

/// Returns the place of the largest number.
fn oldest(ages: [u16; WAYS]) -> usize {
    let most = ages.into_iter().fold(0, u16::max);
    ages.iter().position(|age| *age == most).unwrap_or_default()
}

impl Factors {
    /// Computes the factors for gradients with this staleness. If it is larger than the number of updates that are told apart, the older ones are
    /// taken to have changed a row as often as these.
    fn compute(&mut self, staleness: u64, factor: impl Fn(f64) -> f32) {
        let staleness = staleness.max(MOST_UPDATES);
        if self.staleness == staleness {
            return;
        }
        let each = staleness as f64 / MOST_UPDATES as f64;
        self.staleness = staleness;
        self.of_changes = (0..=MOST_UPDATES)
            .map(|changes| factor(each * changes as f64))
            .collect();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ids that are in many updates stay known among many others.
    #[test]
    fn rows_that_change_often_are_not_displaced_by_those_that_change_once() {
        let mut staleness = RowStaleness::new(1);
        let mut changes = |ids: &[u64], updates: u64| {
            let mut factors = Vec::new();
            staleness.note(ids, updates, |changes| changes as f32, &mut factors);
            assert_eq!(factors.len(), ids.len());
            factors
        };
        let often = 0..20u64;
        let (mut found, mut expected, mut taken_for_others) = (0.0, 0.0, 0);
        for update in 0..200 {
            let once = (0..1000).map(|other| 1000 + 1000 * update + other);
            let mut ids: Vec<u64> = often.clone().chain(once).collect();
            ids.sort_unstable_by_key(|id| hash(*id));
            for (id, changes) in ids.iter().zip(changes(&ids, 15)) {
                if often.contains(id) {
                    found += changes;
                    expected += update.min(15) as f32;
                } else {
                    taken_for_others += u32::from(changes > 0.0);
                }
            }
        }
        assert!(
            found <= expected && found > 0.95 * expected,
            "{found}, {expected}"
        );
        assert!(taken_for_others < 100, "{taken_for_others} of 200,000");
        // Without staleness nothing lies between.
        assert_eq!(changes(&[3], 0), [0.0]);
        assert!(changes(&[], 5).is_empty());
        assert_eq!(changes(&[3], 2), [1.0]);
        assert_eq!(changes(&[3], 64), [62.0]);
    }
}
