//! An estimate of the time that is left of a job, from its pace in the last seconds.

use std::collections::VecDeque;

/// The time over which the pace is measured, in seconds. It usually covers an evaluation between two epochs.
const WINDOW: f64 = 30.0;

/// The shortest time over which a pace is measured, in seconds.
const SHORTEST: f64 = 1.0;

/// The number of samples that were done at several times of the job.
#[derive(Clone, Debug, Default)]
pub(super) struct Pace {
    /// Seconds and samples, the oldest first.
    seen: VecDeque<(f64, u64)>,
}

impl Pace {
    /// Notes the number of samples that are done after this number of seconds of the job.
    pub(super) fn note(&mut self, seconds: f64, samples: u64) {
        // A job that has gone back to a checkpoint has another pace.
        if self.seen.back().is_some_and(|last| samples < last.1) {
            self.seen.clear();
        }
        self.seen.push_back((seconds, samples));
        while self
            .seen
            .get(1)
            .is_some_and(|next| next.0 <= seconds - WINDOW)
        {
            self.seen.pop_front();
        }
    }

    /// Returns the seconds until `total` samples are done; `None` while the pace is not known.
    pub(super) fn left(&self, total: u64) -> Option<f64> {
        let (first, last) = (self.seen.front()?, self.seen.back()?);
        let seconds = last.0 - first.0;
        let samples = last.1.checked_sub(first.1)?;
        (seconds >= SHORTEST && samples > 0)
            .then(|| total.saturating_sub(last.1) as f64 * seconds / samples as f64)
    }
}

/// Describes a time that is left, in nine columns at the most.
pub(super) fn time(seconds: f64) -> String {
    let whole = seconds.round().max(0.0) as u64;
    let (minutes, hours, days) = (whole / 60, whole / 3600, whole / 86_400);
    match whole {
        0..3600 => format!("{minutes}:{:02}", whole % 60),
        3600..360_000 => format!("{hours}:{:02}:{:02}", minutes % 60, whole % 60),
        // More than 10,000 days is no estimate.
        _ if days < 10_000 => format!("{days} days"),
        _ => "years".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_left_follows_the_newest_pace() {
        let mut pace = Pace::default();
        assert_eq!(pace.left(1000), None);
        pace.note(0.0, 0);
        pace.note(0.5, 50);
        assert_eq!(pace.left(1000), None, "too short");
        pace.note(2.0, 200);
        assert_eq!(pace.left(1000), Some(8.0));
        // Half as fast from here on.
        for second in 3..60 {
            pace.note(f64::from(second), 200 + 50 * (second as u64 - 2));
        }
        let done = 200 + 50 * 57;
        assert_eq!(pace.left(done + 500), Some(10.0));
        assert_eq!(pace.left(done), Some(0.0));
    }

    #[test]
    fn a_job_that_waits_or_went_back_has_no_pace() {
        let mut pace = Pace::default();
        for second in 0..40 {
            pace.note(f64::from(second), 100);
        }
        assert_eq!(pace.left(1000), None);
        pace.note(41.0, 50);
        assert_eq!(pace.left(1000), None);
    }

    #[test]
    fn times_are_short() {
        let times = [0.2, 59.6, 3599.0, 3600.0, 359_999.0, 360_000.0, 1e12];
        let texts = times.map(time);
        let expected = [
            "0:00", "1:00", "59:59", "1:00:00", "99:59:59", "4 days", "years",
        ];
        assert_eq!(texts, expected);
        assert!(texts.iter().all(|text| text.len() <= 9));
    }
}
