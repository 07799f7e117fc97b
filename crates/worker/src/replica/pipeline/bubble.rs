//! The share of time in which devices wait for each other.

use metrics::{Gauge, gauge};

use super::lane::Done;

/// The share of the devices' time in a step's passes in which they have waited, beside that of equal stages.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::replica) struct Bubble {
    pub(super) measured: f64,
    pub(super) ideal: f64,
}

impl Bubble {
    /// Returns the bubble of what the devices have done.
    pub(super) fn of(done: &[Done], ideal: f64) -> Self {
        let begun = done.iter().filter_map(|lane| lane.begun).min();
        let ended = done.iter().filter_map(|lane| lane.ended).max();
        let span = match (begun, ended) {
            (Some(begun), Some(ended)) => ended.duration_since(begun).as_secs_f64(),
            _ => 0.0,
        };
        let busy: f64 = done.iter().map(|lane| lane.busy.as_secs_f64()).sum();
        let measured = match span > 0.0 {
            true => 1.0 - busy / (span * done.len() as f64),
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
