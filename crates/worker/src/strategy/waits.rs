//! Reports of waits: for which tasks a worker waits.

use std::collections::BTreeSet;

use daemon::membership::Membership;
use futures_util::future::select_all;
use metrics::counter;
use shared_proto::ids::{Task, names};
use shared_proto::task;
use shared_proto::wire;
use shared_proto::wire::report_request::Report;
use tokio::sync::watch;
use tokio::time::{Instant, timeout};
use tokio_util::sync::{CancellationToken, DropGuard};

/// How often a worker repeats the report of a wait in one lease. A coordinator that has restarted learns of the wait from the next report.
const REPORTS_PER_LEASE: u32 = 4;

/// The tasks that a part of a strategy waits for at present.
pub(super) struct Waits {
    on: watch::Receiver<Vec<Task>>,
    /// False while the worker does something else, so that a wait does not delay it.
    within: Option<watch::Receiver<bool>>,
}

impl Waits {
    /// Waits that delay the worker whenever there are some.
    pub(super) fn always(on: watch::Receiver<Vec<Task>>) -> Self {
        Self { on, within: None }
    }

    /// Waits that delay the worker while `within` is true.
    pub(super) fn within(on: watch::Receiver<Vec<Task>>, within: watch::Receiver<bool>) -> Self {
        Self {
            on,
            within: Some(within),
        }
    }

    /// Waits until the tasks change. Returns false once the part of the strategy has ended.
    async fn change(&mut self) -> bool {
        match &mut self.within {
            Some(within) => tokio::select! {
                changed = self.on.changed() => changed.is_ok(),
                changed = within.changed() => changed.is_ok(),
            },
            None => self.on.changed().await.is_ok(),
        }
    }

    fn seen(&mut self) -> Vec<Task> {
        let on = self.on.borrow_and_update().clone();
        let within = self.within.as_mut();
        match within.is_none_or(|within| *within.borrow_and_update()) {
            true => on,
            false => Vec::new(),
        }
    }
}

/// Reports which tasks this worker waits for, in the log, the metrics and to the coordinator, until the returned value
/// is dropped. The coordinator keeps one list for each worker, so the parts of a strategy are reported together.
pub(super) fn tell_waits<const PARTS: usize>(
    membership: &Membership,
    mut parts: [Waits; PARTS],
) -> DropGuard {
    let coordinator = membership.coordinator.clone();
    let sender = membership.sender();
    let pause = membership.lease().length() / REPORTS_PER_LEASE;
    let tell = async move {
        // The tasks of the last report, and whether the coordinator has it.
        let (mut told, mut known) = (Vec::new(), true);
        let mut since = Instant::now();
        loop {
            let left = pause.saturating_sub(since.elapsed());
            let changed = timeout(left, any_changes(&mut parts)).await;
            if changed == Ok(false) {
                return;
            }
            let due = changed.is_err();
            if due {
                since = Instant::now();
            }
            let on = all(&mut parts);
            let repeats = due && !(on.is_empty() && known);
            if on == told && !repeats {
                continue;
            }
            if on != told && !on.is_empty() {
                tracing::info!(on = names(&on), "held back: waiting for others");
            }
            for task in on.iter().filter(|task| !told.contains(task)) {
                counter!("flambeau_worker_waits_total", "on" => task.to_string()).increment(1);
            }
            told.clone_from(&on);
            let report = Report::Wait(wire::WaitReport {
                on: on.into_iter().map(Into::into).collect(),
            });
            // The status shows the wait. The coordinator does not evict a member of a ring that waits.
            let reported = coordinator.report(sender.next_origin_here(), report).await;
            known = reported.is_ok();
        }
    };
    let stop = CancellationToken::new();
    task::spawn_until(stop.clone(), tell);
    stop.drop_guard()
}

/// Waits until a list changes. Returns false once a part of the strategy has ended.
async fn any_changes(parts: &mut [Waits]) -> bool {
    let changes = parts.iter_mut().map(|part| Box::pin(part.change()));
    select_all(changes).await.0
}

fn all(parts: &mut [Waits]) -> Vec<Task> {
    let on: BTreeSet<Task> = parts.iter_mut().flat_map(Waits::seen).collect();
    on.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use shared_proto::ids::TaskId;

    #[tokio::test]
    async fn a_part_that_waits_for_nobody_does_not_hide_another() {
        let task = |index| Task {
            id: TaskId::worker(index),
            generation: Default::default(),
        };
        let (first, of_first) = watch::channel(Vec::new());
        let (second, of_second) = watch::channel(Vec::new());
        let mut parts = [Waits::always(of_first), Waits::always(of_second)];
        first.send_replace(vec![task(2)]);
        assert!(any_changes(&mut parts).await);
        assert_eq!(all(&mut parts), [task(2)]);
        second.send_replace(vec![task(1), task(2)]);
        assert!(any_changes(&mut parts).await);
        assert_eq!(all(&mut parts), [task(1), task(2)]);
        second.send_replace(Vec::new());
        assert!(any_changes(&mut parts).await);
        assert_eq!(all(&mut parts), [task(2)]);
        drop(second);
        assert!(!any_changes(&mut parts).await);
    }

    #[tokio::test]
    async fn a_wait_behind_a_computation_is_not_shown() {
        let task = Task {
            id: TaskId::worker(1),
            generation: Default::default(),
        };
        let (tell, on) = watch::channel(Vec::new());
        let (pulling, within) = watch::channel(false);
        let mut parts = [Waits::within(on, within)];
        tell.send_replace(vec![task]);
        assert!(any_changes(&mut parts).await);
        assert_eq!(all(&mut parts), []);
        pulling.send_replace(true);
        assert!(any_changes(&mut parts).await);
        assert_eq!(all(&mut parts), [task]);
        pulling.send_replace(false);
        assert!(any_changes(&mut parts).await);
        assert_eq!(all(&mut parts), []);
    }
}
