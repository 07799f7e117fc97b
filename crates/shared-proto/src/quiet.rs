//! Limits the log messages about faults that callers can cause at will.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The maximum number of messages that are logged in a period.
const MOST: u32 = 20;

/// The length of a period.
const PERIOD: Duration = Duration::from_secs(10);

/// A limit on the log messages of one kind.
#[derive(Debug)]
pub struct Quiet(Mutex<Period>);

#[derive(Debug)]
struct Period {
    began: Option<Instant>,
    logged: u32,
    left_out: u64,
}

impl Default for Quiet {
    fn default() -> Self {
        Self::new()
    }
}

impl Quiet {
    /// Creates a limit for messages of which none has been logged yet.
    pub const fn new() -> Self {
        Self(Mutex::new(Period {
            began: None,
            logged: 0,
            left_out: 0,
        }))
    }

    /// Decides whether to log another message. If so, returns the number of messages left out since the last logged
    /// one.
    pub fn admit(&self) -> Option<u64> {
        let mut period = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if period.began.is_none_or(|began| began.elapsed() >= PERIOD) {
            period.began = Some(Instant::now());
            period.logged = 0;
        }
        if period.logged == MOST {
            period.left_out += 1;
            return None;
        }
        period.logged += 1;
        Some(std::mem::take(&mut period.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_of_messages_is_cut_and_counted() {
        let quiet = Quiet::new();
        let logged = (0..1000).filter_map(|_| quiet.admit()).count();
        assert_eq!(logged, MOST as usize);
        let long_ago = Instant::now().checked_sub(2 * PERIOD);
        quiet.0.lock().unwrap().began = long_ago;
        assert_eq!(quiet.admit(), Some(1000 - u64::from(MOST)));
        assert_eq!(quiet.admit(), Some(0));
    }
}
