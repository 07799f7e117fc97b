//! The heat of a bucket: how often its rows are read and changed.

use std::cmp::Reverse;
use std::fmt;

use topk::FilteredSpaceSaving;

/// How often the rows of a bucket were read and changed since the bucket came to this server.
#[derive(Default)]
pub(crate) struct Heat {
    /// The number of rows that pulls have read. A row counts each time.
    pub(crate) read: u64,
    /// The number of rows in gradients. A row counts each time. Ids that were refused a row count too.
    pub(crate) updated: u64,
    hottest: Option<Hottest>,
}

/// The ids with the most gradients, by filtered Space-Saving (Homem and Carvalho, "Finding top-k elements in data
/// streams", Information Sciences 180, 2010): a count may be too large by the stated error, and is never too small.
type Hottest = FilteredSpaceSaving<u64>;

/// An id, and how many gradients it has had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HotId {
    pub(crate) id: u64,
    /// The counted gradients: at least as many as the id has had.
    pub(crate) updates: u64,
    /// The most by which `updates` is too large.
    pub(crate) error: u64,
}

impl Heat {
    /// Returns the heat of a bucket that is new on this server. It keeps at most `hottest_ids` ids. If this is 0, only
    /// rows are counted.
    pub(super) fn new(hottest_ids: usize) -> Self {
        Self {
            hottest: (hottest_ids > 0).then(|| Hottest::new(hottest_ids)),
            ..Self::default()
        }
    }

    /// Counts an update of rows.
    pub(super) fn count_update(&mut self, ids: &[u64]) {
        self.updated += ids.len() as u64;
        if let Some(hottest) = &mut self.hottest {
            for id in ids {
                hottest.insert(*id, 1);
            }
        }
    }

    /// Returns the hottest ids, the hottest first; empty if ids are not counted.
    pub(crate) fn hottest(&self) -> Vec<HotId> {
        let all = self.hottest.iter().flat_map(Hottest::iter);
        let mut ids: Vec<HotId> = all
            .map(|(id, count)| HotId {
                id: *id,
                updates: count.estimated_count(),
                error: count.associated_error(),
            })
            .collect();
        ids.sort_unstable_by_key(|hot| (Reverse(hot.updates), hot.id));
        ids
    }
}

// Without the ids, which do not belong in a log, and without reads: a pull that is sent again counts again, and fuzzing compares
// the text of a block before and after.
impl fmt::Debug for Heat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Heat")
            .field("updated", &self.updated)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hottest_ids_are_found_among_many_more() {
        let mut heat = Heat::new(16);
        for round in 0..1000u64 {
            // Ids 0 to 3 are in all updates, each other id in one.
            heat.count_update(&[0, 1, 2, 3, 4 + 2 * round, 5 + 2 * round]);
        }
        assert_eq!((heat.read, heat.updated), (0, 6000));
        let hottest = heat.hottest();
        let mut first: Vec<u64> = hottest[..4].iter().map(|hot| hot.id).collect();
        first.sort_unstable();
        assert_eq!(first, [0, 1, 2, 3]);
        for hot in &hottest[..4] {
            assert!(
                hot.updates >= 1000 && hot.updates - hot.error <= 1000,
                "{hot:?}"
            );
        }
    }

    #[test]
    fn ids_are_not_kept_by_default() {
        let mut heat = Heat::new(0);
        heat.count_update(&[7, 8]);
        assert_eq!((heat.updated, heat.hottest()), (2, Vec::new()));
    }
}
