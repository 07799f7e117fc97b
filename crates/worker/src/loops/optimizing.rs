//! Variables with an optimizer of their own.

use candle_core::backprop::GradStore;
use shared_proto::job::{Clip, Job, Schedule, ScheduleKind};
use variables::{LocalOptimizer, Trained, Variables};

use super::error::LoopError;

/// An optimizer of a [`Distributed`](super::Distributed) model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptimizerId(pub(super) usize);

/// The variables of an optimizer, in one replica.
pub(super) struct Optimizing {
    variables: Variables,
    optimizer: LocalOptimizer,
    clip: Clip,
}

impl Optimizing {
    pub(super) fn new(job: &Job, variables: Variables) -> Result<Self, LoopError> {
        check(job)?;
        Ok(Self {
            // Without data there is no end of training; schedules that need it name it.
            optimizer: LocalOptimizer::new(job, &variables, u64::MAX)?,
            variables,
            clip: job.clip(),
        })
    }

    /// Returns whether the optimizer updates the variable with this name.
    pub(super) fn has(&self, name: &str) -> bool {
        let specs = self.variables.specs();
        specs.iter().any(|spec| spec.name == name)
    }

    /// Returns the gradients of the optimizer's variables, concatenated, and whether they are finite.
    pub(super) fn gradients(&self, store: &GradStore) -> Result<(Vec<f32>, bool), LoopError> {
        let gradients = self.variables.trained_gradients(store, &[])?;
        let finite = gradients.norm().is_finite();
        Ok((gradients.joined(), finite))
    }

    /// Updates the variables with the mean gradient of all replicas, after clipping.
    pub(super) fn update(&mut self, gradient: Vec<f32>) -> Result<(), LoopError> {
        let (gradient, _) = Trained::whole(gradient).clipped(self.clip);
        let mut gradient = gradient.joined().into();
        Ok(self.optimizer.update(&self.variables, &mut gradient)?)
    }
}

/// Refuses settings that have no effect in a loop, because the user expects an effect.
fn check(job: &Job) -> Result<(), LoopError> {
    let Schedule {
        kind, total_steps, ..
    } = job.schedule;
    let default = Job::default();
    let settings = [
        (
            kind == ScheduleKind::Cosine && total_steps.is_none(),
            "schedule.kind",
            "a cosine schedule needs schedule.total_steps here",
        ),
        (
            job.groups.iter().any(|group| group.frozen),
            "groups",
            "give variables that are not trained no optimizer",
        ),
        (
            job.ema_decay.is_some(),
            "ema_decay",
            "keep averages yourself, or use Trainer",
        ),
        (
            job.plateau.is_some(),
            "plateau",
            "evaluate the model yourself, or use Trainer",
        ),
        (
            job.accumulate != default.accumulate,
            "accumulate",
            "add up losses before minimize",
        ),
        (
            job.non_finite != default.non_finite,
            "non_finite",
            "a step with such a gradient fails; go on with the next one",
        ),
    ];
    match settings.into_iter().find(|(given, ..)| *given) {
        Some((_, setting, advice)) => Err(LoopError::NoEffect { setting, advice }),
        None => Ok(()),
    }
}
