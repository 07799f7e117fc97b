//! Variables that a model changes while it computes, such as the statistics of batch normalisation.

use shared_proto::blocks::VariableKind;
use variables::Variables;

use super::error::LoopError;
use super::meeting::Meeting;

/// The averaged variables of a replica, with their values at the beginning of a step.
pub(super) struct Averaged {
    variables: Variables,
    before: Vec<f32>,
}

impl Averaged {
    pub(super) fn new(variables: &Variables) -> Self {
        Self {
            variables: variables.select(|spec| spec.kind == VariableKind::Averaged),
            before: Vec::new(),
        }
    }

    /// Notes the values at the beginning of a step.
    pub(super) fn begin(&mut self) -> Result<(), LoopError> {
        self.before = self.variables.joined()?;
        Ok(())
    }

    /// Restores the values from the beginning of the step, because the step counts on no replica.
    pub(super) fn restore(&self) -> Result<(), LoopError> {
        Ok(self.variables.overwrite(&self.before)?)
    }

    /// Applies the mean of all replicas' changes in the step, weighted by `weight`. If all weights are 0, the replicas have equal weight.
    pub(super) fn end(&mut self, meeting: &Meeting, weight: f64) -> Result<(), LoopError> {
        if meeting.is_alone() || self.before.is_empty() {
            return Ok(());
        }
        let (own, all) = match meeting.sum(&[weight])?[..] {
            [all] if all > 0.0 => (weight, all),
            _ => (1.0, meeting.sum(&[1.0])?.iter().sum()),
        };
        let share = (own / all) as f32;
        let mut changes = self.variables.joined()?;
        for (change, before) in changes.iter_mut().zip(&self.before) {
            *change = (*change - before) * share;
        }
        if own == 0.0 {
            // What a model measures on no samples may be no number.
            changes.fill(0.0);
        }
        meeting.add_up(&mut changes)?;
        for (change, before) in changes.iter_mut().zip(&self.before) {
            *change += before;
        }
        Ok(self.variables.overwrite(&changes)?)
    }
}
