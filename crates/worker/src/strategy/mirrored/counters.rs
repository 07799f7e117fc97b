//! The metrics of a member of a ring for Prometheus.

use std::time::Duration;

use collective::Traffic;
use metrics::{Counter, Gauge, Histogram, counter, gauge, histogram};
use shared_proto::ids::Epoch;

use super::ring::Lost;

/// Handles of the metrics, built once for a membership.
pub(super) struct RingCounters {
    all_reduce: Histogram,
    hidden: Histogram,
    again: Counter,
    sent: Counter,
    received: Counter,
    joined: Counter,
    number: Gauge,
    members: Gauge,
    slot_bytes: Gauge,
    /// Abandoned steps, by reason: `link`, `over` or `replica`.
    link: Counter,
    over: Counter,
    replica: Counter,
}

impl RingCounters {
    pub(super) fn new() -> Self {
        let abandoned = |reason: &'static str| counter!("flambeau_worker_abandoned_steps_total", "reason" => reason);
        Self {
            all_reduce: histogram!("flambeau_worker_all_reduce_seconds"),
            hidden: histogram!("flambeau_worker_hidden_all_reduce_seconds"),
            again: counter!("flambeau_worker_repeated_all_reduces_total"),
            sent: counter!("flambeau_worker_ring_sent_bytes_total"),
            received: counter!("flambeau_worker_ring_received_bytes_total"),
            joined: counter!("flambeau_worker_rings_total"),
            number: gauge!("flambeau_worker_ring"),
            members: gauge!("flambeau_worker_ring_members"),
            slot_bytes: gauge!("flambeau_worker_optimizer_slot_bytes"),
            link: abandoned("link"),
            over: abandoned("over"),
            replica: abandoned("replica"),
        }
    }

    /// Counts a ring that this worker is in from now on.
    pub(super) fn joined(&self, ring: Epoch, members: usize) {
        self.joined.increment(1);
        self.number.set(ring.0 as f64);
        self.members.set(members as f64);
    }

    /// Shows that this worker is in no ring.
    pub(super) fn left(&self) {
        self.members.set(0.0);
    }

    /// Shows the memory of the optimizer's slots that this worker has.
    pub(super) fn holds(&self, slot_bytes: usize) {
        self.slot_bytes.set(slot_bytes as f64);
    }

    pub(super) fn reduced(&self, took: Duration) {
        self.all_reduce.record(took);
    }

    /// Records the time that all-reduces took while the replica computed.
    pub(super) fn hidden(&self, took: Duration) {
        self.hidden.record(took);
    }

    /// Counts a step with gradients that are added up again.
    pub(super) fn added_up_again(&self) {
        self.again.increment(1);
    }

    pub(super) fn moved(&self, traffic: Traffic) {
        self.sent.increment(traffic.sent);
        self.received.increment(traffic.received);
    }

    pub(super) fn abandoned(&self, why: &Lost) {
        let counter = match why {
            Lost::Member(..) => &self.link,
            Lost::Over => &self.over,
            Lost::Replica(_) | Lost::Devices(_) => &self.replica,
        };
        counter.increment(1);
    }
}
