//! A block: contents with their version, the watermarks that identify a push sent again, and in sync mode the
//! gradients staged for the open step. All of it changes under one lock.
//!
//! - `contents`: the interface of values and optimizer state; `dense`: those of dense variables; `rows`: those of a
//!   table's bucket
//! - `in_flight`: the updates that are in flight at a time; `row_staleness`: the updates that have changed a row since
//!   a worker has read it
//! - `heat`: how often the rows of a bucket are read and changed

mod contents;
mod dense;
mod heat;
mod in_flight;
mod row_staleness;
mod rows;

use std::collections::BTreeMap;

use checkpoint::{SavedBlock, SavedValues, Watermark};
use optimizer::{CorrectedStep, StaleSteps, VariableRule};
use shared_proto::blocks::BlockId;
use shared_proto::ids::{Clock, Origin, Sequence, Task, Version};
use shared_proto::payload::Elements;
use shared_proto::planted;
use shared_proto::table::{SavedRows, TableSpec};
use shared_proto::values::Values;
use shared_proto::view::{Commit, View};
use shared_proto::wire;

use contents::{Contents, SharedValues};
use dense::Dense;
use in_flight::InFlight;
use rows::TableRows;

pub(crate) use contents::{Limit, RowsLost, Wanted};
pub(crate) use heat::Heat;
pub(crate) use rows::BucketStorage;

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
    in_flight: InFlight,
}

#[derive(Debug)]
struct Staged {
    clock: Clock,
    gradient: Values,
}

/// A block at one moment, for a checkpoint. Its values are shared, not copied.
#[derive(Clone, Debug)]
pub(crate) struct SharedBlock {
    id: BlockId,
    version: Version,
    watermarks: Vec<Watermark>,
    values: SharedValues,
}

impl SharedBlock {
    /// Returns the number of bytes of values and state.
    pub(crate) fn bytes(&self) -> usize {
        self.values.bytes()
    }

    /// Returns about how many bytes the block takes in a file, with its entry in the header.
    pub(crate) fn saved_bytes(&self) -> usize {
        self.values.saved_bytes()
            + SAVED_BLOCK_BYTES
            + self.watermarks.len() * SAVED_WATERMARK_BYTES
    }

    /// Leaves out the rows of a bucket that have not changed since the checkpoint `base`, if the changed rows are known
    /// and are less than half of all rows.
    pub(crate) fn build_on(&mut self, base: Option<u64>) {
        self.values.build_on(base);
    }

    /// Returns whether the block has values.
    pub(crate) fn initialized(&self) -> bool {
        self.values.initialized()
    }

    /// Returns the block in the form of a checkpoint.
    ///
    /// # Errors
    /// If rows on disk cannot be read.
    pub(crate) fn to_saved(&self) -> Result<SavedBlock, RowsLost> {
        Ok(SavedBlock {
            id: self.id,
            version: self.version,
            watermarks: self.watermarks.clone(),
            values: self.values.to_saved()?,
        })
    }
}

/// The outcome of an applied gradient.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Applied {
    pub(crate) version: Version,
    /// The number of updates that the block took between the pull and the push.
    pub(crate) staleness: u64,
    /// The step that the update made. `None` if the update was not corrected, or if the block's steps are never
    /// shortened as a whole: rows, for example, have a factor each.
    pub(crate) step: Option<CorrectedStep>,
}

/// The assumed sizes of the entries of a block and of a watermark in a file's header, in bytes.
const SAVED_BLOCK_BYTES: usize = 1 << 10;
const SAVED_WATERMARK_BYTES: usize = 256;

/// The number of watermarks that a block keeps for workers that have left the view. The oldest are dropped first. They
/// show how many updates of a departed worker a checkpoint has.
const DEPARTED_WATERMARKS: usize = 16;

/// The effect of a staged gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Staging {
    /// True if this is the sender's first gradient of the step.
    pub(crate) is_first: bool,
    /// The number of bytes of the gradient that this one has replaced; 0 if there was none.
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

/// The reason why a shard cannot apply a committed step.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum NotCommitted {
    /// The commit names a gradient of this worker, which is not staged here.
    NotStaged(Task),
    /// A block has lost rows.
    RowsLost(RowsLost),
}

impl From<RowsLost> for NotCommitted {
    fn from(lost: RowsLost) -> Self {
        Self::RowsLost(lost)
    }
}

impl Block {
    /// Returns a block of a variable, without values.
    pub(crate) fn empty() -> Self {
        Self::new(Box::new(Dense::default()), Version(0), Vec::new())
    }

