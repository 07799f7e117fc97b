//! The data, leased in splits. The order of the samples follows from (seed, data epoch), and workers compute it; this
//! module counts only positions in that order. A position is leased to one worker, or to one ring, at a time. It is
//! done once the coordinator has acknowledged that its step is finished.

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Serialize};
use shared_proto::ids::{Generation, Role, Task, TaskId};
use shared_proto::planted;

use super::leases::Leases;
pub(crate) use super::split::Split;

/// The maximum number of samples in a data set. Below it, positions and their sums do not overflow.
pub(crate) const MOST_SAMPLES: u64 = 1 << 48;

/// Stands for all members of a ring, as the holder of a split that they hold together.
pub(crate) const HELD_BY_ALL: Task = Task {
    id: TaskId {
        role: Role::Coordinator,
        index: 0,
    },
    generation: Generation(0),
};

/// The positions that are done, leased to a worker, or left.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Ledger {
    samples: u64,
    epochs: u32,
    batch: u64,
    /// The number of steps that may still be leased; `None` without a limit.
    budget: Option<u64>,
    /// True if workers make each step together. Such a step stays charged to the budget when one of its workers is
    /// gone.
    shared_steps: bool,
    next_id: u64,
    /// The data epoch of the next fresh position. A fresh position has never been leased.
    #[serde(rename = "epoch")]
    data_epoch: u32,
    /// The next fresh position.
    position: u64,
    /// Ranges that were taken back before they were done: data epoch, start, end. They are leased before fresh
    /// positions.
    returned: VecDeque<(u32, u64, u64)>,
    leased: Leases,
    /// The number of done positions of each data epoch that is not complete.
    done: BTreeMap<u32, u64>,
}

impl Ledger {
    /// Creates a ledger of `epochs` passes over `samples` samples. A worker has `batch` samples in each of its steps.
    /// The ledger leases at most `budget` steps, if a budget is set. `shared_steps` is true if workers make each step
    /// together.
    pub(crate) fn new(
        samples: u64,
        epochs: u32,
        batch: u64,
        budget: Option<u64>,
        shared_steps: bool,
    ) -> Self {
        Self {
            samples,
            epochs,
            batch,
            budget,
            shared_steps,
            next_id: 1,
            data_epoch: 0,
            position: 0,
            returned: VecDeque::new(),
            leased: Leases::default(),
            done: BTreeMap::new(),
        }
    }

    /// Checks that the ranges lie within the data. A stored ledger may be damaged or forged.
    ///
    /// # Errors
    /// Describes the impossible value.
    pub(crate) fn check(&self) -> Result<(), String> {
        let Self {
            samples,
            epochs,
            batch,
            ..
        } = *self;
        if !(1..=MOST_SAMPLES).contains(&samples)
            || epochs == 0
            || batch == 0
            || batch > MOST_SAMPLES
        {
            return Err(format!(
                "the data has {samples} samples, {epochs} epochs, and {batch} samples a batch"
            ));
        }
        let leased = self.leased.all();
        let leased = leased.map(|(_, split)| (split.data_epoch, split.start, split.end));
        let fresh = (self.data_epoch, self.position, samples);
        let ranges = self.returned.iter().copied().chain(leased);
        for (data_epoch, start, end) in ranges.chain([fresh]) {
            if start > end || end > samples {
                return Err(format!(
                    "positions {start} to {end} of epoch {data_epoch} are left, of {samples}"
                ));
            }
        }
        let mut done = self.done.iter();
        if let Some((data_epoch, done)) = done.find(|(_, done)| **done > samples) {
            return Err(format!(
                "{done} of {samples} positions of epoch {data_epoch} are done"
            ));
        }
        Ok(())
    }

    /// Returns the number of samples of the data.
    pub(crate) fn samples(&self) -> u64 {
        self.samples
    }

    /// Returns a copy of the ledger in which nothing is leased. Positions that were leased and not done are left to
    /// lease.
    pub(crate) fn at_rest(&self) -> Self {
        let mut ledger = self.clone();
        let holders: Vec<Task> = ledger.leased.all().map(|(task, _)| *task).collect();
        for task in holders {
            ledger.release(task);
        }
        ledger
    }

    /// Returns the ledger with these settings in place of its own.
    pub(crate) fn under(self, epochs: u32, budget: Option<u64>, shared_steps: bool) -> Self {
        Self {
            epochs,
            budget,
            shared_steps,
            ..self
        }
    }

