//! The calls of which there are most, finished steps above all, change nothing in the view but the min clock. For these the min clock
//! is known without a look at each member.

use std::collections::BTreeMap;

use shared_proto::ids::{Clock, TaskId};

use super::Cluster;
use super::members::WorkerProgress;

/// The number of workers that hold data at each clock. It is kept while calls change nothing else in the view.
#[derive(Debug, Default)]
pub(super) struct Steady(BTreeMap<Clock, usize>);

impl Steady {
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

    /// Returns the lowest clock of the workers that hold data.
    pub(super) fn lowest(&self) -> Option<Clock> {
        self.0.first_key_value().map(|(clock, _)| *clock)
    }
}

impl Cluster {
    /// Begins a call that changes nothing in the view but the min clock, unless it calls [`Self::unsteady`].
    pub(crate) fn begin_steady(&mut self) {
        if self.steady.is_some() || self.has_ring() {
            return;
        }
        self.refresh_view();
        let mut steady = Steady::default();
        for member in self.durable.members.values().filter(|m| m.alive) {
            if member.progress.active {
                steady.enters(member.progress.clock);
            }
        }
        self.steady = Some(steady);
    }

    /// Notes that more has changed in the view, or that waiting calls may have got an answer.
    pub(crate) fn unsteady(&mut self) {
        self.steady = None;
    }

    /// Returns whether nothing has changed since [`Self::begin_steady`] but clocks.
    pub(crate) fn is_steady(&self) -> bool {
        self.steady.is_some()
    }

    /// Changes the progress of a worker. Returns what the change does; none if there is no such member.
    pub(super) fn change_progress<T>(
        &mut self,
        id: TaskId,
        change: impl FnOnce(&mut WorkerProgress) -> T,
    ) -> Option<T> {
        let member = self.durable.members.get_mut(&id)?;
        let counts = |progress: &WorkerProgress| progress.active.then_some(progress.clock);
        let before = counts(&member.progress);
        let changed = change(&mut member.progress);
        let after = counts(&member.progress);
        if let Some(steady) = self
            .steady
            .as_mut()
            .filter(|_| member.alive && before != after)
        {
            before.into_iter().for_each(|clock| steady.leaves(clock));
            after.into_iter().for_each(|clock| steady.enters(clock));
        }
        Some(changed)
    }
}