    /// Returns a bucket of a table, without rows.
    pub(crate) fn of_table(spec: &TableSpec, number: u32, storage: BucketStorage<'_>) -> Self {
        let rows = Box::new(TableRows::new(spec, number, storage));
        Self::new(rows, Version(0), Vec::new())
    }

    fn new(contents: Box<dyn Contents>, version: Version, watermarks: Vec<Watermark>) -> Self {
        Self {
            non_finite: !contents.all_finite(),
            contents,
            version,
            watermarks,
            staged: BTreeMap::new(),
            in_flight: InFlight::default(),
        }
    }

    /// Sets the initial values, and overwrites earlier values.
    pub(crate) fn initialize(&mut self, values: &Elements, rule: &VariableRule) {
        self.contents.initialize(values, rule);
    }

    /// Returns the block as it is now, for the checkpoint with this number.
    pub(crate) fn share(&mut self, id: BlockId, checkpoint: u64) -> SharedBlock {
        SharedBlock {
            id,
            version: self.version,
            watermarks: self.watermarks.clone(),
            values: self.contents.share(checkpoint),
        }
    }

    /// Restores a block from a checkpoint. `table` is the bucket's table, or `None` for a dense block.
    ///
    /// # Errors
    /// If the saved values are not those of a dense block, or not those of a bucket of the table.
    pub(crate) fn restore(
        saved: SavedBlock,
        table: Option<&TableSpec>,
        storage: BucketStorage<'_>,
    ) -> Result<Self, String> {
        let contents: Box<dyn Contents> = match (&saved.values, table) {
            (SavedValues::Dense { weights, slots }, None) => {
                Box::new(Dense::restored(weights, slots))
            }
            (SavedValues::Rows(rows), Some(spec)) => {
                Box::new(TableRows::restored(spec, saved.id.index, rows, storage)?)
            }
            (SavedValues::Dense { .. }, Some(_)) => {
                return Err("it is dense, not a bucket".to_owned());
            }
            (SavedValues::Rows(_), None) => return Err("it is a bucket, not dense".to_owned()),
        };
        Ok(Self::new(contents, saved.version, saved.watermarks))
    }