    /// Returns the data epoch of the next fresh split; the last data epoch if there is no fresh data.
    pub(crate) fn data_epoch(&self) -> u32 {
        self.data_epoch.min(self.epochs - 1)
    }

    /// Leases up to `batches` steps of data to a worker; `None` if nothing is left to lease. The last step of an epoch
    /// may be short.
    pub(crate) fn lease(&mut self, task: Task, batches: u64) -> Option<Split> {
        let batches = batches.min(self.budget.unwrap_or(u64::MAX));
        let split = self.take(batches.saturating_mul(self.batch))?;
        self.charge(split);
        self.leased.insert(task, split);
        Some(split)
    }

    /// Leases the data of one step to the workers in `ranks`, in this order. Each worker gets `batch` samples while
    /// there are enough; the last workers may get no split. Returns no splits if nothing is left to lease.
    pub(crate) fn lease_step(&mut self, ranks: &[Task]) -> Vec<(Task, Split)> {
        if self.budget == Some(0) {
            return Vec::new();
        }
        let mut splits = Vec::new();
        if let Some(whole) = self.take(self.batch.saturating_mul(ranks.len() as u64)) {
            let (mut start, end) = (whole.start, whole.end);
            for task in ranks {
                let stop = (start + self.batch).min(end);
                if start < stop {
                    let split = Split {
                        id: self.new_id(),
                        start,
                        end: stop,
                        ..whole
                    };
                    self.leased.insert(*task, split);
                    splits.push((*task, split));
                }
                start = stop;
            }
        }
        if !splits.is_empty() {
            self.budget = self.budget.map(|steps| steps - 1);
        }
        splits
    }

    /// Leases up to `most` steps of `size` samples to all members of a ring together. Returns the split and its number
    /// of steps; `None` if nothing is left to lease. The last step of an epoch may be short.
    pub(crate) fn lease_to_all(&mut self, size: u64, most: u64) -> Option<(Split, u64)> {
        let most = most.min(self.budget.unwrap_or(u64::MAX));
        let split = self.take(most.saturating_mul(size))?;
        let steps = (split.end - split.start).div_ceil(size);
        self.budget = self.budget.map(|budget| budget.saturating_sub(steps));
        self.leased.insert(HELD_BY_ALL, split);
        Some((split, steps))
    }

    /// Takes back the positions that are leased to a ring and not done. They are leased next. Their steps, of `size`
    /// samples each, return to the budget.
    pub(crate) fn take_back(&mut self, size: u64) {
        while let Some(split) = self.held_by(HELD_BY_ALL) {
            self.leased.remove(split.id);
            if !planted!(SpanLost) {
                let range = (split.data_epoch, split.start, split.end);
                self.returned.push_front(range);
            }
            self.refund((split.end - split.start).div_ceil(size));
        }
    }

    /// Returns the oldest split that a worker holds. It starts at its first position that is not done.
    pub(crate) fn held_by(&self, task: Task) -> Option<Split> {
        self.leased.held_by(task)
    }

    /// Notes that all positions of a split before `position` are done. Returns the number of newly done positions, and
    /// the data epoch if it is complete now; `None` if the split is not leased to `task`, or if `position` is not
    /// within what is left of the split.
    pub(crate) fn advance(
        &mut self,
        task: Task,
        id: u64,
        position: u64,
    ) -> Option<(u64, Option<u32>)> {
        let split = self.leased.of_holder(task, id)?;
        if position < split.start || position > split.end {
            return None;
        }
        let (data_epoch, newly) = (split.data_epoch, position - split.start);
        split.start = position;
        if split.start == split.end {
            self.leased.remove(id);
        }
        let done = self.done.entry(data_epoch).or_default();
        *done = done.saturating_add(newly);
        let complete = *done == self.samples;
        if complete {
            self.done.remove(&data_epoch);
        }
        Some((newly, complete.then_some(data_epoch)))
    }

    /// Takes back the positions that are leased to a worker and not done. Their steps return to the budget, unless
    /// workers share them.
    pub(crate) fn release(&mut self, task: Task) {
        while let Some(split) = self.held_by(task) {
            self.leased.remove(split.id);
            self.returned
                .push_back((split.data_epoch, split.start, split.end));
            let steps = (split.end - split.start).div_ceil(self.batch);
            self.refund(if self.shared_steps { 0 } else { steps });
        }
    }

