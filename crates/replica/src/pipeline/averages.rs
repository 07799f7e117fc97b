//! The running statistics of a stage, such as those of batch normalisation, over the micro-batches of a batch.

use candle_core::{Result, Tensor, Var};

use super::micro::MicroBatch;

/// The variables of a stage that the model changes while it computes. Each micro-batch changes them from the values before its batch; after
/// the last one they have the mean of these changes, weighted by samples.
pub(super) struct Averages<'a> {
    vars: &'a [Var],
    /// Their values before the batch.
    before: Vec<Tensor>,
    /// The sums of their changes.
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

    /// Takes in what the forward pass of a micro-batch has changed.
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

/// Returns the values of a variable in memory of their own.
fn copy(var: &Var) -> Result<Tensor> {
    var.as_detached_tensor().copy()
}
