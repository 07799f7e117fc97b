//! The staleness of the gradients of rows: how many updates have changed a row since a worker has read it.

use optimizer::StaleSteps;
use shared_proto::table::hash::hash;

/// The number of a bucket's recent updates that are recorded individually.
const HISTORY: u64 = u32::BITS as u64;

/// The number of rows that share a cache line.
const WAYS: usize = 8;

/// The number of an update's rows for which there is one line, and the most lines. With more rows per line, rows would
/// often be displaced while their recent updates still matter.
const ROWS_PER_LINE: usize = 2;
const MOST_LINES: usize = 1 << 14;

/// A record of which of a bucket's recent updates have changed which row. The record is a cache: a new row displaces
/// another row of its line, and the next gradient of the displaced row counts as fresh. Rows with several changes are
/// displaced last. Checkpoints do not have the record: a few updates restore it.
#[derive(Debug)]
pub(super) struct RowStaleness {
    /// The number of the table's buckets.
    buckets: u64,
    /// The lines, whose number is a power of two; empty before the first update.
    lines: Vec<Line>,
    /// The number of the newest update, which wraps around to 0 after 65,535. A row that has been unchanged for that
    /// long may be taken for a recently changed one. Its next step then has a wrong factor.
    number: u16,
    factors: Factors,
}

/// The last changes of some rows.
#[derive(Clone, Copy, Debug, Default)]
#[repr(align(64))]
struct Line {
    /// The lowest bits of the hashes of the rows' ids. Rows with equal bits count as one row.
    rows: [u16; WAYS],
    /// The numbers of the last updates that have changed the rows.
    last: [u16; WAYS],
    /// Bit n is set if the update with the number `last` - n has changed the row.
    histories: [u32; WAYS],
}

/// The factor of a row's step, by the number of recent updates that have changed the row.
#[derive(Debug, Default)]
struct Factors {
    /// The corrections and the staleness for which the factors are computed.
    of: Option<(StaleSteps, u64)>,
    by_changes: Vec<f32>,
}

impl RowStaleness {
    /// Returns the record of a bucket without updates. `buckets` is the number of buckets of its table.
    pub(super) fn new(buckets: u32) -> Self {
        Self {
            buckets: buckets.into(),
            lines: Vec::new(),
            number: 0,
            factors: Factors::default(),
        }
    }

    /// Records an update of rows by a gradient. `staleness` is the number of updates of the bucket that the gradient
    /// has missed. `ids` must be in the order of their hashes. Appends the factor of each row's step.
    pub(super) fn note(
        &mut self,
        ids: &[u64],
        staleness: u64,
        stale: StaleSteps,
        factors: &mut Vec<f32>,
    ) {
        self.number = self.number.wrapping_add(1);
        self.make_lines(ids.len());
        self.factors.compute(staleness, stale);
        let lines = self.lines.len() as u64;
        let older = HISTORY.saturating_sub(staleness) as u32;
        let since = u32::MAX.checked_shr(older).unwrap_or(0);
        factors.extend(ids.iter().map(|id| {
            let hash = hash(*id);
            // The hash's place in the bucket's range, so that one line comes after the other.
            let place = hash.wrapping_mul(self.buckets) >> 32;
            let line = &mut self.lines[((place * lines) >> 32) as usize];
            let before = line.note(hash as u16, self.number);
            self.factors.by_changes[(before & since).count_ones() as usize]
        }));
    }

    /// Forgets all updates.
    pub(super) fn clear(&mut self) {
        self.lines = Vec::new();
    }

    /// Makes enough lines for an update of `rows` rows. Adding lines forgets all earlier updates.
    fn make_lines(&mut self, rows: usize) {
        let wanted = rows.div_ceil(ROWS_PER_LINE).next_power_of_two();
        let wanted = wanted.min(MOST_LINES);
        if rows > 0 && wanted > self.lines.len() {
            self.lines = vec![Line::default(); wanted];
        }
    }
}

impl Line {
    /// Records that update `number` changes a row. Returns the row's history before this update: bit n stands for
    /// update `number` - 1 - n.
    #[inline]
    fn note(&mut self, row: u16, number: u16) -> u32 {
        let ages = self.last.map(|last| number.wrapping_sub(last));
        let known = self.rows.iter().position(|known| *known == row);
        let way = known.unwrap_or_else(|| self.displaced(ages));
        let before = match (known, ages[way]) {
            (None, _) => 0,
            // Another row of this update counts as the same one.
            (Some(_), 0) => self.histories[way] >> 1,
            (Some(_), age) => {
                let history = self.histories[way];
                history.checked_shl(u32::from(age) - 1).unwrap_or(0)
            }
        };
        self.rows[way] = row;
        self.last[way] = number;
        self.histories[way] = before << 1 | 1;
        before
    }

