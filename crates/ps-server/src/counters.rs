//! The counters of a shard: for Prometheus, and for the coordinator's summary.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use metrics::{Counter, Gauge, Histogram, counter, gauge, histogram};
use optimizer::CorrectedStep;
use parking_lot::Mutex;
use shared_proto::refusal::Refusal;
use shared_proto::wire;

/// Handles of the metrics, built once.
pub(crate) struct Counters {
    pub(crate) pushes: Counter,
    pub(crate) pulls: Counter,
    pub(crate) received_bytes: Counter,
    pub(crate) sent_bytes: Counter,
    pub(crate) unchanged: Counter,
    pub(crate) duplicates: Counter,
    pub(crate) sessions: Gauge,
    pub(crate) live_workers: Gauge,
    pub(crate) staged_bytes: Gauge,
    pub(crate) checkpoints: Counter,
    pub(crate) failed_checkpoints: Counter,
    pub(crate) checkpoint_seconds: Histogram,
    pub(crate) restores: Counter,
    blocks: Gauge,
    held_bytes: Gauge,
    apply: Histogram,
    pull_wait: Histogram,
    staleness: Histogram,
    step_factor: Histogram,
    step_norm: Histogram,
    synchronous_norm: Histogram,
    lead: Histogram,
    // The report needs copies of these counts, because metrics cannot be read back.
    held: [AtomicU64; 2],
    checkpoint_bytes: AtomicU64,
    updates: AtomicU64,
    staleness_sum: AtomicU64,
    steps: Mutex<wire::CorrectedSteps>,
    max_lead: AtomicU64,
    refused: AtomicU64,
}

impl Counters {
    pub(crate) fn new() -> Self {
        Self {
            pushes: counter!("flambeau_ps_pushes_total"),
            pulls: counter!("flambeau_ps_pulls_total"),
            received_bytes: counter!("flambeau_ps_received_bytes_total"),
            sent_bytes: counter!("flambeau_ps_sent_bytes_total"),
            unchanged: counter!("flambeau_ps_unchanged_blocks_total"),
            duplicates: counter!("flambeau_ps_duplicates_total"),
            sessions: gauge!("flambeau_ps_sessions"),
            live_workers: gauge!("flambeau_ps_live_workers"),
            staged_bytes: gauge!("flambeau_ps_staged_bytes"),
            checkpoints: counter!("flambeau_ps_checkpoints_total"),
            failed_checkpoints: counter!("flambeau_ps_failed_checkpoints_total"),
            checkpoint_seconds: histogram!("flambeau_ps_checkpoint_seconds"),
            restores: counter!("flambeau_ps_restores_total"),
            blocks: gauge!("flambeau_ps_blocks"),
            held_bytes: gauge!("flambeau_ps_held_bytes"),
            apply: histogram!("flambeau_ps_apply_seconds"),
            pull_wait: histogram!("flambeau_ps_pull_wait_seconds"),
            staleness: histogram!("flambeau_ps_gradient_staleness_updates"),
            step_factor: histogram!("flambeau_ps_step_factor"),
            step_norm: histogram!("flambeau_ps_step_norm"),
            synchronous_norm: histogram!("flambeau_ps_synchronous_step_norm"),
            lead: histogram!("flambeau_ps_clock_lead_steps"),
            held: [AtomicU64::new(0), AtomicU64::new(0)],
            checkpoint_bytes: AtomicU64::new(0),
            updates: AtomicU64::new(0),
            staleness_sum: AtomicU64::new(0),
            steps: Mutex::default(),
            max_lead: AtomicU64::new(0),
            refused: AtomicU64::new(0),
        }
    }

    /// Counts an update of a block that took the time `took`. `step` is the block's step if such steps may be shortened
    /// as a whole.
    pub(crate) fn applied(&self, took: Duration, staleness: u64, step: Option<CorrectedStep>) {
        self.apply.record(took);
        self.staleness.record(staleness as f64);
        if let Some(step) = step {
            self.step_factor.record(step.factor);
            self.steps
                .lock()
                .add_step(step.factor, step.synchronous_factor);
            // A step from weights of 0 has an infinite norm.
            if step.relative_norm.is_finite() {
                self.step_norm.record(step.factor * step.relative_norm);
                self.synchronous_norm
                    .record(step.synchronous_factor * step.relative_norm);
            }
        }
        self.updates.fetch_add(1, Relaxed);
        self.staleness_sum.fetch_add(staleness, Relaxed);
    }

    /// Counts a written file of a checkpoint.
    pub(crate) fn wrote(&self, bytes: usize) {
        self.checkpoint_bytes.fetch_add(bytes as u64, Relaxed);
    }

    /// Counts an answered pull.
    pub(crate) fn pulled(&self, waited: Duration, lead: u64) {
        self.pulls.increment(1);
        self.pull_wait.record(waited);
        self.lead.record(lead as f64);
        self.max_lead.fetch_max(lead, Relaxed);
    }

    pub(crate) fn refused(&self, refusal: &Refusal) {
        counter!("flambeau_ps_refused_total", "reason" => refusal.label()).increment(1);
        self.refused.fetch_add(1, Relaxed);
    }

    /// Sets the number of blocks that the shard holds, and the number of their bytes.
    pub(crate) fn holds(&self, (blocks, bytes): (usize, usize)) {
        self.blocks.set(blocks as f64);
        self.held_bytes.set(bytes as f64);
        self.held[0].store(blocks as u64, Relaxed);
        self.held[1].store(bytes as u64, Relaxed);
    }

    /// Returns the report of the shard. `non_finite` is the name of a variable or table with values that are NaN or
    /// infinite, or empty if there is none. `last` is true if no report follows.
    pub(crate) fn report(
        &self,
        shard: u32,
        non_finite: String,
        tables: Vec<wire::TableReport>,
        last: bool,
    ) -> wire::ShardReport {
        wire::ShardReport {
            shard,
            blocks: self.held[0].load(Relaxed),
            bytes: self.held[1].load(Relaxed),
            updates: self.updates.load(Relaxed),
            max_clock_lead: self.max_lead.load(Relaxed),
            staleness_sum: self.staleness_sum.load(Relaxed),
            refused: self.refused.load(Relaxed),
            last,
            checkpoint_bytes: self.checkpoint_bytes.load(Relaxed),
            non_finite,
            tables,
            corrected_steps: Some(*self.steps.lock()),
            ..wire::ShardReport::default()
        }
    }
}
