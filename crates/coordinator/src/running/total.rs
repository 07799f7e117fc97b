//! Counters for Prometheus of what each job counts from 0.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use metrics::Counter;

/// A counter of the process, which one job after the other counts on.
pub(super) struct Total {
    counter: Counter,
    /// The number of the present job that is counted.
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

    /// Counts on to the present job's number.
    pub(super) fn is(&self, number: u64) {
        let before = self.counted.fetch_max(number, Relaxed);
        self.counter.increment(number.saturating_sub(before));
    }
}
