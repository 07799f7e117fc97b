//! Calls to the coordinator about the server's shard.

use std::sync::Arc;
use std::time::Duration;

use checkpoint::CheckpointError;
use daemon::membership::{Coordinator, Membership, MembershipError, Sender};
use shared_proto::blocks::ShardMap;
use shared_proto::wire;
use shared_proto::wire::report_request::Report;

use crate::error::PsError;
use crate::shard::Shard;

/// The interval at which counters are reported.
const REPORT_EVERY: Duration = Duration::from_secs(1);

/// Returns a future that reports the counters at regular intervals until it is dropped.
pub(crate) fn reports(
    shard: Arc<Shard>,
    membership: &Membership,
) -> impl Future<Output = ()> + Send + 'static {
    let (coordinator, sender) = (membership.coordinator.clone(), membership.sender());
    async move {
        let mut ticks = tokio::time::interval(REPORT_EVERY);
        loop {
            ticks.tick().await;
            report(&shard, &coordinator, &sender, false).await;
        }
    }
}

pub(crate) async fn fetch_map(membership: &Membership) -> Result<ShardMap, PsError> {
    let map = membership
        .coordinator
        .shard_map(membership.next_origin())
        .await?;
    Ok(ShardMap::try_from(map)?)
}

/// Reports to the coordinator the error that keeps this server from loading its shard. Does nothing if the server has
/// no shard, or if the shard's values do not come from a checkpoint.
pub(crate) async fn tell_of_silence(
    membership: &Membership,
    error: &CheckpointError,
) -> Result<(), PsError> {
    let map = fetch_map(membership).await?;
    let mut numbered = map.shards.iter().enumerate();
    let own = numbered.find(|(_, shard)| shard.server.task() == membership.task);
    let Some((shard, source)) = own.map(|(number, shard)| (number, &shard.source)) else {
        return Ok(());
    };
    if source.checkpoint.is_some() {
        let mut report = wire::RestoreReport {
            shard: shard as u32,
            epoch: source.epoch.0,
            error: error.to_string(),
            ..wire::RestoreReport::default()
        };
        report.set_failure(wire::RestoreFailure::Unavailable);
        send(membership, Report::Restore(report)).await?;
    }
    Ok(())
}

/// Sends the shard's counters to the coordinator. `last` is true if no report follows.
pub(crate) async fn report(shard: &Shard, coordinator: &Coordinator, sender: &Sender, last: bool) {
    let Some(store) = shard.followed().store else {
        return;
    };
    let counters = &shard.counters;
    let mut report = counters.report(store.shard, store.non_finite(), store.tables(), last);
    report.lookup_address = shard.lookup_address.get().cloned().unwrap_or_default();
    let report = Report::Shard(report);
    // The next report has the same counts, and the lease shows whether the coordinator is gone.
    let sent = coordinator.report(sender.next_origin_here(), report);
    if let Ok(Err(error)) = tokio::time::timeout(REPORT_EVERY, sent).await {
        tracing::debug!(%error, "could not report");
    }
}

pub(crate) async fn send(membership: &Membership, report: Report) -> Result<(), MembershipError> {
    let origin = membership.next_origin();
    membership.coordinator.report(origin, report).await
}
