//! The bound on a worker's lead: the staleness bound of Ho et al., "More Effective Distributed ML
//! via a Stale Synchronous Parallel Parameter Server", NIPS 2013, section 2.

use crate::ids::Clock;

/// The largest lead, in steps, with which a pull is answered. Lead is the puller's clock less the
/// min clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StalenessBound {
    /// A lead of at most this number of steps. 0 is lock-step.
    Steps(u64),
    /// Any lead: no pull waits.
    Unbounded,
}

impl StalenessBound {
    /// Returns whether a pull for `clock` may be answered while the slowest worker is at `min_clock`.
    pub fn admits(self, clock: Clock, min_clock: Clock) -> bool {
        match self {
            Self::Steps(bound) => lead(clock, min_clock) <= bound,
            Self::Unbounded => true,
        }
    }
}

/// Returns the number of steps by which `clock` is ahead of `min_clock`; 0 if it is behind.
pub fn lead(clock: Clock, min_clock: Clock) -> u64 {
    clock.0.saturating_sub(min_clock.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_is_admitted_is_within_the_bound(clock in 0u64..50, min in 0u64..50, k in 0u64..20) {
            let admitted = StalenessBound::Steps(k).admits(Clock(clock), Clock(min));
            prop_assert_eq!(admitted, clock <= min + k);
            prop_assert!(StalenessBound::Unbounded.admits(Clock(clock), Clock(min)));
        }

        #[test]
        fn the_slowest_is_never_held_back(clock in 0u64..u64::MAX, k in 0u64..20) {
            prop_assert!(StalenessBound::Steps(k).admits(Clock(clock), Clock(clock)));
        }
    }
}
