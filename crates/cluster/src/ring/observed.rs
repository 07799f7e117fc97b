//! Counts and times of rings for status and metrics, since this process started.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use shared_proto::ids::TaskId;

/// The maximum number of forming times that are kept until the metrics have taken them.
const KEPT: usize = 16;

/// The cause for which a ring breaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Cause {
    /// A worker that is not in the ring asks to join it.
    Newcomer,
    /// A member could not exchange data with another member, which has died or is cut off by the network.
    Link,
    /// A member has left, or its lease has ended.
    Gone,
    /// A member asks for another ring and names no other member.
    Again,
    /// The members' values must be loaded from an earlier checkpoint.
    Restore,
    /// A shard of a job with servers has moved, or has other values.
    Shard,
}

impl Cause {
    /// All causes.
    pub const ALL: [Self; 6] = [
        Self::Newcomer,
        Self::Link,
        Self::Gone,
        Self::Again,
        Self::Restore,
        Self::Shard,
    ];

    /// Returns the cause as one word.
    pub fn name(self) -> &'static str {
        match self {
            Self::Newcomer => "newcomer",
            Self::Link => "link",
            Self::Gone => "gone",
            Self::Again => "again",
            Self::Restore => "restore",
            Self::Shard => "shard",
        }
    }

    /// Returns the cause as a text for the log.
    pub(crate) fn text(self) -> &'static str {
        match self {
            Self::Newcomer => "a worker has come",
            Self::Link => "a member could not exchange numbers with another",
            Self::Gone => "a member is gone",
            Self::Again => "a member asks for another",
            Self::Restore => "an earlier checkpoint is to be loaded",
            Self::Shard => "a shard has moved or has other values",
        }
    }
}

/// Counts and times of rings.
#[derive(Debug, Default)]
pub struct Rings {
    /// The two workers that could not exchange data in the newest ring that broke; `None` if there are none, or the
    /// ring had made progress.
    pub(super) lost: Option<[TaskId; 2]>,
    /// The time at which the present ring was formed or, while it is being formed, the time since which it is; `None`
    /// before this process has observed either.
    since: Option<Instant>,
    /// The time of the first break since a ring was settled; `None` if none has broken since.
    broken_at: Option<Instant>,
    broken: BTreeMap<Cause, u64>,
    evicted: u64,
    /// The number of rings that were settled after a break.
    renewed: u64,
    /// The newest times from a break until the next settled ring, oldest first.
    took: VecDeque<Duration>,
}

impl Rings {
    /// Notes that the workers begin to join the first ring.
    pub(super) fn begun(&mut self, now: Instant) {
        self.since.get_or_insert(now);
    }

    pub(crate) fn broke(&mut self, now: Instant, cause: Cause) {
        *self.broken.entry(cause).or_default() += 1;
        self.since = Some(now);
        self.broken_at.get_or_insert(now);
    }

    /// Notes that all workers must join the ring that is being formed once more.
    pub(crate) fn waits_again(&mut self, now: Instant) {
        self.since = self.since.map(|_| now);
    }

    /// Shifts the beginning of the present ring by `gap`, for which this process did not run.
    pub(crate) fn was_stopped(&mut self, gap: Duration) {
        self.since = self.since.map(|since| since + gap);
    }

    pub(super) fn formed(&mut self, now: Instant) {
        self.since = Some(now);
    }

    /// Notes that all members of the formed ring have its values.
    pub(super) fn settled(&mut self, now: Instant) {
        let Some(broken_at) = self.broken_at.take() else {
            return;
        };
        self.renewed += 1;
        if self.took.len() == KEPT {
            self.took.pop_front();
        }
        self.took.push_back(now.duration_since(broken_at));
    }

    pub(super) fn evicted(&mut self) {
        self.evicted += 1;
    }

    /// Returns the time for which the present ring has existed or has been forming; `None` if its beginning is unknown.
    pub(super) fn age(&self, now: Instant) -> Option<Duration> {
        Some(now.duration_since(self.since?))
    }

    /// Returns the number of rings that were broken for a cause.
    pub fn broken(&self, cause: Cause) -> u64 {
        self.broken.get(&cause).copied().unwrap_or(0)
    }

    /// Returns the number of workers that were evicted because another worker could not reach them.
    pub fn evictions(&self) -> u64 {
        self.evicted
    }

    /// Returns the number of rings that were settled after a break.
    pub fn renewed(&self) -> u64 {
        self.renewed
    }

    /// Returns the times from the break of a ring until all members of the next one had its values, oldest first,
    /// without the first `seen` of all times. Only the newest times are kept.
    pub fn took_after(&self, seen: u64) -> impl Iterator<Item = Duration> {
        let new = self.renewed.saturating_sub(seen);
        let known = self.took.len().saturating_sub(new as usize);
        self.took.iter().skip(known).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_that_breaks_before_all_have_its_values_counts_from_the_first_break() {
        let (mut rings, start) = (Rings::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        rings.begun(at(0));
        rings.formed(at(1));
        rings.settled(at(2));
        assert_eq!(rings.took_after(0).count(), 0, "none was broken");
        rings.broke(at(10), Cause::Link);
        rings.formed(at(11));
        assert_eq!(rings.age(at(13)), Some(Duration::from_secs(2)));
        rings.broke(at(14), Cause::Newcomer);
        rings.formed(at(15));
        rings.settled(at(16));
        assert_eq!(rings.took_after(0).next(), Some(Duration::from_secs(6)));
        assert_eq!(rings.took_after(1).count(), 0);
        let causes = Cause::ALL.map(|cause| rings.broken(cause));
        assert_eq!(causes, [1, 1, 0, 0, 0, 0]);
    }

    #[test]
    fn only_the_newest_times_are_kept() {
        let (mut rings, mut now) = (Rings::default(), Instant::now());
        for _ in 0..KEPT + 3 {
            rings.broke(now, Cause::Again);
            now += Duration::from_secs(1);
            rings.settled(now);
        }
        assert_eq!(rings.renewed(), KEPT as u64 + 3);
        assert_eq!(rings.took_after(0).count(), KEPT);
        assert_eq!(rings.took_after(KEPT as u64 + 1).count(), 2);
    }
}
