//! The pipeline bubble: the share of time in which devices wait for each other.

use metrics::{Gauge, gauge};

use super::lane::Done;

/// The share of the devices' time in a step's passes in which they waited: the measured one, and the ideal one, for
/// stages that take equally long.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Bubble {
    pub(super) measured: f64,
    pub(super) ideal: f64,
}

/// The time of a step's passes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Spent {
    /// The seconds in which devices computed, summed over all devices.
    pub(crate) busy: f64,
    /// The seconds from the start of the first computation to the end of the last.
    pub(crate) span: f64,
}

impl Spent {
    /// Returns the time that the lanes spent.
    pub(super) fn new(done: &[Done]) -> Self {
        let begun = done.iter().filter_map(|lane| lane.begun).min();
        let ended = done.iter().filter_map(|lane| lane.ended).max();
        let span = match (begun, ended) {
            (Some(begun), Some(ended)) => ended.duration_since(begun).as_secs_f64(),
            _ => 0.0,
        };
        let busy = done.iter().map(|lane| lane.busy.as_secs_f64()).sum();
        Self { busy, span }
    }
}

impl Bubble {
    /// Returns the bubble of a step on this number of devices.
    pub(super) fn new(spent: Spent, devices: usize, ideal: f64) -> Self {
        let Spent { busy, span } = spent;
        let measured = match span > 0.0 {
            true => 1.0 - busy / (span * devices as f64),
            false => 0.0,
        };
        Self { measured, ideal }
    }
}

/// The metrics of bubbles, built once.
pub(super) struct BubbleGauges {
    measured: Gauge,
    ideal: Gauge,
}

impl BubbleGauges {
    pub(super) fn new() -> Self {
        Self {
            measured: gauge!("flambeau_worker_pipeline_bubble_ratio"),
            ideal: gauge!("flambeau_worker_pipeline_ideal_bubble_ratio"),
        }
    }

    pub(super) fn show(&self, bubble: Bubble) {
        self.measured.set(bubble.measured);
        self.ideal.set(bubble.ideal);
    }
}
