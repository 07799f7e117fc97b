//! A block: weights and slots with their version, the marks that identify a push sent again, and in
//! sync mode the gradients staged for the open step. All of it changes under one lock.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use checkpoint::{Mark, SavedBlock};
use shared_proto::blocks::BlockId;
use shared_proto::ids::{Clock, Origin, Sequence, Task, Version};
use shared_proto::kernel::Kernel;
use shared_proto::payload::{self, Elements, LeF32};
use shared_proto::planted;
use shared_proto::view::{Commit, View};

use optimizer::{Part, Rule, Update};

/// One block in memory.
#[derive(Debug, Default)]
pub(crate) struct Block {
    /// Empty until initial values come. Shared with the answers that are being sent and with the
    /// checkpoint that is being written: while one of these uses the values, an update leaves them as they
    /// are and continues with a copy.
    weights: Arc<Vec<f32>>,
    slots: Arc<Vec<f32>>,
    version: Version,
    /// The last message taken from each worker.
    marks: Vec<Mark>,
    staged: BTreeMap<Task, Staged>,
    /// True if an update has made a weight or a slot NaN or infinite.
    non_finite: bool,
}

#[derive(Debug)]
struct Staged {
    clock: Clock,
    gradient: Elements,
}

/// The outcome of an applied gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Applied {
    pub(crate) version: Version,
    /// The number of updates that the block took between the pull and the push.
    pub(crate) staleness: u64,
}

/// The number of marks that a block keeps of workers that have left the view; the oldest are dropped
/// first. They show which updates of a dead worker a checkpoint has.
const DEPARTED_MARKS: usize = 16;

/// The effect of a staged gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Staging {
    /// True if it is its sender's first gradient in the step.
    pub(crate) is_first: bool,
    /// The bytes of the gradient that it has replaced.
    pub(crate) replaced_bytes: usize,
}

/// The outcome of a check whether a block has taken a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Taken {
    No,
    Yes,
    /// The block has taken a later message of the same worker, and remembers only the last two: it may
    /// have taken this one or not.
    Unknown,
}

/// A commit names a gradient that is not staged here.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct NotStaged(pub(crate) Task);

impl Block {
    /// Sets initial values, over earlier ones too.
    pub(crate) fn initialize(&mut self, values: &Elements, rule: &dyn Rule) {
        let slots = rule.slots();
        let mut weights = vec![0.0; values.len()];
        values.copy_to(&mut weights);
        self.weights = Arc::new(weights);
        self.slots = Arc::new(vec![slots.initial; slots.count * values.len()]);
    }

    /// Returns the block in the form of a checkpoint. The values are shared, not copied.
    pub(crate) fn save(&self, id: BlockId) -> SavedBlock {
        SavedBlock {
            id,
            version: self.version,
            marks: self.marks.clone(),
            weights: self.weights(),
            slots: payload::share(&self.slots),
        }
    }

    /// Restores a block from a checkpoint.
    pub(crate) fn restore(saved: SavedBlock) -> Self {
        let numbers = |bytes: &Bytes| -> Arc<Vec<f32>> {
            Arc::new(payload::elements(bytes).iter().map(|v| v.get()).collect())
        };
        let (weights, slots) = (numbers(&saved.weights), numbers(&saved.slots));
        let non_finite = weights.iter().chain(slots.iter()).any(|v| !v.is_finite());
        Self {
            weights,
            slots,
            version: saved.version,
            marks: saved.marks,
            staged: BTreeMap::new(),
            non_finite,
        }
    }

    pub(crate) fn initialized(&self) -> bool {
        !self.weights.is_empty()
    }

    /// Returns whether all weights and slots are finite.
    pub(crate) fn is_finite(&self) -> bool {
        !self.non_finite
    }

    pub(crate) fn version(&self) -> Version {
        self.version
    }

    /// Returns the number of bytes of weights and slots.
    pub(crate) fn bytes(&self) -> usize {
        size_of_val(&**self.weights) + size_of_val(&**self.slots)
    }

    /// Returns the weights as they are now, to be sent.
    pub(crate) fn weights(&self) -> Bytes {
        payload::share(&self.weights)
    }

    /// Returns whether the block has taken this message of a task.
    pub(crate) fn has_taken(&self, task: Task, sequence: Sequence) -> Taken {
        match self.mark_of(task) {
            Some(mark) if [mark.sequence, mark.before].contains(&sequence) => Taken::Yes,
            Some(mark) if mark.sequence > sequence => match planted!(LateIsTaken) {
                true => Taken::Yes,
                false => Taken::Unknown,
            },
            _ => Taken::No,
        }
    }

    /// Returns the mark of the last message taken from a task.
    pub(crate) fn mark_of(&self, task: Task) -> Option<&Mark> {
        self.marks.iter().find(|mark| mark.task == task)
    }

    /// Returns the mark of each worker from which the block has taken messages.
    pub(crate) fn marks(&self) -> &[Mark] {
        &self.marks
    }

