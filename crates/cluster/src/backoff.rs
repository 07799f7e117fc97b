//! Exponential backoff with jitter and an upper limit.

use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// The upper bound of the first wait.
const FIRST: Duration = Duration::from_secs(5);

/// The upper bound of all waits.
const LONGEST: Duration = Duration::from_secs(300);

/// The waits between attempts.
#[derive(Debug)]
pub(crate) struct Backoff {
    failures: u32,
    random: StdRng,
}

impl Default for Backoff {
    fn default() -> Self {
        Self::seeded(0)
    }
}

impl Backoff {
    /// Creates a backoff. The same seed gives the same waits.
    pub(crate) fn seeded(seed: u64) -> Self {
        Self {
            failures: 0,
            random: StdRng::seed_from_u64(seed),
        }
    }

    /// Returns the number of consecutive failures.
    pub(crate) fn failures(&self) -> u32 {
        self.failures
    }

    /// Counts a failure and returns the time of the next attempt. The wait is drawn from the upper half of a
    /// range that doubles with each failure.
    pub(crate) fn failed(&mut self, now: Instant) -> Instant {
        let doubled = FIRST.saturating_mul(1 << self.failures.min(16));
        self.failures = self.failures.saturating_add(1);
        let longest = doubled.min(LONGEST);
        now + longest.mul_f64(self.random.random_range(0.5..=1.0))
    }

    /// Notes a success: the next failure starts with the first wait.
    pub(crate) fn succeeded(&mut self) {
        self.failures = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waits(seed: u64, tries: usize) -> Vec<Duration> {
        let (mut backoff, now) = (Backoff::seeded(seed), Instant::now());
        (0..tries).map(|_| backoff.failed(now) - now).collect()
    }

    #[test]
    fn waits_double_up_to_a_limit_and_differ_between_runs() {
        for seed in 0..100 {
            let waits = waits(seed, 200);
            for (i, wait) in waits.iter().enumerate() {
                let longest = FIRST.saturating_mul(1 << i.min(16)).min(LONGEST);
                assert!(
                    *wait >= longest / 2 && *wait <= longest,
                    "try {i}: {wait:?}"
                );
            }
            assert_eq!(waits, self::waits(seed, 200), "the seed decides");
        }
        let of_first: std::collections::BTreeSet<Duration> =
            (0..100).map(|seed| waits(seed, 1)[0]).collect();
        assert!(of_first.len() > 90, "not all try at the same time");
    }

    #[test]
    fn a_success_starts_over() {
        let (mut backoff, now) = (Backoff::seeded(1), Instant::now());
        for _ in 0..10 {
            backoff.failed(now);
        }
        assert_eq!(backoff.failures(), 10);
        backoff.succeeded();
        assert!(backoff.failed(now) <= now + FIRST);
    }
}
