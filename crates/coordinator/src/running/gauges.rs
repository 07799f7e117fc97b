//! The metrics of a cluster for Prometheus.

use std::collections::BTreeMap;
use std::time::Instant;

use cluster::Cluster;
use metrics::{Gauge, counter, gauge};
use parking_lot::Mutex;
use shared_proto::ids::{Role, TaskId};
use shared_proto::view::JobPhase;

use super::rings::RingGauges;
use super::total::Total;

const PHASES: [(JobPhase, &str); 4] = [
    (JobPhase::Starting, "starting"),
    (JobPhase::Training, "training"),
    (JobPhase::Done, "done"),
    (JobPhase::Failed, "failed"),
];

/// Handles of the metrics, built once.
pub(crate) struct Gauges {
    live: [(Role, Gauge); 2],
    phases: [(JobPhase, Gauge); 4],
    lost_servers: Total,
    lost_workers: Total,
    failed_checkpoints: Total,
    recoveries: Mutex<BTreeMap<String, Total>>,
    worker_failures: Mutex<BTreeMap<String, Total>>,
    unable: Gauge,
    starts: Gauge,
    lost_updates: Gauge,
    loss_rose: Gauge,
    orphans: Gauge,
    checkpoint: Gauge,
    store_full: Gauge,
    steps: Gauge,
    samples: Gauge,
    total_samples: Gauge,
    view: Gauge,
    min_clock: Gauge,
    /// The metrics of rings. `None` for a job without a ring.
    rings: Option<RingGauges>,
    /// The lead of each worker over the slowest one, in steps.
    leads: Mutex<BTreeMap<TaskId, Gauge>>,
}

impl Gauges {
    /// Creates the handles of a job's metrics. `has_rings` is true if the job's workers form rings.
    pub(crate) fn new(has_rings: bool) -> Self {
        let members = [Role::Ps, Role::Worker];
        let lost = |role: Role| {
            Total::new(
                counter!("flambeau_coordinator_lost_leases_total", "role" => role.to_string()),
            )
        };
        Self {
            live: members.map(|role| {
                let gauge = gauge!("flambeau_coordinator_live_tasks", "role" => role.to_string());
                (role, gauge)
            }),
            phases: PHASES.map(|(phase, name)| {
                (phase, gauge!("flambeau_coordinator_phase", "phase" => name))
            }),
            lost_servers: lost(Role::Ps),
            lost_workers: lost(Role::Worker),
            failed_checkpoints: Total::new(counter!(
                "flambeau_coordinator_failed_checkpoints_total"
            )),
            recoveries: Mutex::default(),
            worker_failures: Mutex::default(),
            unable: gauge!("flambeau_coordinator_workers_unable"),
            starts: gauge!("flambeau_coordinator_starts"),
            lost_updates: gauge!("flambeau_coordinator_lost_updates"),
            loss_rose: gauge!("flambeau_coordinator_loss_rose"),
            orphans: gauge!("flambeau_coordinator_shards_without_server"),
            checkpoint: gauge!("flambeau_coordinator_checkpoint"),
            store_full: gauge!("flambeau_coordinator_checkpoint_store_full"),
            steps: gauge!("flambeau_coordinator_steps"),
            samples: gauge!("flambeau_coordinator_samples"),
            total_samples: gauge!("flambeau_coordinator_total_samples"),
            view: gauge!("flambeau_coordinator_view"),
            min_clock: gauge!("flambeau_coordinator_min_clock_steps"),
            rings: has_rings.then(RingGauges::new),
            leads: Mutex::default(),
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
        let fault_counts = cluster.fault_counts();
        self.lost_servers.is(fault_counts.lost_servers);
        self.lost_workers.is(fault_counts.lost_workers);
        self.failed_checkpoints.is(fault_counts.failed_checkpoints);
        for (server, times) in cluster.recoveries() {
            let server = server.to_string();
            let total = |server: &String| counter!("flambeau_coordinator_recoveries_total", "server" => server.clone());
            count(&self.recoveries, server, times, total);
        }
        self.unable.set(cluster.workers_unable(now) as f64);
        for (failure, times) in cluster.worker_failures() {
            let total = |failure: &String| counter!("flambeau_coordinator_worker_failures_total", "failure" => failure.clone());
            count(&self.worker_failures, failure.clone(), times, total);
        }
        self.starts.set(cluster.starts() as f64);
        self.lost_updates.set(cluster.lost_updates() as f64);
        self.loss_rose
            .set(f64::from(u8::from(cluster.has_risen_loss())));
        self.orphans.set(cluster.shards_without_server() as f64);
        self.store_full
            .set(f64::from(u8::from(cluster.is_store_full())));
        let newest = cluster.checkpoint_status(now);
        self.checkpoint
            .set(newest.map_or(-1.0, |newest| newest.number as f64));
        if let Some(newest) = newest {
            gauge!("flambeau_coordinator_checkpoint_age_seconds").set(newest.age);
        }
        let (steps, samples) = cluster.done();
        self.steps.set(steps as f64);
        self.samples.set(samples as f64);
        self.total_samples.set(cluster.total_samples() as f64);
        self.view.set(view.number.0 as f64);
        self.min_clock.set(view.min_clock.0 as f64);
        if let Some(rings) = &self.rings {
            rings.show(cluster);
        }
        let lead_of = |task| gauge!("flambeau_coordinator_clock_lead_steps", "task" => task);
        let mut leads = self.leads.lock();
        for (task, lead) in cluster.leads() {
            let gauge = leads
                .entry(task)
                .or_insert_with(|| lead_of(task.to_string()));
            gauge.set(lead.map_or(f64::NAN, |lead| lead as f64));
        }
        drop(leads);
        for (metric, value) in cluster.newest_evaluation() {
            gauge!("flambeau_coordinator_evaluation", "metric" => metric.to_owned()).set(value);
        }
    }
}

/// Adds to the counter of a label what the present job has counted since the last call. `times` is the job's total.
fn count(
    totals: &Mutex<BTreeMap<String, Total>>,
    label: String,
    times: u64,
    counter: impl Fn(&String) -> metrics::Counter,
) {
    let mut totals = totals.lock();
    let new = Total::new(counter(&label));
    totals.entry(label).or_insert(new).is(times);
}
