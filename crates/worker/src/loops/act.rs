//! The operations that replicas and processes make together.

use super::error::LoopError;

/// A collective call. Its code is sent as the first number. The codes of all members are summed like the other numbers,
/// so each member sees whether all make the same call.
#[derive(Clone, Copy)]
pub(super) enum Act {
    Meet,
    Compare,
    Reduce,
    Gather,
    Leave,
    End,
    Sum,
    Minimize,
}

impl Act {
    /// Returns the code and the numbers, as they are sent.
    pub(super) fn with(self, numbers: &[f64]) -> Vec<f64> {
        let act = [f64::from(self as u8)];
        act.iter().chain(numbers).copied().collect()
    }

    /// Returns the sums without the code. Fails if not all `members` have sent this code.
    pub(super) fn of(self, sum: &[f64], members: usize) -> Result<Vec<f64>, LoopError> {
        match sum.split_first() {
            Some((acts, numbers)) if *acts == f64::from(self as u8) * members as f64 => {
                Ok(numbers.to_vec())
            }
            _ => Err(LoopError::OutOfStep),
        }
    }
}
