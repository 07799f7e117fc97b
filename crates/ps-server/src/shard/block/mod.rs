//! A block: contents with their version, the watermarks that identify a push sent again, and in sync mode the
//! gradients staged for the open step. All of it changes under one lock.
//!
//! - `contents`: the interface of values and optimizer state; `dense`: those of dense variables

mod contents;
mod dense;

use std::collections::BTreeMap;

use checkpoint::{SavedBlock, Watermark};
use optimizer::VariableRule;
use shared_proto::blocks::BlockId;
use shared_proto::ids::{Clock, Origin, Sequence, Task, Version};
use shared_proto::payload::Elements;
use shared_proto::planted;
use shared_proto::view::{Commit, View};
use shared_proto::wire;

use contents::Contents;
use dense::Dense;

/// One block in memory.
#[derive(Debug)]
pub(crate) struct Block {
    contents: Box<dyn Contents>,
    version: Version,
    /// The last message taken from each worker.
    watermarks: Vec<Watermark>,
    staged: BTreeMap<Task, Staged>,
    /// True if an update has made a value NaN or infinite.
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

/// The number of watermarks that a block keeps of workers that have left the view; the oldest are dropped
/// first. They show which updates of a dead worker a checkpoint has.
const DEPARTED_WATERMARKS: usize = 16;

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
    /// Returns a block without values.
    pub(crate) fn empty() -> Self {
        Self {
            contents: Box::new(Dense::default()),
            version: Version(0),
            watermarks: Vec::new(),
            staged: BTreeMap::new(),
            non_finite: false,
        }
    }

    /// Sets initial values, over earlier ones too.
    pub(crate) fn initialize(&mut self, values: &Elements, rule: &VariableRule) {
        self.contents.initialize(values, rule);
    }

    /// Returns the block in the form of a checkpoint. The values are shared, not copied.
    pub(crate) fn save(&self, id: BlockId) -> SavedBlock {
        let (weights, slots) = self.contents.save();
        SavedBlock {
            id,
            version: self.version,
            watermarks: self.watermarks.clone(),
            weights,
            slots,
        }
    }

    /// Restores a block from a checkpoint.
    pub(crate) fn restore(saved: SavedBlock) -> Self {
        let contents = Box::new(Dense::restored(&saved));
        Self {
            non_finite: !contents.all_finite(),
            contents,
            version: saved.version,
            watermarks: saved.watermarks,
            staged: BTreeMap::new(),
        }
    }

    pub(crate) fn initialized(&self) -> bool {
        self.contents.initialized()
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
        self.contents.bytes()
    }

    /// Returns the values that a pull wants, as they are now, as `f32`.
    pub(crate) fn values(&self, wanted: &wire::WantedBlock, rule: &VariableRule) -> Elements {
        self.contents.values(wanted, rule)
    }

    /// Returns whether the block has taken this message of a task.
    pub(crate) fn has_taken(&self, task: Task, sequence: Sequence) -> Taken {
        match self.watermark_of(task) {
            Some(last) if [last.sequence, last.before].contains(&sequence) => Taken::Yes,
            Some(last) if last.sequence > sequence => match planted!(LateIsTaken) {
                true => Taken::Yes,
                false => Taken::Unknown,
            },
            _ => Taken::No,
        }
    }

    /// Returns the watermark of the last message taken from a task.
    pub(crate) fn watermark_of(&self, task: Task) -> Option<&Watermark> {
        self.watermarks.iter().find(|last| last.task == task)
    }

    /// Returns the watermark of each worker from which the block has taken messages.
    pub(crate) fn watermarks(&self) -> &[Watermark] {
        &self.watermarks
    }

    /// Notes that a message is taken. `version` is the one that it makes, or on which it is staged.
    fn take(&mut self, from: &Origin, version: Version, view: &View) {
        let known = self
            .watermarks
            .iter_mut()
            .find(|last| last.task == from.task);
        let (taken, before) = match &known {
            Some(known) => (known.taken + 1, known.sequence),
            None => (1, Sequence(0)),
        };
        let watermark = Watermark {
            task: from.task,
            sequence: from.sequence,
            before,
            clock: from.clock,
            version,
            taken,
        };
        match known {
            Some(known) => *known = watermark,
            None => {
                let departed = |mark: &Watermark| !view.workers.contains(&mark.task);
                let mut surplus = self.watermarks.iter().filter(|mark| departed(mark)).count();
                self.watermarks.retain(|mark| {
                    let drop = surplus > DEPARTED_WATERMARKS && departed(mark);
                    surplus -= usize::from(drop);
                    !drop
                });
                self.watermarks.push(watermark);
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
        rule: &VariableRule,
    ) -> Applied {
        let staleness = self.version.0.saturating_sub(based_on.0);
        self.take(from, self.version.next(), view);
        self.update(&[(1.0, gradient)], rule, &mut Vec::new());
        Applied {
            version: self.version,
            staleness,
        }
    }

    /// Holds a gradient for the commit of its step, in place of an earlier one of its sender.
    pub(crate) fn stage(&mut self, from: &Origin, view: &View, gradient: Elements) -> Staging {
        self.take(from, self.version, view);
        let clock = from.clock;
        let before = self.staged.insert(from.task, Staged { clock, gradient });
        Staging {
            is_first: before.as_ref().is_none_or(|before| before.clock != clock),
            replaced_bytes: before.map_or(0, |before| before.gradient.bytes()),
        }
    }

    /// Applies the mean of the contributors' gradients, weighted by samples and summed in their
    /// order; all that was staged is dropped. `sum` is scratch memory. A step without contributors
    /// changes nothing.
    pub(crate) fn commit(
        &mut self,
        commit: &Commit,
        rule: &VariableRule,
        sum: &mut Vec<f32>,
    ) -> Result<(), NotStaged> {
        let total: u64 = commit.contributors.iter().map(|(_, samples)| samples).sum();
        let mut staged = std::mem::take(&mut self.staged);
        let mut mean = Vec::with_capacity(commit.contributors.len());
        for (task, samples) in &commit.contributors {
            let own = staged.remove(task).filter(|s| s.clock == commit.step);
            let share = (*samples as f64 / total.max(1) as f64) as f32;
            mean.push((share, own.ok_or(NotStaged(*task))?.gradient));
        }
        if !mean.is_empty() {
            let mean: Vec<_> = mean.iter().map(|(share, of)| (*share, of)).collect();
            self.update(&mean, rule, sum);
        }
        Ok(())
    }

    /// Updates the contents by a sum of gradients, and raises the version.
    fn update(&mut self, gradients: &[(f32, &Elements)], rule: &VariableRule, sum: &mut Vec<f32>) {
        let update = rule.update_after(self.version.0);
        if !planted!(SameVersion) {
            self.version = self.version.next();
        }
        let finite = self.contents.update(gradients, rule, update, sum);
        self.non_finite |= !finite;
    }
}

#[cfg(test)]
mod tests;