    /// Refunds the budget for leased steps that will not be made.
    pub(crate) fn refund(&mut self, steps: u64) {
        self.budget = self.budget.map(|budget| budget.saturating_add(steps));
    }

    /// Returns whether no worker holds data.
    pub(crate) fn is_at_rest(&self) -> bool {
        self.leased.is_empty()
    }

    /// Returns whether no data, or no step of the budget, is left to lease.
    pub(crate) fn leases_no_more(&self) -> bool {
        let nothing_left = self.returned.is_empty() && self.data_epoch >= self.epochs;
        nothing_left || self.budget == Some(0)
    }

    /// Returns whether nothing is left to lease, and nothing is leased.
    pub(crate) fn exhausted(&self) -> bool {
        self.leased.is_empty() && self.leases_no_more()
    }

    fn charge(&mut self, split: Split) {
        let steps = (split.end - split.start).div_ceil(self.batch);
        self.budget = self.budget.map(|budget| budget.saturating_sub(steps));
    }

    fn new_id(&mut self) -> u64 {
        let id = self.next_id;
        self.next_id = self.next_id.saturating_add(1);
        id
    }

    /// Takes up to `most` consecutive positions, returned ones before fresh ones; `None` if none are left.
    fn take(&mut self, most: u64) -> Option<Split> {
        if most == 0 {
            return None;
        }
        if let Some((data_epoch, start, end)) = self.returned.pop_front() {
            let stop = end.min(start.saturating_add(most));
            if planted!(SplitTwice) && self.next_id.is_multiple_of(2) {
                self.returned.push_back((data_epoch, start, stop));
            }
            if stop < end {
                self.returned.push_front((data_epoch, stop, end));
            }
            let id = self.new_id();
            return Some(Split {
                id,
                data_epoch,
                start,
                end: stop,
            });
        }
        // A job that begins with a checkpoint may have fewer epochs than the checkpoint has done.
        if self.data_epoch >= self.epochs {
            return None;
        }
        let (data_epoch, start) = (self.data_epoch, self.position);
        let end = self.samples.min(start.saturating_add(most));
        self.position = end;
        if end == self.samples {
            self.data_epoch += 1;
            self.position = 0;
        }
        let id = self.new_id();
        Some(Split {
            id,
            data_epoch,
            start,
            end,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn worker(index: u32) -> Task {
        Task {
            id: TaskId::worker(index),
            generation: Generation(1),
        }
    }

    proptest! {
        /// Every position of every epoch is done once, whatever workers do and wherever they stop.
        #[test]
        fn each_sample_is_visited_once_an_epoch(
            samples in 1u64..60,
            epochs in 1u32..4,
            batch in 1u64..8,
            moves in prop::collection::vec((0u32..3, 1u64..5, 0u64..9, any::<bool>()), 0..200),
        ) {
            let mut ledger = Ledger::new(samples, epochs, batch, None, false);
            let mut seen = BTreeMap::<(u32, u64), u32>::new();
            let mut complete = Vec::new();
            let endless = (0..3).cycle().map(|w| (w, 3, u64::MAX, false));
            for (w, batches, steps, dies) in moves.into_iter().chain(endless) {
                let task = worker(w);
                let held = ledger.held_by(task).or_else(|| ledger.lease(task, batches));
                if let Some(split) = held {
                    let position = split.start + steps.min(split.end - split.start);
                    let (newly, epoch) = ledger.advance(task, split.id, position).unwrap();
                    prop_assert_eq!(newly, position - split.start);
                    for p in split.start..position {
                        *seen.entry((split.data_epoch, p)).or_default() += 1;
                    }
                    complete.extend(epoch);
                }
                if dies {
                    ledger.release(task);
                }
                if ledger.exhausted() {
                    break;
                }
            }
            prop_assert_eq!(seen.len() as u64, samples * u64::from(epochs));
            prop_assert!(seen.values().all(|times| *times == 1));
            complete.sort_unstable();
            prop_assert_eq!(complete, (0..epochs).collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_step_is_cut_by_rank_and_its_tail_leaves_the_last_ranks_without() {
        let mut ledger = Ledger::new(10, 1, 4, None, true);
        let ranks = [worker(0), worker(2)];
        let cut = |splits: Vec<(Task, Split)>| {
            let piece = |(t, s): (Task, Split)| (t.id.index, s.start, s.end);
            splits.into_iter().map(piece).collect::<Vec<_>>()
        };
        assert_eq!(cut(ledger.lease_step(&ranks)), [(0, 0, 4), (2, 4, 8)]);
        assert_eq!(cut(ledger.lease_step(&ranks)), [(0, 8, 10)]);
        assert!(ledger.lease_step(&ranks).is_empty());
    }

    #[test]
    fn a_budget_of_steps_ends_the_data_early() {
        let mut ledger = Ledger::new(100, 2, 10, Some(3), false);
        let split = ledger.lease(worker(0), 8).unwrap();
        assert_eq!((split.start, split.end), (0, 30));
        assert!(ledger.lease(worker(1), 8).is_none() && !ledger.exhausted());
        ledger.advance(worker(0), split.id, 10).unwrap();
        ledger.release(worker(0));
        let rest = ledger.lease(worker(1), 8).unwrap();
        assert_eq!((rest.start, rest.end), (10, 30));
        ledger.advance(worker(1), rest.id, 30).unwrap();
        assert!(ledger.exhausted());
    }

    #[test]
    fn at_rest_all_that_is_not_done_is_to_be_handed_out_within_the_budget() {
        let mut ledger = Ledger::new(10, 2, 2, Some(9), false);
        assert!(ledger.is_at_rest());
        let split = ledger.lease(worker(0), 2).unwrap();
        ledger.lease(worker(1), 1).unwrap();
        ledger.advance(worker(0), split.id, 2).unwrap();

        let mut rest = ledger.at_rest();
        assert!(rest.is_at_rest() && !ledger.is_at_rest());
        assert_eq!(rest.samples(), 10);
        let pieces = std::iter::from_fn(|| rest.lease(worker(2), 5));
        let pieces: Vec<_> = pieces.map(|s| (s.data_epoch, s.start, s.end)).collect();
        // One of the nine steps is done, so eight are left.
        assert_eq!(pieces, [(0, 2, 4), (0, 4, 6), (0, 6, 10), (1, 0, 8)]);
    }

    #[test]
    fn a_budget_counts_the_steps_that_workers_share_once() {
        let mut ledger = Ledger::new(100, 1, 4, Some(2), true);
        let ranks = [worker(0), worker(1)];
        for _ in 0..2 {
            let step = ledger.lease_step(&ranks);
            assert_eq!(step.len(), 2);
            assert!(!ledger.exhausted());
            for (task, split) in step {
                ledger.advance(task, split.id, split.end).unwrap();
            }
        }
        assert!(ledger.exhausted() && ledger.lease_step(&ranks).is_empty());

        // A step that no worker finishes is made again.
        ledger.refund(1);
        assert_eq!(ledger.lease_step(&ranks).len(), 2);
        for task in ranks {
            ledger.release(task);
        }
        assert!(ledger.lease_step(&ranks).is_empty());
        ledger.refund(1);
        let starts = ledger.lease_step(&ranks);
        let starts: Vec<_> = starts.iter().map(|(_, split)| split.start).collect();
        assert_eq!(starts, [16], "what was given back comes first");
    }

    #[test]
    fn a_run_that_goes_on_keeps_to_its_own_epochs_and_budget() {
        let mut ledger = Ledger::new(4, 3, 2, None, false);
        for epoch in 0..2 {
            assert_eq!(ledger.data_epoch(), epoch);
            let split = ledger.lease(worker(0), 2).unwrap();
            ledger.advance(worker(0), split.id, 4).unwrap();
        }
        let mut fewer = ledger.clone().under(2, None, false);
        assert_eq!(fewer.data_epoch(), 1);
        assert!(fewer.exhausted() && fewer.lease(worker(0), 1).is_none());

        let mut limited = ledger.under(5, Some(1), false);
        assert_eq!(limited.data_epoch(), 2);
        let split = limited.lease(worker(0), 2).unwrap();
        assert_eq!((split.data_epoch, split.start, split.end), (2, 0, 2));
        assert!(limited.lease(worker(1), 1).is_none());
    }

    #[test]
    fn only_the_holder_moves_a_split_and_only_forward() {
        let mut ledger = Ledger::new(10, 1, 2, None, false);
        let split = ledger.lease(worker(0), 2).unwrap();
        assert_eq!(ledger.advance(worker(1), split.id, 2), None);
        assert_eq!(ledger.advance(worker(0), split.id, 5), None);
        assert_eq!(ledger.advance(worker(0), split.id, 2), Some((2, None)));
        assert_eq!(ledger.advance(worker(0), split.id, 1), None);
    }
}
