//! The data, handed out in splits. Each epoch's samples are put in an order by (seed, epoch), which
//! workers know how to find; here only positions in that order are counted. A position is leased to
//! one worker at a time, and done once its step's finish has been acknowledged.

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Serialize};
use shared_proto::ids::Task;

/// A piece of an epoch's positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Split {
    pub(crate) id: u64,
    pub(crate) epoch: u32,
    pub(crate) start: u64,
    pub(crate) end: u64,
}

/// What is done, what is leased to whom, what is left.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Ledger {
    samples: u64,
    epochs: u32,
    batch: u64,
    /// Steps that may still be handed out.
    budget: Option<u64>,
    /// Whether workers share each step, so that one of them gone does not undo it.
    shared_steps: bool,
    next_id: u64,
    /// Where fresh positions begin.
    epoch: u32,
    position: u64,
    /// Given back by workers that left; handed out before fresh ones.
    returned: VecDeque<(u32, u64, u64)>,
    /// `start` is the first position not done.
    leased: BTreeMap<u64, (Task, Split)>,
    /// Done positions of each epoch that is not complete.
    done: BTreeMap<u32, u64>,
}

impl Ledger {
    /// A ledger of `epochs` passes over `samples` samples, for steps of `batch` samples, ending
    /// early when `budget` steps have been made. `shared_steps`: all workers together make a step.
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
            epoch: 0,
            position: 0,
            returned: VecDeque::new(),
            leased: BTreeMap::new(),
            done: BTreeMap::new(),
        }
    }

    /// Samples of the data.
    pub(crate) fn samples(&self) -> u64 {
        self.samples
    }

    /// The ledger with nothing leased: what is not done is to be handed out again.
    pub(crate) fn at_rest(&self) -> Self {
        let mut ledger = self.clone();
        let holders: Vec<Task> = ledger.leased.values().map(|(task, _)| *task).collect();
        for task in holders {
            ledger.release(task);
        }
        ledger
    }

    /// The same under settings that may have changed since.
    pub(crate) fn under(self, epochs: u32, budget: Option<u64>) -> Self {
        Self {
            epochs,
            budget,
            ..self
        }
    }

    /// The epoch that fresh splits are handed out of.
    pub(crate) fn epoch(&self) -> u32 {
        self.epoch.min(self.epochs - 1)
    }

    /// Leases up to `batches` steps of data to a worker; the last step of an epoch may be short.
    pub(crate) fn lease(&mut self, task: Task, batches: u64) -> Option<Split> {
        let batches = batches.min(self.budget.unwrap_or(u64::MAX));
        let split = self.take(batches * self.batch)?;
        self.charge(split);
        self.leased.insert(split.id, (task, split));
        Some(split)
    }

    /// Takes one step's data, the same number of samples for each of `ranks` workers in order
    /// while there are enough; whoever is left without any has no split.
    pub(crate) fn lease_step(&mut self, ranks: &[Task]) -> Vec<(Task, Split)> {
        if self.budget == Some(0) {
            return Vec::new();
        }
        let mut splits = Vec::new();
        if let Some(whole) = self.take(self.batch * ranks.len() as u64) {
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
                    self.leased.insert(split.id, (*task, split));
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

    /// The split that a worker holds, from its first position that is not done.
    pub(crate) fn held_by(&self, task: Task) -> Option<Split> {
        let mut held = self.leased.values().filter(|(holder, _)| *holder == task);
        held.next().map(|(_, split)| *split)
    }

    /// Notes that all positions of a split before `position` are done. Returns how many are newly
    /// so, and the epoch if it is complete by that; `None` if the split is not leased to `task`
    /// or has no such position.
    pub(crate) fn advance(
        &mut self,
        task: Task,
        id: u64,
        position: u64,
    ) -> Option<(u64, Option<u32>)> {
        let (holder, split) = self.leased.get_mut(&id)?;
        if *holder != task || position < split.start || position > split.end {
            return None;
        }
        let (epoch, newly) = (split.epoch, position - split.start);
        split.start = position;
        if split.start == split.end {
            self.leased.remove(&id);
        }
        let done = self.done.entry(epoch).or_default();
        *done += newly;
        let complete = *done == self.samples;
        if complete {
            self.done.remove(&epoch);
        }
        Some((newly, complete.then_some(epoch)))
    }

    /// Takes back what a worker has not done.
    pub(crate) fn release(&mut self, task: Task) {
        while let Some(split) = self.held_by(task) {
            self.leased.remove(&split.id);
            self.returned
                .push_back((split.epoch, split.start, split.end));
            let steps = (split.end - split.start).div_ceil(self.batch);
            self.refund(if self.shared_steps { 0 } else { steps });
        }
    }

    /// Says that steps which were handed out will not be made.
    pub(crate) fn refund(&mut self, steps: u64) {
        self.budget = self.budget.map(|budget| budget + steps);
    }

    /// Whether nobody holds data.
    pub(crate) fn is_at_rest(&self) -> bool {
        self.leased.is_empty()
    }

    /// Whether there is nothing to hand out, and nothing out.
    pub(crate) fn exhausted(&self) -> bool {
        let nothing_left = self.returned.is_empty() && self.epoch >= self.epochs;
        self.leased.is_empty() && (nothing_left || self.budget == Some(0))
    }

    fn charge(&mut self, split: Split) {
        let steps = (split.end - split.start).div_ceil(self.batch);
        self.budget = self.budget.map(|budget| budget - steps);
    }

    fn new_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id - 1
    }

    /// Up to `most` positions in one piece: returned ones first, then fresh ones.
    fn take(&mut self, most: u64) -> Option<Split> {
        if most == 0 {
            return None;
        }
        if let Some((epoch, start, end)) = self.returned.pop_front() {
            let stop = end.min(start + most);
            if stop < end {
                self.returned.push_front((epoch, stop, end));
            }
            let id = self.new_id();
            return Some(Split {
                id,
                epoch,
                start,
                end: stop,
            });
        }
        // A job that goes on from a checkpoint may have fewer than that has done.
        if self.epoch >= self.epochs {
            return None;
        }
        let (epoch, start) = (self.epoch, self.position);
        let end = self.samples.min(start + most);
        self.position = end;
        if end == self.samples {
            self.epoch += 1;
            self.position = 0;
        }
        let id = self.new_id();
        Some(Split {
            id,
            epoch,
            start,
            end,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use shared_proto::ids::{Generation, Role, TaskId};

    fn worker(index: u32) -> Task {
        Task {
            id: TaskId {
                role: Role::Worker,
                index,
            },
            generation: Generation(1),
        }
    }

    proptest! {
        /// Whatever workers do and wherever they stop, every position of every epoch is done once.
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
                        *seen.entry((split.epoch, p)).or_default() += 1;
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
    fn only_the_holder_moves_a_split_and_only_forward() {
        let mut ledger = Ledger::new(10, 1, 2, None, false);
        let split = ledger.lease(worker(0), 2).unwrap();
        assert_eq!(ledger.advance(worker(1), split.id, 2), None);
        assert_eq!(ledger.advance(worker(0), split.id, 5), None);
        assert_eq!(ledger.advance(worker(0), split.id, 2), Some((2, None)));
        assert_eq!(ledger.advance(worker(0), split.id, 1), None);
    }
}
