//! The running statistics of a stage, such as those of batch normalisation, over the micro-batches of a batch.

use candle_core::{Result, Tensor, Var};

use super::micro::MicroBatch;

/// The variables of a stage that the model changes in its forward pass. Each micro-batch begins with the values before
/// its batch. After the last one, each variable has its value before the batch plus the mean change, weighted by
/// samples.
pub(super) struct Averages<'a> {
    vars: &'a [Var],
    /// The variables' values before the batch.
    before: Vec<Tensor>,
    /// The sums of the variables' changes.
    changes: Vec<Tensor>,
}

impl<'a> Averages<'a> {
    pub(super) fn new(vars: &'a [Var]) -> Result<Self> {
        Ok(Self {
            vars,
            before: vars.iter().map(copy).collect::<Result<_>>()?,
            changes: Vec::new(),
        })
    }

    /// Adds the changes that the forward pass of a micro-batch has made, and sets the variables back. After the last
    /// micro-batch of a batch, sets them to their new values.
    pub(super) fn add(&mut self, micro_batch: &MicroBatch) -> Result<()> {
        let share = micro_batch.share_of_batch;
        if share == 1.0 {
            self.before = self.vars.iter().map(copy).collect::<Result<_>>()?;
            return Ok(());
        }
        let mut sums = std::mem::take(&mut self.changes).into_iter();
        for (var, before) in self.vars.iter().zip(&mut self.before) {
            let change = ((var.as_detached_tensor() - &*before)? * share)?;
            let sum = match sums.next() {
                Some(sum) => (sum + change)?,
                None => change,
            };
            if micro_batch.is_last {
                *before = (&*before + sum)?;
            } else {
                self.changes.push(sum);
            }
            var.set(before)?;
        }
        Ok(())
    }
}

/// Returns a copy of a variable's values.
fn copy(var: &Var) -> Result<Tensor> {
    var.as_detached_tensor().copy()
}
