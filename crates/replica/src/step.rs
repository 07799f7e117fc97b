//! A step of a replica, and its result.

use std::time::Duration;

use shared_proto::ids::Clock;
use shared_proto::step::Gradients;

/// Positions of a pass over the training data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Positions {
    /// The number of the pass, from 0.
    pub data_epoch: u32,
    /// The first position.
    pub start: u64,
    /// The position after the last one.
    pub end: u64,
}

impl Positions {
    /// Returns whether there are none.
    pub fn is_empty(&self) -> bool {
        self.start >= self.end
    }

    /// Returns the number of samples at them.
    pub fn samples(&self) -> u64 {
        self.end.saturating_sub(self.start)
    }
}

/// A step of a worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// The number of steps that the worker has finished.
    pub clock: Clock,
    /// The worker's number, from 0.
    pub rank: u32,
}

/// The result of a step.
#[derive(Debug)]
pub struct Computed {
    /// The mean loss over the batch.
    pub loss: f64,
    /// The gradients to push.
    pub gradients: Gradients,
    /// True if the gradients were not ready when the step was closed. There are none, and no loss.
    pub late: bool,
    /// The time outside of the passes in which the step waited for sums of gradients. It counts as push.
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
