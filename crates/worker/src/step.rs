//! The training step: input, pull, compute, push, as steps 1 to 4 of the data's way.

use std::time::{Duration, Instant};

use ps_client::ClientError;
use shared_proto::ids::Clock;
use shared_proto::job::NonFinite;
use shared_proto::wire;

use crate::counters::{Counters, Times};
use crate::error::WorkerError;
use crate::replica::{Positions, Replica};
use crate::strategy::Strategy;

/// A finished step.
pub(crate) struct Finished {
    pub(crate) samples: u64,
    pub(crate) loss: f64,
    /// True if its gradient was NaN or infinite and was left out.
    pub(crate) skipped: bool,
    pub(crate) times: Times,
    /// Sync mode: the receipts of the shards that hold its gradient.
    pub(crate) receipts: Vec<wire::ShardReceipt>,
}

/// Makes the step after `clock` with the samples at `positions`.
pub(crate) async fn step(
    replica: &impl Replica,
    strategy: &mut impl Strategy,
    counters: &Counters,
    clock: Clock,
    positions: Positions,
    non_finite: NonFinite,
) -> Result<Finished, WorkerError> {
    replica.prepare(positions).await;

    let asked = Instant::now();
    let take_in = async |blocks| replica.take_in(blocks).await;
    let answered = strategy.pull(clock, take_in).await?;
    let pulled = asked.elapsed();
    // The weights were asked for before this step began, so a part of the wait may lie before it.
    let wait = answered.waited.min(pulled);

    let asked = Instant::now();
    let computed = replica.compute().await?;
    let compute = asked.elapsed();

    let handed_over = Instant::now();
    let pushed = strategy.push(clock, &computed.gradients).await;
    let (skipped, receipts) = match pushed {
        Err(error @ ClientError::NonFinite { .. }) if non_finite == NonFinite::Skip => {
            counters.skipped.increment(1);
            tracing::warn!("{error}; the step is left out");
            (true, Vec::new())
        }
        pushed => (false, pushed?.receipts),
    };

    let times = Times {
        pull: pulled.saturating_sub(wait),
        compute,
        push: handed_over.elapsed(),
        wait,
    };
    let samples = positions.end - positions.start;
    counters.step(samples, computed.loss, computed.gradients.norm, &times);
    counters.clock.set(clock.next().0 as f64);
    Ok(Finished {
        samples,
        // A NaN would spoil the sum of all steps' losses.
        loss: if skipped { 0.0 } else { computed.loss },
        skipped,
        times,
        receipts,
    })
}

/// Returns the times of a period without work.
pub(crate) fn idle(took: Duration) -> Times {
    Times {
        wait: took,
        ..Times::default()
    }
}
