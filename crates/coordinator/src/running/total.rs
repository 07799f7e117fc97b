//! Counters for Prometheus that continue from job to job, although each job counts from 0.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use metrics::Counter;

/// A counter of the process, to which one job after the other adds its count.
pub(super) struct Total {
    counter: Counter,
    /// How much of the present job's count the counter includes.
    counted: AtomicU64,
}

impl Total {
    pub(super) fn new(counter: Counter) -> Self {
        // Shown as 0 until something is counted.
        counter.increment(0);
        Self {
            counter,
            counted: AtomicU64::new(0),
        }
    }

    /// Raises the counter by the growth of the present job's count, which is now `number`.
    pub(super) fn is(&self, number: u64) {
        let before = self.counted.fetch_max(number, Relaxed);
        self.counter.increment(number.saturating_sub(before));
    }
}