    /// Adds rows of a checkpoint to a restored bucket. The bucket must not have any of them yet.
    ///
    /// # Errors
    /// If they are not rows of this bucket.
    pub(crate) fn add_rows(
        &mut self,
        rows: &SavedRows,
        table: Option<&TableSpec>,
    ) -> Result<(), String> {
        let spec = table.ok_or("it is dense, not a bucket")?;
        self.contents.add_rows(spec, rows)?;
        self.non_finite = !self.contents.all_finite();
        Ok(())
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

    /// Returns the counts of a bucket's rows; `None` for a dense block.
    pub(crate) fn row_counts(&self) -> Option<wire::TableReport> {
        self.contents.row_counts()
    }

    /// Returns how often a bucket's rows were read and changed; `None` for a dense block.
    pub(crate) fn heat(&self) -> Option<&Heat> {
        self.contents.heat()
    }

    /// Returns the values that a pull wants, as they are now, as `f32`.
    ///
    /// # Errors
    /// If rows on disk cannot be read.
    pub(crate) fn values(
        &mut self,
        wanted: &Wanted,
        rule: &VariableRule,
    ) -> Result<Elements, RowsLost> {
        self.contents.values(wanted, rule)
    }

    /// Appends the values of the rows of `ids`, and for each id whether its row exists. Changes no rows.
    ///
    /// # Errors
    /// If rows on disk cannot be read.
    pub(crate) fn look_up(
        &self,
        ids: &[u64],
        values: &mut Vec<f32>,
        present: &mut Vec<bool>,
    ) -> Result<(), RowsLost> {
        self.contents.look_up(ids, values, present)
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

    /// Records in the watermarks that a message is taken. `version` is the version that the message makes, or the
    /// version of the block when the message is staged.
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
    ///
    /// # Errors
    /// If rows on disk cannot be read.
    pub(crate) fn apply(
        &mut self,
        from: &Origin,
        view: &View,
        gradient: &Values,
        based_on: Version,
        rule: &VariableRule,
    ) -> Result<Applied, RowsLost> {
        let staleness = match gradient {
            // A bucket without rows in a step was not pulled for it.
            Values::Rows(rows) if rows.ids.is_empty() => 0,
            _ => self.version.0.saturating_sub(based_on.0),
        };
        // A watermark without its update would lose the update.
        let made = self.version.next();
        let lowered_to = view.learning_rate_factor;
        let stale = self.stale_steps(view, rule);
        let step = match stale {
            Some(stale) => {
                let update = rule.update_after(self.version.0, lowered_to);
                let step = self.in_flight.next(staleness, view.workers.len(), stale);
                let contents = &mut self.contents;
                let (finite, norms) = contents.update_stale(gradient, rule, update, step)?;
                self.updated(finite);
                self.in_flight.made(self.version, norms);
                stale.may_shorten().then(|| step.made(norms))
            }
            None => {
                // Corrected updates are counted anew once several workers push.
                self.in_flight = InFlight::default();
                let one = [(1.0, gradient)];
                self.update(&one, rule, lowered_to, Limit::OFF, &mut Vec::new())?;
                None
            }
        };
        self.take(from, made, view);
        Ok(Applied {
            version: self.version,
            staleness,
            step,
        })
    }

    /// Returns the corrections of stale gradients; none with a single worker: its gradients are never stale.
    fn stale_steps(&self, view: &View, rule: &VariableRule) -> Option<StaleSteps> {
        let stale = rule.stale_steps().filter(|_| view.workers.len() > 1);
        stale.filter(|_| !planted!(StaleAsNew))
    }

    /// Returns whether the block keeps averages of its weights.
    pub(crate) fn has_averages(&self, rule: &VariableRule) -> bool {
        rule.has_averages() || self.contents.has_average()
    }

    /// Returns the look-ahead weights of the newest version, or `None` if there are none. Workers then compute with the
    /// weights themselves.
    pub(crate) fn look_ahead(&self, view: &View, rule: &VariableRule) -> Option<Elements> {
        self.stale_steps(view, rule)?;
        let is_newest = self.in_flight.version() == Some(self.version);
        is_newest.then(|| self.contents.look_ahead()).flatten()
    }

    /// Stages a gradient for the commit of its step, in place of an earlier gradient of its sender.
    pub(crate) fn stage(&mut self, from: &Origin, view: &View, gradient: Values) -> Staging {
        self.take(from, self.version, view);
        let clock = from.clock;
        let before = self.staged.insert(from.task, Staged { clock, gradient });
        Staging {
            is_first: before.as_ref().is_none_or(|before| before.clock != clock),
            replaced_bytes: before.map_or(0, |before| before.gradient.bytes()),
        }
    }

    /// Applies the mean of the contributors' gradients, weighted by samples and added up in the contributors' order,
    /// and drops all staged gradients. `lowered_to` is a factor of the learning rate, and `sum` is scratch memory. A
    /// step without contributors changes no values.
    pub(crate) fn commit(
        &mut self,
        commit: &Commit,
        rule: &VariableRule,
        lowered_to: f64,
        limit: Limit,
        sum: &mut Vec<f32>,
    ) -> Result<(), NotCommitted> {
        let staged = std::mem::take(&mut self.staged);
        let mean = mean(&staged, commit)?;
        if !mean.is_empty() {
            self.update(&mean, rule, lowered_to, limit, sum)?;
        }
        Ok(())
    }

    /// Returns the sum of the squares of the mean that [`Self::commit`] would apply. `sum` is scratch memory.
    pub(crate) fn squares(
        &self,
        commit: &Commit,
        limit: Limit,
        sum: &mut Vec<f32>,
    ) -> Result<f64, NotCommitted> {
        let mean = mean(&self.staged, commit)?;
        Ok(self.contents.squares(&mean, limit, sum))
    }

    /// Updates the contents by a sum of gradients, and raises the version. Changes nothing if it fails.
    fn update(
        &mut self,
        gradients: &[(f32, &Values)],
        rule: &VariableRule,
        lowered_to: f64,
        limit: Limit,
        sum: &mut Vec<f32>,
    ) -> Result<(), RowsLost> {
        let update = rule.update_after(self.version.0, lowered_to);
        let finite = self.contents.update(gradients, rule, update, limit, sum)?;
        self.updated(finite);
        Ok(())
    }

    /// Raises the version after an update.
    fn updated(&mut self, finite: bool) {
        if !planted!(SameVersion) {
            self.version = self.version.next();
        }
        self.non_finite |= !finite;
    }
}

/// Returns the staged gradients of a step, each with its share of the samples, in the order of the contributors.
fn mean<'a>(
    staged: &'a BTreeMap<Task, Staged>,
    commit: &Commit,
) -> Result<Vec<(f32, &'a Values)>, NotCommitted> {
    let total: u64 = commit.contributors.iter().map(|(_, samples)| samples).sum();
    let of = |(task, samples): &(Task, u64)| {
        let own = staged.get(task).filter(|own| own.clock == commit.step);
        let own = own.ok_or(NotCommitted::NotStaged(*task))?;
        let share = (*samples as f64 / total.max(1) as f64) as f32;
        Ok((share, &own.gradient))
    };
    commit.contributors.iter().map(of).collect()
}

#[cfg(test)]
mod tests;
