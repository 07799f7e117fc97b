//! News between the coordinator and the sessions with servers: shard maps and lost updates.

use std::time::Duration;

use daemon::membership::Membership;
use metrics::counter;
use ps_client::{Loss, MapSource};
use shared_proto::blocks::ShardMap;
use shared_proto::wire;
use shared_proto::wire::report_request::Report;
use tokio::sync::mpsc;

/// The number of losses that may wait to be reported.
pub(super) const LOSSES: usize = 64;

/// The pause between two requests for the shard map.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// Fetches the shard map when the present one fails, or when an answer of the coordinator names a newer epoch.
pub(super) fn fetch_maps(
    membership: &Membership,
    source: MapSource,
) -> impl Future<Output = ()> + use<> {
    let coordinator = membership.coordinator.clone();
    let sender = membership.sender();
    let mut newest = sender.newest_epoch();
    async move {
        loop {
            let epoch = source.epoch();
            tokio::select! {
                biased;
                _ = newest.wait_for(|newest| *newest > epoch) => {}
                () = source.wanted() => {}
            }
            let map = coordinator.shard_map(sender.next_origin_here()).await;
            match map.map(ShardMap::try_from) {
                Ok(Ok(map)) => source.publish(map),
                Ok(Err(error)) => tracing::warn!("the shard map cannot be read: {error}"),
                Err(error) => tracing::debug!("the shard map cannot be fetched: {error}"),
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }
}

/// Reports updates that were lost with a server to the coordinator.
pub(super) fn tell_losses(
    membership: &Membership,
    mut losses: mpsc::Receiver<Loss>,
) -> impl Future<Output = ()> + use<> {
    let coordinator = membership.coordinator.clone();
    let sender = membership.sender();
    async move {
        let counted = counter!("flambeau_worker_lost_updates_total");
        while let Some(loss) = losses.recv().await {
            let (shard, lost) = (loss.shard, loss.lost);
            counted.increment(lost.updates);
            let mut origin = sender.next_origin_here();
            origin.epoch = loss.epoch;
            let report = Report::Lost(wire::LostReport {
                shard,
                updates: lost.updates,
                first_step: lost.first.0,
                last_step: lost.last.0,
            });
            match coordinator.report(origin, report).await {
                // If the session no longer waits, it has ended.
                Ok(()) => drop(loss.told.send(())),
                Err(error) => tracing::warn!(shard, "losses could not be reported: {error}"),
            }
        }
    }
}
