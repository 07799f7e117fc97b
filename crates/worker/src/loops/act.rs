//! What replicas and processes do together.

use super::error::LoopError;

/// What replicas or processes do together. It travels with their numbers, and is added up as they are, so each finds out whether all do
/// the same.
#[derive(Clone, Copy)]
pub(super) enum Act {
    Meet,
    Compare,
    Reduce,
    Gather,
    End,
    Sum,
    Minimize,
}

impl Act {
    /// Returns the act with its numbers, as they travel.
    pub(super) fn with(self, numbers: &[f64]) -> Vec<f64> {
        let act = [f64::from(self as u8)];
        act.iter().chain(numbers).copied().collect()
    }

    /// Returns the sums of the numbers that so many have sent with the same act.
    pub(super) fn of(self, sum: &[f64], members: usize) -> Result<Vec<f64>, LoopError> {
        match sum.split_first() {
            Some((acts, numbers)) if *acts == f64::from(self as u8) * members as f64 => {
                Ok(numbers.to_vec())
            }
            _ => Err(LoopError::OutOfStep),
        }
    }
}
