//! The share of a processor's time that a thread may take.

use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::time::{ClockId, clock_gettime};

/// The most unused processor time that a thread can save up and use at once.
const SAVED: Duration = Duration::from_millis(50);

/// A limit on the processor time of one thread, which asks for its turn before each piece of work.
pub(crate) struct Pace {
    share: f64,
    /// The moment from which time counts, and the thread's processor time at that moment.
    since: Mutex<(Instant, Duration)>,
}

impl Pace {
    /// Returns a limit for a thread that has not run yet. From now on, the thread may use this share of one processor's
    /// time.
    pub(crate) fn new(share: f64) -> Self {
        Self {
            share,
            since: Mutex::new((Instant::now(), Duration::ZERO)),
        }
    }

    /// Waits until the thread may work again.
    pub(crate) async fn turn(&self) {
        loop {
            let rest = self.rest(Instant::now(), processor_time());
            if rest.is_zero() {
                return;
            }
            tokio::time::sleep(rest).await;
        }
    }

    /// Returns how long the thread must rest from `now` on. `used` is the processor time that the thread has used.
    fn rest(&self, now: Instant, used: Duration) -> Duration {
        let mut since = self.since.lock();
        let granted = now.duration_since(since.0).mul_f64(self.share);
        let used_since = used.saturating_sub(since.1);
        if let Some(unused) = granted.checked_sub(used_since) {
            if unused > SAVED {
                // Time that was not used for long is not granted later.
                let begin = now.checked_sub(SAVED.div_f64(self.share));
                *since = (begin.unwrap_or(now), used);
            }
            return Duration::ZERO;
        }
        (used_since - granted).div_f64(self.share)
    }
}

/// Returns the processor time that the calling thread has used.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(
        time.tv_sec.unsigned_abs(),
        time.tv_nsec.unsigned_abs() as u32,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_gets_its_share_and_little_of_what_it_has_not_used() {
        let pace = Pace::new(0.25);
        let began = pace.since.lock().0;
        let (mut now, mut used) = (began, Duration::ZERO);
        // It asks for all that it can get.
        while now < began + Duration::from_secs(10) {
            let rest = pace.rest(now, used);
            now += rest;
            if rest.is_zero() {
                used += Duration::from_millis(1);
                now += Duration::from_millis(1);
            }
        }
        let share = used.as_secs_f64() / (now - began).as_secs_f64();
        assert!((share - 0.25).abs() < 0.01, "{share}");
        // After a long pause, there is no more than a little.
        now += Duration::from_secs(3600);
        let before = used;
        while pace.rest(now, used).is_zero() {
            used += Duration::from_millis(1);
        }
        let at_once = used - before;
        assert!(
            (SAVED..SAVED + Duration::from_millis(3)).contains(&at_once),
            "{at_once:?}"
        );
    }
}