    /// Marks a message as taken. `version` is the one that it makes, or on which it is staged.
    fn mark(&mut self, from: &Origin, version: Version, view: &View) {
        let known = self.marks.iter_mut().find(|mark| mark.task == from.task);
        let (taken, before) = match &known {
            Some(known) => (known.taken + 1, known.sequence),
            None => (1, Sequence(0)),
        };
        let mark = Mark {
            task: from.task,
            sequence: from.sequence,
            before,
            clock: from.clock,
            version,
            taken,
        };
        match known {
            Some(known) => *known = mark,
            None => {
                let departed = |mark: &Mark| !view.workers.contains(&mark.task);
                let mut surplus = self.marks.iter().filter(|mark| departed(mark)).count();
                self.marks.retain(|mark| {
                    let drop = surplus > DEPARTED_MARKS && departed(mark);
                    surplus -= usize::from(drop);
                    !drop
                });
                self.marks.push(mark);
            }
        }
    }

    /// Applies a gradient at once.
    pub(crate) fn apply(
        &mut self,
        from: &Origin,
        view: &View,
        gradient: &Elements,
        based_on: Version,
        rule: &dyn Rule,
        learning_rate: impl Fn(Version) -> f32,
    ) -> Applied {
        let staleness = self.version.0.saturating_sub(based_on.0);
        self.mark(from, self.version.next(), view);
        let mut update = self.begin_update(rule, learning_rate);
        gradient.for_parts(|range, part| update.apply(range, part));
        Applied {
            version: self.version,
            staleness,
        }
    }

    /// Holds a gradient for the commit of its step, in place of an earlier one of its sender.
    pub(crate) fn stage(&mut self, from: &Origin, view: &View, gradient: Elements) -> Staging {
        self.mark(from, self.version, view);
        let clock = from.clock;
        let before = self.staged.insert(from.task, Staged { clock, gradient });
        Staging {
            is_first: before.as_ref().is_none_or(|before| before.clock != clock),
            replaced_bytes: before.map_or(0, |before| before.gradient.bytes()),
        }
    }

    /// Applies the mean of the contributors' gradients, weighted by samples and summed in their
    /// order; all that was staged is dropped. `mean` is scratch memory. A step without contributors
    /// changes nothing.
    pub(crate) fn commit(
        &mut self,
        commit: &Commit,
        rule: &dyn Rule,
        learning_rate: impl Fn(Version) -> f32,
        mean: &mut Vec<f32>,
    ) -> Result<(), NotStaged> {
        if commit.contributors.is_empty() {
            self.staged.clear();
            return Ok(());
        }
        let total: u64 = commit.contributors.iter().map(|(_, samples)| samples).sum();
        mean.clear();
        mean.resize(self.weights.len(), 0.0);
        for (task, samples) in &commit.contributors {
            let staged = self.staged.get(task).filter(|s| s.clock == commit.step);
            let staged = staged.ok_or(NotStaged(*task))?;
            let weight = (*samples as f64 / total.max(1) as f64) as f32;
            staged.gradient.for_parts(|range, part| {
                Kernel::best().run(|| {
                    for (sum, g) in mean[range].iter_mut().zip(part) {
                        *sum += weight * g.get();
                    }
                });
            });
        }
        self.staged.clear();
        let mut update = self.begin_update(rule, learning_rate);
        update.apply(0..mean.len(), payload::in_place(mean));
        Ok(())
    }

    /// Begins an update and raises the version. The caller hands over all parts of the gradient, each once.
    fn begin_update<'a>(
        &'a mut self,
        rule: &'a dyn Rule,
        learning_rate: impl Fn(Version) -> f32,
    ) -> Begun<'a> {
        let update = Update {
            learning_rate: learning_rate(self.version),
            number: self.version.0 + 1,
            kernel: Kernel::best(),
        };
        if !planted!(SameVersion) {
            self.version = self.version.next();
        }
        Begun {
            rule,
            update,
            non_finite: &mut self.non_finite,
            weights: Arc::make_mut(&mut self.weights).as_mut_slice(),
            slots: rule
                .slots()
                .split(Arc::make_mut(&mut self.slots).as_mut_slice()),
        }
    }
}

/// An update of a block in progress.
struct Begun<'a> {
    rule: &'a dyn Rule,
    update: Update,
    non_finite: &'a mut bool,
    weights: &'a mut [f32],
    slots: [&'a mut [f32]; 2],
}

/// The number of elements that are updated at a time: they are in the first-level cache when the result is checked.
const PART: usize = 2048;

impl Begun<'_> {
    fn apply(&mut self, range: Range<usize>, gradient: &[LeF32]) {
        for (start, gradient) in range.step_by(PART).zip(gradient.chunks(PART)) {
            self.apply_part(start..start + gradient.len(), gradient);
        }
    }

    fn apply_part(&mut self, range: Range<usize>, gradient: &[LeF32]) {
        let slots = self
            .slots
            .each_mut()
            .map(|slot| slot.get_mut(range.clone()).unwrap_or_default());
        let part = Part {
            weights: &mut self.weights[range.clone()],
            gradient,
            slots,
        };
        self.rule.apply(self.update, part);
        let [first, second] = &self.slots;
        let slots = [first, second].map(|slot| slot.get(range.clone()).unwrap_or_default());
        let finite = |values: &[f32]| all_finite(self.update.kernel, values);
        *self.non_finite |=
            !(finite(&self.weights[range.clone()]) && slots.into_iter().all(finite));
    }
}

fn all_finite(kernel: Kernel, values: &[f32]) -> bool {
    let exponents = || {
        values
            .iter()
            .fold(0, |most, v| most.max(v.to_bits() & 0x7fff_ffff))
    };
    kernel.run(exponents) < f32::INFINITY.to_bits()
}

#[cfg(test)]
mod tests;
