//! The fast path of the most frequent calls: finished steps, heartbeats and requests for work. These calls rarely
//! change anything in the view except the min clock. The fast path computes it without looking at each member.

use std::collections::BTreeMap;

use shared_proto::ids::{Clock, TaskId};

use super::Cluster;
use super::members::WorkerProgress;

/// The number of workers that hold data at each clock. It is valid while calls stay on the fast path.
#[derive(Debug, Default)]
pub(super) struct ClockCounts(BTreeMap<Clock, usize>);

impl ClockCounts {
    /// Counts the workers at each of these clocks.
    pub(super) fn new(clocks: impl Iterator<Item = Clock>) -> Self {
        let mut counts = Self::default();
        clocks.for_each(|clock| counts.enters(clock));
        counts
    }

    fn enters(&mut self, clock: Clock) {
        *self.0.entry(clock).or_default() += 1;
    }

    fn leaves(&mut self, clock: Clock) {
        if let Some(count) = self.0.get_mut(&clock) {
            *count -= 1;
            if *count == 0 {
                self.0.remove(&clock);
            }
        }
    }

    /// Returns the lowest clock of the workers that hold data; `None` if no worker does.
    pub(super) fn lowest(&self) -> Option<Clock> {
        self.0.first_key_value().map(|(clock, _)| *clock)
    }
}

impl Cluster {
    /// Leaves the fast path. This is necessary if the list of live workers changes, or if a waiting call may wait for
    /// the change.
    pub fn leave_fast_path(&mut self) {
        self.fast_path = None;
    }

    /// Returns whether the newest call has stayed on the fast path.
    pub fn on_fast_path(&self) -> bool {
        self.fast_path.is_some()
    }

    /// Changes the progress of a worker, and keeps the counts of the fast path valid. Returns the result of `change`;
    /// `None` if there is no such member.
    pub(super) fn change_progress<T>(
        &mut self,
        id: TaskId,
        change: impl FnOnce(&mut WorkerProgress) -> T,
    ) -> Option<T> {
        let member = self.durable.members.get_mut(&id)?;
        let clock_with_data = |progress: &WorkerProgress| progress.active.then_some(progress.clock);
        let before = clock_with_data(&member.progress);
        let changed = change(&mut member.progress);
        let after = clock_with_data(&member.progress);
        if let Some(counts) = self
            .fast_path
            .as_mut()
            .filter(|_| member.is_alive() && before != after)
        {
            before.into_iter().for_each(|clock| counts.leaves(clock));
            after.into_iter().for_each(|clock| counts.enters(clock));
        }
        Some(changed)
    }
}
