//! Variables with an optimizer of their own.

use candle_core::backprop::GradStore;
use shared_proto::job::{Clip, Job};
use shared_proto::step::Gradients;

use super::error::LoopError;
use crate::variables::{LocalOptimizer, Measured, Variables};

/// The variables of an optimizer, in one replica.
pub(super) struct Optimizing {
    variables: Variables,
    optimizer: LocalOptimizer,
    clip: Clip,
    /// The values of averaged variables since the last update, or since the beginning of the step.
    measured: Option<Measured>,
}

impl Optimizing {
    pub(super) fn new(job: &Job, variables: Variables) -> Result<Self, LoopError> {
        Ok(Self {
            // Without data there is no end of training; schedules that need it name it.
            optimizer: LocalOptimizer::new(job, &variables, u64::MAX)?,
            variables,
            clip: job.clip(),
            measured: None,
        })
    }

    /// Returns whether it updates the variable of this name.
    pub(super) fn has(&self, name: &str) -> bool {
        let specs = self.variables.specs();
        specs.iter().any(|spec| spec.name == name)
    }

    /// Begins a step.
    pub(super) fn begin(&mut self) -> Result<(), LoopError> {
        self.measured = Some(self.variables.measured()?);
        Ok(())
    }

    /// Takes the gradients of its variables, and the changes of those that the model has changed.
    pub(super) fn gradients(&mut self, store: &GradStore) -> Result<Gradients, LoopError> {
        let measured = self.measured.take();
        let before = measured.map_or_else(|| self.variables.measured(), Ok)?;
        Ok(self.variables.gradients(store, before, self.clip)?)
    }

    /// Updates the variables by the mean gradient.
    pub(super) fn update(&mut self, mut gradient: Vec<f32>) -> Result<(), LoopError> {
        self.optimizer.update(&self.variables, &mut gradient)?;
        self.begin()
    }
}
