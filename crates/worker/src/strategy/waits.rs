//! Reports of waits: for which tasks a worker waits.

use daemon::membership::Membership;
use metrics::counter;
use shared_proto::ids::{Task, names};
use shared_proto::wire;
use shared_proto::wire::report_request::Report;
use tokio::sync::watch;

/// Reports which workers this worker waits for, in the log, the metrics and to the coordinator.
pub(super) fn tell_waits(
    membership: &Membership,
    mut waiting_on: watch::Receiver<Vec<Task>>,
) -> impl Future<Output = ()> + use<> {
    let coordinator = membership.coordinator.clone();
    let sender = membership.sender();
    async move {
        while waiting_on.changed().await.is_ok() {
            let on = waiting_on.borrow_and_update().clone();
            if !on.is_empty() {
                tracing::info!(on = names(&on), "held back: waiting for others");
            }
            for task in &on {
                counter!("flambeau_worker_waits_total", "on" => task.to_string()).increment(1);
            }
            let report = Report::Wait(wire::WaitReport {
                on: on.into_iter().map(Into::into).collect(),
            });
            // Nothing depends on this report.
            let _ = coordinator.report(sender.next_origin_here(), report).await;
        }
    }
}
