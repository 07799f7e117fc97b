//! The updates of a block that are in flight at a time.

use optimizer::{Norms, StaleStep, StaleSteps};
use shared_proto::ids::Version;

/// The largest staleness that counts, divided by the number of workers. A worker that computes ahead has two gradients
/// in flight.
const MOST_FOR_EACH_WORKER: u64 = 4;

/// The updates of a block that are in flight at a time, estimated from the staleness of gradients. Checkpoints do not
/// have the estimate: a few updates restore it.
#[derive(Debug, Default)]
pub(super) struct InFlight {
    /// The mean staleness of the last updates; `None` before the first one.
    mean_staleness: Option<f64>,
    /// The version that the last update made, and its norms; `None` before the first one.
    last: Option<(Version, Norms)>,
    /// The number of corrected updates.
    corrected: u64,
}

impl InFlight {
    /// Returns the corrections of the next update, given its staleness and the number of workers that are members.
    pub(super) fn next(&mut self, staleness: u64, workers: usize, stale: StaleSteps) -> StaleStep {
        self.note(staleness, workers);
        self.corrected += 1;
        let norms = self.last.map(|(_, norms)| norms);
        let (updates, mean) = (self.updates(workers), self.mean_staleness());
        stale.next(self.corrected, norms, updates, staleness, mean)
    }

    /// Records the norms of an update, and the version that the update has made.
    pub(super) fn made(&mut self, version: Version, norms: Norms) {
        self.last = Some((version, norms));
    }

    /// Returns the version that the last update has made.
    pub(super) fn version(&self) -> Option<Version> {
        self.last.map(|(version, _)| version)
    }

    /// Adds the staleness of an update to the mean. The mean is over about twice as many updates as there are workers.
    /// It begins with the staleness that results if each worker has one gradient in flight. A gradient that is much
    /// older counts only with the largest staleness, so that it does not distort the mean.
    fn note(&mut self, staleness: u64, workers: usize) {
        let staleness = staleness.min(MOST_FOR_EACH_WORKER * workers as u64);
        let before = self.mean_staleness.unwrap_or(workers as f64 - 1.0);
        let mean = before + (staleness as f64 - before) / (2 * workers) as f64;
        self.mean_staleness = Some(mean);
    }

    fn mean_staleness(&self) -> f64 {
        self.mean_staleness.unwrap_or_default()
    }

    /// Returns the number of updates in flight, including this one. It is at least the number of workers, because the
    /// mean staleness misleads if one worker is slow: most gradients are then hardly stale, but those of the slow
    /// worker are very stale.
    fn updates(&self, workers: usize) -> f64 {
        (1.0 + self.mean_staleness()).max(workers as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mean_follows_the_staleness_and_one_outlier_hardly_counts() {
        let mut in_flight = InFlight::default();
        in_flight.note(7, 8);
        assert_eq!(in_flight.updates(8), 8.0);
        for _ in 0..200 {
            in_flight.note(15, 8);
        }
        assert!((in_flight.updates(8) - 16.0).abs() < 0.01);
        in_flight.note(u64::MAX, 8);
        assert!(in_flight.updates(8) < 17.1);
        for _ in 0..200 {
            in_flight.note(0, 8);
        }
        // Each worker has a gradient under way.
        assert_eq!(in_flight.updates(8), 8.0);
    }
}
