//! Computes the views that members follow.

use shared_proto::ids::{Clock, Role, Task};
use shared_proto::planted;
use shared_proto::view::{Commit, View};

use super::Cluster;
use super::fast_path::ClockCounts;

/// The maximum number of slowest workers that a view names.
const MOST_SLOWEST: usize = 8;

impl Cluster {
    /// Updates the view and returns it. If anything in the view has changed, it gets the next number.
    pub fn refresh_view(&mut self) -> &View {
        if self.on_fast_path() && !self.view_is_outdated() {
            return self.refresh_min_clock();
        }
        self.leave_fast_path();
        let fresh = self.fresh_view();
        if fresh != self.view {
            self.view = View {
                number: self.view.number.next(),
                ..fresh
            };
        }
        &self.view
    }

    /// Computes the view from all members, with the number of the newest view.
    pub(crate) fn fresh_view(&mut self) -> View {
        debug_assert!(self.due.is_empty(), "a call has left {:?}", self.due);
        let mut workers: Vec<Task> = self.durable.live(Role::Worker).map(|m| m.task).collect();
        workers.sort_by_key(|task| task.id.index);
        View {
            number: self.view.number,
            epoch: self.durable.epoch(),
            workers,
            min_clock: self.update_min_clock(),
            slowest: self.slowest(),
            initializer: self.durable.variables.as_ref().and_then(|v| v.initializer),
            initialized: self.durable.initialized(),
            commit: self.durable.training.commit.clone(),
            phase: self.durable.outcome.phase,
            error: self.durable.outcome.error.clone(),
            checkpoint: self.saving.order(),
            run: self.durable.run.number,
            learning_rate_factor: self.learning_rate_factor(),
            // Set when the view is published.
            persisted: 0,
            opened: 0,
            measured: self.step_to_measure(),
        }
    }

    /// Returns whether the newest view is outdated in a field that can be compared without looking at the members. The
    /// list of workers is not compared: a call that changes it leaves the fast path.
    pub(super) fn view_is_outdated(&self) -> bool {
        let initializer = self.durable.variables.as_ref().and_then(|v| v.initializer);
        let step = |commit: &Option<Commit>| commit.as_ref().map(|commit| commit.step);
        let view = &self.view;
        view.epoch != self.durable.epoch()
            || view.initializer != initializer
            || view.initialized != self.durable.initialized()
            || step(&view.commit) != step(&self.durable.training.commit)
            || view.phase != self.durable.outcome.phase
            || view.error != self.durable.outcome.error
            || view.checkpoint != self.saving.order()
            || view.learning_rate_factor != self.learning_rate_factor()
    }

    /// Updates the min clock of the view and returns the view. If the min clock has risen, the view gets the next
    /// number.
    pub(super) fn refresh_min_clock(&mut self) -> &View {
        let min_clock = self.update_min_clock();
        if self.view.min_clock != min_clock {
            self.view.min_clock = min_clock;
            self.view.slowest = self.slowest();
            self.view.number = self.view.number.next();
        }
        &self.view
    }

    /// Returns the view that was made last.
    pub fn view(&self) -> &View {
        &self.view
    }

    /// Raises the min clock to the lowest clock of the workers that hold data or, in sync mode, to the number of
    /// committed steps. Returns the min clock. In a ring, only steps that all members have made raise it.
    pub(super) fn update_min_clock(&mut self) -> Clock {
        let lowest = if self.has_ring() {
            // Set when all members have made a step.
            None
        } else if self.sync() {
            self.durable
                .training
                .commit
                .as_ref()
                .map(|commit| commit.step.next())
        } else {
            let known = self.fast_path.as_ref().and_then(ClockCounts::lowest);
            let active = self
                .durable
                .live(Role::Worker)
                .filter(|m| m.progress.active);
            // Where no worker holds data, the evaluator must not wait for the clock of another.
            let evaluator = || {
                let evaluator = self.durable.member(self.durable.evaluations.holder()?.id)?;
                Some(evaluator.progress.clock)
            };
            let clocks = active.map(|m| m.progress.clock);
            match planted!(FastestMinClock) {
                true => clocks.max(),
                false => known.or_else(|| clocks.min()).or_else(evaluator),
            }
        };
        let training = &mut self.durable.training;
        training.min_clock = training.min_clock.max(lowest.unwrap_or_default());
        training.min_clock
    }

    /// Returns the workers that the others wait for, at most [`MOST_SLOWEST`].
    pub(super) fn slowest(&self) -> Vec<Task> {
        let mut slowest = self.stragglers();
        slowest.truncate(MOST_SLOWEST);
        slowest
    }

    /// Returns all workers that the others wait for.
    pub(super) fn stragglers(&self) -> Vec<Task> {
        if self.has_ring() {
            return self.slowest_of_ring();
        }
        if let Some(step) = &self.durable.training.step {
            return step.unfinished().collect();
        }
        self.durable
            .live(Role::Worker)
            .filter(|m| m.progress.active && m.progress.clock <= self.durable.training.min_clock)
            .map(|m| m.task)
            .collect()
    }

    /// Puts a call on the fast path, unless the job has a ring. A call that changes more than clocks and leased data
    /// must leave it with [`Self::leave_fast_path`].
    pub fn begin_fast_path(&mut self) {
        if self.fast_path.is_some() || self.has_ring() {
            return;
        }
        self.refresh_view();
        let holders = self
            .durable
            .members
            .values()
            .filter(|m| m.is_alive() && m.progress.active);
        self.fast_path = Some(ClockCounts::new(holders.map(|m| m.progress.clock)));
    }
}
