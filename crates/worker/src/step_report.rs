//! What a worker reports of a step.

use std::time::Duration;

use shared_proto::wire;

/// A step as the worker reports it. It is complete once the step's gradients are acknowledged.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct StepReport {
    pub(crate) samples: u64,
    pub(crate) loss: f64,
    /// The global norm of its gradients.
    pub(crate) norm: f64,
    /// True if its gradient was NaN or infinite and was left out.
    pub(crate) skipped: bool,
    /// True if this worker reports a skipped step. In a stage group, only the first worker does.
    pub(crate) reports_skip: bool,
    /// True if the step was closed without this worker's gradient.
    pub(crate) late: bool,
    /// The parts of the time that the step has taken so far.
    pub(crate) times: Times,
    /// Sync mode: the proofs that its gradient is held where the step needs it.
    pub(crate) receipts: Vec<wire::ShardReceipt>,
}

/// The parts of a step's time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Times {
    pub(crate) pull: Duration,
    pub(crate) compute: Duration,
    pub(crate) push: Duration,
    pub(crate) wait: Duration,
}

impl Times {
    pub(crate) fn add(&mut self, other: &Times) {
        self.pull += other.pull;
        self.compute += other.compute;
        self.push += other.push;
        self.wait += other.wait;
    }
}
