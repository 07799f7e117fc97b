//! What differs between dense variables and tables: how a block stores its values, and how an update changes them.

use std::fmt::Debug;
use std::io;

use bytes::Bytes;
use checkpoint::SavedValues;
use optimizer::{Norms, StaleStep, Update, VariableRule};
use shared_proto::payload::Elements;
use shared_proto::table::{SavedRows, TableSpec};
use shared_proto::values::Values;
use shared_proto::wire;
use table::bucket::SharedBucket;

use super::heat::Heat;

/// Limits on a sum of gradients. First each element is clamped, then the whole sum is scaled.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limit {
    /// The largest absolute value that an element may have; `None` if there is no limit.
    pub(crate) value: Option<f32>,
    /// The factor by which all elements are multiplied.
    pub(crate) factor: f32,
}

impl Limit {
    pub(crate) const OFF: Self = Self {
        value: None,
        factor: 1.0,
    };

    pub(super) fn is_off(self) -> bool {
        self.value.is_none() && self.factor == 1.0
    }

    pub(super) fn apply(self, sum: &mut [f32]) {
        if self.is_off() {
            return;
        }
        let most = self.value.unwrap_or(f32::INFINITY);
        for element in sum {
            *element = element.clamp(-most, most) * self.factor;
        }
    }
}

/// Returns the sum of the squares of numbers.
pub(super) fn squares(numbers: &[f32]) -> f64 {
    let square = |number: &f32| f64::from(*number) * f64::from(*number);
    numbers.iter().map(square).sum()
}

/// The values of a block, with the optimizer's state for them. The [`Block`](super::Block) around them has the version,
/// the watermarks and the staged gradients.
pub(crate) trait Contents: Debug + Send {
    /// Sets the initial values, and overwrites earlier values.
    fn initialize(&mut self, values: &Elements, rule: &VariableRule);

    /// Returns whether there are values.
    fn initialized(&self) -> bool;

    /// Returns the values that a pull wants, as they are now, as `f32`.
    ///
    /// # Errors
    /// If rows on disk cannot be read.
    fn values(&mut self, wanted: &Wanted, rule: &VariableRule) -> Result<Elements, RowsLost>;

    /// Multiplies each gradient by its factor, adds the products up, limits the sum, and applies it as one update.
    /// `sum` is scratch memory. Returns whether all changed values are finite.
    ///
    /// # Errors
    /// If rows on disk cannot be read.
    fn update(
        &mut self,
        gradients: &[(f32, &Values)],
        rule: &VariableRule,
        update: Update,
        limit: Limit,
        sum: &mut Vec<f32>,
    ) -> Result<bool, RowsLost>;

    /// Applies one gradient that may have been computed with old weights. `step` has the corrections of its step.
    /// Returns whether all changed values are finite, and the norms by which the next step is limited.
    ///
    /// # Errors
    /// If rows on disk cannot be read.
    fn update_stale(
        &mut self,
        gradient: &Values,
        rule: &VariableRule,
        update: Update,
        step: StaleStep,
    ) -> Result<(bool, Norms), RowsLost>;

    /// Returns the look-ahead weights of the last update. Returns `None` for rows, and if the last update made none.
    fn look_ahead(&self) -> Option<Elements> {
        None
    }

    /// Returns whether there is an average of the recent weights. The average is not a slot: checkpoints do not have
    /// it, and the next update without corrections drops it.
    fn has_average(&self) -> bool {
        false
    }

    /// Returns the sum of the squares of the limited sum that [`Self::update`] would apply. `sum` is scratch memory.
    fn squares(&self, gradients: &[(f32, &Values)], limit: Limit, sum: &mut Vec<f32>) -> f64;

    /// Returns whether all values are finite.
    fn all_finite(&self) -> bool;

    /// Returns the number of bytes of values and state.
    fn bytes(&self) -> usize;

    /// Adds rows of a checkpoint. None of them may be there already.
    ///
    /// # Errors
    /// If they are not rows of this bucket, or the values are dense.
    fn add_rows(&mut self, _: &TableSpec, _: &SavedRows) -> Result<(), String> {
        Err("it is dense, not a bucket".to_owned())
    }

    /// Appends the values of the rows of `ids`, and for each id whether its row exists. Changes no rows. Dense values
    /// have no rows.
    ///
    /// # Errors
    /// If rows on disk cannot be read.
    fn look_up(&self, _: &[u64], _: &mut Vec<f32>, _: &mut Vec<bool>) -> Result<(), RowsLost> {
        Ok(())
    }

    /// Returns the counts of rows; `None` if the values are dense.
    fn row_counts(&self) -> Option<wire::TableReport> {
        None
    }

    /// Returns how often rows were read and changed; `None` if the values are dense.
    fn heat(&self) -> Option<&Heat> {
        None
    }

    /// Returns values and state as they are now, for the checkpoint with this number. They are shared, not copied.
    fn share(&mut self, checkpoint: u64) -> SharedValues;
}

/// Rows on disk cannot be read, so that the block has lost them.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("rows on disk cannot be read: {0}")]
pub(crate) struct RowsLost(String);

impl From<io::Error> for RowsLost {
    fn from(error: io::Error) -> Self {
        Self(error.to_string())
    }
}

/// The values of a block that a pull wants.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Wanted {
    /// True for moving averages instead of weights.
    pub(crate) average: bool,
    /// True for look-ahead weights.
    pub(crate) look_ahead: bool,
    /// The ids of the rows; empty for a dense block.
    pub(crate) ids: Vec<u64>,
}

/// The values of a block at one moment.
#[derive(Clone, Debug)]
pub(crate) enum SharedValues {
    Dense { weights: Bytes, slots: Bytes },
    Rows(SharedBucket),
}

impl SharedValues {
    /// Returns the number of bytes of values and state.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Self::Dense { weights, slots } => weights.len() + slots.len(),
            Self::Rows(rows) => rows.bytes(),
        }
    }

    /// Returns approximately how many bytes the values take in a checkpoint.
    pub(crate) fn saved_bytes(&self) -> usize {
        match self {
            Self::Dense { .. } => self.bytes(),
            Self::Rows(rows) => rows.saved_bytes(),
        }
    }

    /// Leaves out the rows of a bucket that have not changed since the checkpoint `base`, if the changed rows are known
    /// and are less than half of all rows.
    pub(crate) fn build_on(&mut self, base: Option<u64>) {
        if let Self::Rows(rows) = self {
            rows.build_on(base);
        }
    }

    /// Returns whether there are values.
    pub(crate) fn initialized(&self) -> bool {
        match self {
            Self::Dense { weights, .. } => !weights.is_empty(),
            Self::Rows(_) => true,
        }
    }

    /// Returns the values in the form of a checkpoint. Rows are copied.
    ///
    /// # Errors
    /// If rows on disk cannot be read.
    pub(crate) fn to_saved(&self) -> Result<SavedValues, RowsLost> {
        Ok(match self {
            Self::Dense { weights, slots } => SavedValues::Dense {
                weights: weights.clone(),
                slots: slots.clone(),
            },
            Self::Rows(rows) => SavedValues::Rows(rows.to_bytes()?),
        })
    }
}
