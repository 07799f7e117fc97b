//! What a step sees of its replica.

use candle_core::{Device, Error, Tensor};

use super::error::LoopError;
use super::meeting::Meeting;
use super::optimizing::{OptimizerId, Optimizing};

/// A replica of a model, in a step.
pub struct Replica<'a, M> {
    pub(super) index: usize,
    pub(super) replicas: usize,
    pub(super) model: &'a M,
    pub(super) device: &'a Device,
    pub(super) optimizing: &'a mut [Optimizing],
    pub(super) meeting: &'a Meeting,
    /// The number of samples of the step so far.
    pub(super) samples: usize,
    /// The error with which the replica has failed. candle's errors keep only its text.
    pub(super) failed: Option<LoopError>,
}

impl<'a, M> Replica<'a, M> {
    /// Returns the index of this replica, from 0.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Returns the number of replicas.
    pub fn replicas(&self) -> usize {
        self.replicas
    }

    /// Returns the model.
    pub fn model(&self) -> &'a M {
        self.model
    }

    /// Returns the device of the model.
    pub fn device(&self) -> &'a Device {
        self.device
    }

    /// Lowers the loss of the global batch by one update of an optimizer. `loss` is the mean over this replica's
    /// samples, and `samples` is their number. The update uses the gradient of the mean over all replicas' samples. A
    /// replica without samples passes 0 as `samples`, and any loss that depends on the variables.
    ///
    /// # Errors
    /// If a variable has no gradient, a gradient is not finite, or another replica has failed.
    pub fn minimize(
        &mut self,
        optimizer: OptimizerId,
        loss: &Tensor,
        samples: usize,
    ) -> candle_core::Result<()> {
        self.check()?;
        let store = nn::backward(loss)?;
        let Some(optimizing) = self.optimizing.get_mut(optimizer.0) else {
            return Err(Error::msg("the optimizer belongs to another model"));
        };
        let mut update = || {
            let (mut values, finite) = optimizing.gradients(&store)?;
            // A gradient of no samples may be anything.
            let finite = finite || samples == 0;
            let agreed =
                self.meeting
                    .agree_on_update(optimizer.0, values.len(), samples, finite)?;
            let all = match agreed {
                (_, failed) if failed > 0.0 => return Err(LoopError::NonFinite),
                // No replica has samples.
                (0.0, _) => return Ok(()),
                (all, _) => all,
            };
            match samples {
                0 => values.fill(0.0),
                samples => {
                    let share = (samples as f64 / all) as f32;
                    values.iter_mut().for_each(|value| *value *= share);
                }
            }
            self.meeting.add_up(&mut values)?;
            optimizing.update(values)
        };
        let updated: Result<(), LoopError> = update();
        self.samples += samples;
        self.noted(updated)
    }

    /// Returns the sums of all replicas' numbers, for example of losses and of samples.
    ///
    /// # Errors
    /// If another replica has failed.
    pub fn sum(&mut self, numbers: &[f64]) -> candle_core::Result<Vec<f64>> {
        self.check()?;
        let sum = self.meeting.sum(numbers);
        self.noted(sum)
    }

    /// Refuses calls after a failed one, because the other replicas do not take part in them any more.
    fn check(&self) -> candle_core::Result<()> {
        match &self.failed {
            Some(error) => Err(Error::msg(format!("the step has failed before: {error}"))),
            None => Ok(()),
        }
    }

    /// Keeps an error, and returns it as an error of candle.
    fn noted<T>(&mut self, outcome: Result<T, LoopError>) -> candle_core::Result<T> {
        outcome.map_err(|error| {
            let text = error.to_string();
            self.failed = Some(error);
            Error::msg(text)
        })
    }
}
