//! A step of a replica, and its result.

use std::time::Duration;

use shared_proto::ids::Clock;
use shared_proto::step::Gradients;

/// A range of positions in a pass over the training data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Positions {
    /// The index of the pass, from 0.
    pub data_epoch: u32,
    /// The first position.
    pub start: u64,
    /// The position after the last one.
    pub end: u64,
}

impl Positions {
    /// Returns whether the range is empty.
    pub fn is_empty(&self) -> bool {
        self.start >= self.end
    }

    /// Returns the number of samples in the range.
    pub fn samples(&self) -> u64 {
        self.end.saturating_sub(self.start)
    }
}

/// A step of a worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// The number of steps that the worker has finished.
    pub clock: Clock,
    /// The worker's index, from 0. If a worker has several devices, the device's index among those of all workers. It
    /// selects the random numbers.
    pub rank: u32,
}

/// The result of a step.
#[derive(Debug)]
pub struct Computed {
    /// The mean loss over the batch.
    pub loss: f64,
    /// The gradients to push.
    pub gradients: Gradients,
    /// True if the step was closed before the gradients were ready. There is then neither a gradient nor a loss.
    pub late: bool,
    /// The time in which the step waited for sums of gradients, outside of its passes. It counts as time of the push.
    pub waited: Duration,
}

impl Computed {
    /// The result of a step with gradients that are not exchanged yet.
    pub fn new(loss: f64, gradients: Gradients) -> Self {
        Self {
            loss,
            gradients,
            late: false,
            waited: Duration::ZERO,
        }
    }

    /// The result of a step without samples.
    pub fn nothing() -> Self {
        Self::new(0.0, Gradients::none())
    }

    /// The result of a step that was closed before the gradients were ready.
    pub fn late() -> Self {
        Self {
            late: true,
            ..Self::nothing()
        }
    }
}
