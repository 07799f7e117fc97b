//! The training step: input, pull, compute, push, as steps 1 to 4 of the data path.

use std::time::{Duration, Instant};

use shared_proto::ids::Clock;
use shared_proto::job::NonFinite;
use shared_proto::step::EVERY_BATCH;
use shared_proto::wire;

use crate::counters::{Counters, Times};
use crate::error::WorkerError;
use crate::replica::{Prepared, Replica, Step};
use crate::strategy::{Pushed, Strategy, StrategyError};

/// A finished step.
pub(crate) struct Finished {
    pub(crate) samples: u64,
    pub(crate) loss: f64,
    /// True if its gradient was NaN or infinite and was left out.
    pub(crate) skipped: bool,
    pub(crate) times: Times,
    /// Sync mode: the proofs that its gradient is held where the step needs it.
    pub(crate) receipts: Vec<wire::ShardReceipt>,
}

/// Makes the step after `clock` with a prepared batch, as the worker of number `rank`. `next` is the batch of the step after it, if it is known.
pub(crate) async fn step(
    replica: &dyn Replica,
    strategy: &mut dyn Strategy,
    counters: &Counters,
    (clock, rank): (Clock, u32),
    batch: &mut Prepared,
    next: Option<&mut Prepared>,
    non_finite: NonFinite,
) -> Result<Finished, WorkerError> {
    let asked = Instant::now();
    let wants = batch.wants().await;
    let answered = strategy.pull(clock, wants, replica).await?;
    let pulled = asked.elapsed();
    // The weights were asked for before this step began, so a part of the wait may lie before it.
    let wait = answered.waited.min(pulled);

    let asked = Instant::now();
    let positions = batch.positions();
    let step = Step { clock, rank };
    let computed = strategy.compute(positions, step, replica).await?;
    let compute = asked.elapsed();

    let handed_over = Instant::now();
    let norm = computed.gradients.norm;
    let next = match next {
        Some(next) => next.wants().await,
        None => EVERY_BATCH,
    };
    let samples = positions.samples();
    let pushed = strategy.push(clock, computed.gradients, samples, next, replica);
    let pushed = pushed.await;
    let (skipped, pushed) = match pushed {
        Err(StrategyError::NonFinite(error)) if non_finite == NonFinite::Skip => {
            counters.skipped.increment(1);
            tracing::warn!("{error}; the step is left out");
            (true, Pushed::default())
        }
        pushed => (false, pushed?),
    };

    let times = Times {
        pull: pulled.saturating_sub(wait),
        compute,
        push: handed_over.elapsed(),
        wait,
    };
    counters.step(samples, computed.loss, norm, &times);
    counters.clock.set(clock.next().0 as f64);
    Ok(Finished {
        samples,
        // A NaN would spoil the sum of all steps' losses.
        loss: if skipped { 0.0 } else { computed.loss },
        skipped,
        times,
        receipts: pushed.receipts,
    })
}

/// Returns the times of a period without work.
pub(crate) fn idle(took: Duration) -> Times {
    Times {
        wait: took,
        ..Times::default()
    }
}
