//! The metrics of rings of workers, for Prometheus.

use std::sync::atomic::{AtomicU64, Ordering};

use cluster::{Cause, Cluster};
use metrics::{Gauge, Histogram, counter, gauge, histogram};

use super::total::Total;

/// Handles of the metrics, built once.
pub(super) struct RingGauges {
    number: Gauge,
    members: Gauge,
    broken: [(Cause, Total); 6],
    evicted: Total,
    form_seconds: Histogram,
    /// The number of rings whose times to form are in the histogram.
    recorded: AtomicU64,
}

impl RingGauges {
    pub(super) fn new() -> Self {
        let broken = |cause: Cause| {
            Total::new(counter!("flambeau_coordinator_broken_rings_total", "cause" => cause.name()))
        };
        Self {
            number: gauge!("flambeau_coordinator_ring"),
            members: gauge!("flambeau_coordinator_ring_members"),
            broken: Cause::ALL.map(|cause| (cause, broken(cause))),
            evicted: Total::new(counter!("flambeau_coordinator_unreachable_workers_total")),
            form_seconds: histogram!("flambeau_coordinator_ring_form_seconds"),
            recorded: AtomicU64::new(0),
        }
    }

    pub(super) fn show(&self, cluster: &Cluster) {
        let figures = cluster.ring_figures();
        self.number.set(figures.number as f64);
        self.members.set(figures.members as f64);
        let rings = cluster.rings();
        for (cause, counter) in &self.broken {
            counter.is(rings.broken(*cause));
        }
        self.evicted.is(rings.evictions());
        let recorded = self.recorded.swap(rings.renewed(), Ordering::Relaxed);
        for took in rings.took_after(recorded) {
            self.form_seconds.record(took);
        }
    }
}
