//! What Prometheus is shown of a cluster.

use std::time::Instant;

use metrics::{Gauge, counter, gauge};
use shared_proto::ids::Role;
use shared_proto::view::JobPhase;

use crate::cluster::Cluster;

const PHASES: [(JobPhase, &str); 4] = [
    (JobPhase::Starting, "starting"),
    (JobPhase::Training, "training"),
    (JobPhase::Done, "done"),
    (JobPhase::Failed, "failed"),
];

/// Handles, built once.
pub(crate) struct Gauges {
    live: [(Role, Gauge); 2],
    phases: [(JobPhase, Gauge); 4],
    starts: Gauge,
    lost_updates: Gauge,
    orphans: Gauge,
    checkpoint: Gauge,
    checkpoint_age: Gauge,
    steps: Gauge,
    samples: Gauge,
    view: Gauge,
    min_clock: Gauge,
}

impl Gauges {
    pub(crate) fn new() -> Self {
        let members = [Role::Ps, Role::Worker];
        // Counters that nothing has raised yet are 0, not absent.
        for role in members {
            lost_lease(role, 0);
        }
        recovered(0);
        counter!("flambeau_coordinator_failed_checkpoints_total").increment(0);
        Self {
            live: members.map(|role| {
                let gauge = gauge!("flambeau_coordinator_live_tasks", "role" => role.to_string());
                (role, gauge)
            }),
            phases: PHASES.map(|(phase, name)| {
                (phase, gauge!("flambeau_coordinator_phase", "phase" => name))
            }),
            starts: gauge!("flambeau_coordinator_starts"),
            lost_updates: gauge!("flambeau_coordinator_lost_updates"),
            orphans: gauge!("flambeau_coordinator_shards_without_server"),
            checkpoint: gauge!("flambeau_coordinator_checkpoint"),
            checkpoint_age: gauge!("flambeau_coordinator_checkpoint_age_seconds"),
            steps: gauge!("flambeau_coordinator_steps"),
            samples: gauge!("flambeau_coordinator_samples"),
            view: gauge!("flambeau_coordinator_view"),
            min_clock: gauge!("flambeau_coordinator_min_clock_steps"),
        }
    }

    pub(crate) fn show(&self, cluster: &Cluster, now: Instant) {
        for (role, gauge) in &self.live {
            gauge.set(cluster.live_tasks(*role) as f64);
        }
        let view = cluster.view();
        for (phase, gauge) in &self.phases {
            gauge.set(f64::from(u8::from(view.phase == *phase)));
        }
        let (starts, lost, orphans, newest) = cluster.faults(now);
        self.starts.set(starts as f64);
        self.lost_updates.set(lost as f64);
        self.orphans.set(orphans as f64);
        self.checkpoint
            .set(newest.map_or(-1.0, |newest| newest.number as f64));
        self.checkpoint_age
            .set(newest.map_or(0.0, |newest| newest.age));
        let (steps, samples) = cluster.done();
        self.steps.set(steps as f64);
        self.samples.set(samples as f64);
        self.view.set(view.number.0 as f64);
        self.min_clock.set(view.min_clock.0 as f64);
        for (metric, value) in cluster.newest_evaluation() {
            gauge!("flambeau_coordinator_evaluation", "metric" => metric.to_owned()).set(value);
        }
    }
}

/// Members of a role whose lease has ended without a word.
pub(crate) fn lost_lease(role: Role, members: u64) {
    counter!("flambeau_coordinator_lost_leases_total", "role" => role.to_string())
        .increment(members);
}

/// Times that shards went back to a checkpoint.
pub(crate) fn recovered(times: u64) {
    counter!("flambeau_coordinator_recoveries_total").increment(times);
}
