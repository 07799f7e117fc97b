//! The metrics of a worker for Prometheus.

use std::time::Duration;

use metrics::{Counter, Gauge, Histogram, counter, gauge, histogram};

use crate::step_report::StepReport;

/// Handles of the metrics, built once.
pub(crate) struct Counters {
    pub(crate) steps: Counter,
    pub(crate) samples: Counter,
    pub(crate) loss: Gauge,
    pub(crate) samples_per_second: Gauge,
    pub(crate) gradient_norm: Gauge,
    pub(crate) clock: Gauge,
    pub(crate) registrations: Counter,
    pub(crate) skipped: Counter,
    pub(crate) late: Counter,
    parts: [Histogram; 4],
}

impl Counters {
    pub(crate) fn new() -> Self {
        let part =
            |part: &'static str| histogram!("flambeau_worker_step_part_seconds", "part" => part);
        Self {
            steps: counter!("flambeau_worker_steps_total"),
            samples: counter!("flambeau_worker_samples_total"),
            loss: gauge!("flambeau_worker_loss"),
            samples_per_second: gauge!("flambeau_worker_samples_per_second"),
            gradient_norm: gauge!("flambeau_worker_gradient_norm"),
            clock: gauge!("flambeau_worker_clock_steps"),
            registrations: counter!("flambeau_worker_registrations_total"),
            skipped: counter!("flambeau_worker_skipped_steps_total"),
            late: counter!("flambeau_worker_late_steps_total"),
            parts: ["pull", "compute", "push", "wait"].map(part),
        }
    }

    /// Shows that the worker makes no steps at present: sets the rate and the clock to 0, and the loss and the norm to
    /// NaN.
    pub(crate) fn rest(&self) {
        for of_step in [&self.loss, &self.gradient_norm] {
            of_step.set(f64::NAN);
        }
        for of_work in [&self.samples_per_second, &self.clock] {
            of_work.set(0.0);
        }
    }

    pub(crate) fn step(&self, step: &StepReport) {
        let (samples, times) = (step.samples, &step.times);
        self.steps.increment(1);
        self.samples.increment(samples);
        if samples > 0 {
            self.loss.set(step.loss);
            self.gradient_norm.set(step.norm);
        }
        let parts = [times.pull, times.compute, times.push, times.wait];
        for (histogram, part) in self.parts.iter().zip(parts) {
            histogram.record(part);
        }
        let whole: Duration = parts.iter().sum();
        if !whole.is_zero() {
            self.samples_per_second
                .set(samples as f64 / whole.as_secs_f64());
        }
    }
}