    /// Returns the index of the row that a new row displaces. Rows with at most one change in their history go first,
    /// and among them the one that has been unchanged for longest. If all rows have more changes, the one that has been
    /// unchanged for longest goes.
    fn displaced(&self, ages: [u16; WAYS]) -> usize {
        let mut best = (0, 0);
        for (way, age) in ages.into_iter().enumerate() {
            let is_kept = self.histories[way].count_ones() > 1 && u64::from(age) < HISTORY;
            let rank = u32::from(age) + u32::from(!is_kept) * (1 << 16);
            if rank > best.0 {
                best = (rank, way);
            }
        }
        best.1
    }
}

impl Factors {
    /// Computes the factors for gradients with this staleness. Updates that are too old to be in the history are
    /// assumed to have changed a row as often as the recorded ones.
    fn compute(&mut self, staleness: u64, stale: StaleSteps) {
        let staleness = staleness.max(HISTORY);
        if self.of == Some((stale, staleness)) {
            return;
        }
        let each = staleness as f64 / HISTORY as f64;
        self.of = Some((stale, staleness));
        self.by_changes = (0..=HISTORY)
            .map(|changes| stale.row_factor(each * changes as f64))
            .collect();
    }
}

#[cfg(test)]
mod tests {
    use shared_proto::job::Job;
    use shared_proto::table::TableSpec;
    use shared_proto::table::hash::bucket;

    use super::*;

    /// The table has more than one bucket, so that all lines are used only if a row's line follows from its place in the bucket.
    #[test]
    fn rows_that_change_often_are_not_displaced_by_those_that_change_once() {
        const BUCKETS: u32 = 16;
        let rule = optimizer::VariableRule::of_table(&Job::default(), &TableSpec::default(), 1);
        let stale = rule.stale_steps().unwrap();
        let mut staleness = RowStaleness::new(BUCKETS);
        let mut changes = |ids: &[u64], updates: u64| -> Vec<f64> {
            let mut factors = Vec::new();
            staleness.note(ids, updates, stale, &mut factors);
            let exponent = -f64::from(stale.row_factor(1.0)).log2();
            let changes = |factor: f32| f64::from(factor).powf(-1.0 / exponent) - 1.0;
            factors.into_iter().map(changes).collect()
        };
        let mut ids = (0..).filter(|id| bucket(*id, BUCKETS) == 3);
        let mut some = |count| -> Vec<u64> { ids.by_ref().take(count).collect() };
        let (always, sometimes) = (some(20), some(20));
        let (mut found, mut expected, mut taken_for_others) = ([0.0; 2], [0.0; 2], 0);
        for update in 0..200 {
            let is_fourth = update % 4 == 0;
            let mut ids = some(1000);
            ids.extend(&always);
            ids.extend(sometimes.iter().filter(|_| is_fourth));
            ids.sort_unstable_by_key(|id| hash(*id));
            for (id, changes) in ids.iter().zip(changes(&ids, 15)) {
                if always.contains(id) {
                    found[0] += changes;
                    expected[0] += f64::from(update.min(15));
                } else if sometimes.contains(id) {
                    found[1] += changes;
                    expected[1] += f64::from(update.min(15) / 4);
                } else {
                    taken_for_others += u32::from(changes > 0.0);
                }
            }
        }
        let shares = [0, 1].map(|kind| found[kind] / expected[kind]);
        assert!(shares.iter().all(|share| *share < 1.0001), "{shares:?}");
        assert!(shares[0] > 0.95 && shares[1] > 0.8, "{shares:?}");
        assert!(taken_for_others < 100, "{taken_for_others} of 200,000");
        // Without staleness nothing lies between.
        let counted =
            |counts: Vec<f64>| -> Vec<f64> { counts.into_iter().map(f64::round).collect() };
        let one = &always[..1];
        assert_eq!(counted(changes(one, 0)), [0.0]);
        assert!(changes(&[], 5).is_empty());
        assert_eq!(counted(changes(one, 2)), [1.0]);
        assert_eq!(counted(changes(one, 64)), [62.0]);
    }

    #[test]
    fn rows_that_look_the_same_in_an_update_count_it_once() {
        let mut line = Line::default();
        assert_eq!([line.note(7, 1), line.note(7, 1)], [0, 0]);
        assert_eq!([line.note(7, 2), line.note(7, 2)], [1, 1]);
        assert_eq!(line.note(7, 5), 0b1100);
        assert_eq!(line.note(7, 40), 0);
    }
}
