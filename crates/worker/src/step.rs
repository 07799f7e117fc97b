//! The training step: input, pull, compute, push, as steps 1 to 4 of the data path.

use std::time::Duration;

use replica::{Positions, Prepared, Replica, Step};
use shared_proto::ids::Clock;
use shared_proto::job::{NonFinite, StageGroups};
use shared_proto::step::Gradients;
use tokio::time::Instant;

use crate::counters::Counters;
use crate::error::WorkerError;
use crate::step_report::{StepReport, Times};
use crate::strategy::{Pushed, Pushing, Strategy, StrategyError};

/// The place of a step in a job.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlaceOfStep {
    /// The number of steps before it.
    clock: Clock,
    /// The index of the worker.
    rank: u32,
    /// The worker's place in its stage group.
    in_group: u32,
    /// The number of workers in the group. They compute the same samples, and each reports a share of them.
    group: u32,
}

impl PlaceOfStep {
    /// Returns the place of a step for the worker with this index, which has this rank in its ring.
    pub(crate) fn new(clock: Clock, index: u32, groups: StageGroups, rank: u32) -> Self {
        Self {
            clock,
            rank: index,
            in_group: groups.place(rank),
            group: groups.workers,
        }
    }

    /// Returns how many of `samples` computed samples this worker reports.
    fn reported(&self, samples: u64) -> u64 {
        let before = |place: u32| samples * u64::from(place) / u64::from(self.group);
        before(self.in_group + 1) - before(self.in_group)
    }
}

/// A step with gradients that are not pushed yet.
pub(crate) struct ComputedStep {
    clock: Clock,
    positions: Positions,
    gradients: Gradients,
    report: StepReport,
}

/// A step with an unacknowledged push.
pub(crate) struct PushedStep {
    /// The position in the split after the step.
    pub(crate) end: u64,
    pub(crate) report: StepReport,
    pub(crate) pushing: Pushing,
}

/// Pulls what a prepared batch wants, and computes the gradients of a step. `next` is the batch of the next step, if it
/// is known.
pub(crate) async fn compute(
    replica: &dyn Replica,
    strategy: &mut dyn Strategy,
    place: PlaceOfStep,
    batch: &mut Prepared,
    next: Option<&mut Prepared>,
) -> Result<ComputedStep, WorkerError> {
    let asked = Instant::now();
    let PlaceOfStep { clock, rank, .. } = place;
    let answered = strategy.pull(clock, batch, replica).await?;
    let pulled = asked.elapsed();
    // The weights were asked for before this step began, so a part of the wait may lie before it.
    let wait = answered.waited.min(pulled);

    let asked = Instant::now();
    let positions = batch.positions();
    let step = Step { clock, rank };
    let computed = strategy.compute(positions, step, next, replica).await?;
    let waited = computed.waited;
    let reported = if computed.late {
        0
    } else {
        positions.samples()
    };
    Ok(ComputedStep {
        clock,
        positions,
        report: StepReport {
            samples: place.reported(reported),
            loss: computed.loss,
            norm: computed.gradients.norm,
            skipped: false,
            reports_skip: place.in_group == 0,
            late: computed.late,
            times: Times {
                pull: pulled.saturating_sub(wait),
                compute: asked.elapsed().saturating_sub(waited),
                push: waited,
                wait,
            },
            receipts: Vec::new(),
        },
        gradients: computed.gradients,
    })
}

/// Pushes the gradients of a step. `next` is the batch of the next step, if it is known.
pub(crate) async fn push(
    replica: &dyn Replica,
    strategy: &mut dyn Strategy,
    counters: &Counters,
    step: ComputedStep,
    next: Option<&mut Prepared>,
    non_finite: NonFinite,
) -> Result<PushedStep, WorkerError> {
    let ComputedStep {
        clock,
        positions,
        gradients,
        mut report,
    } = step;
    let handed_over = Instant::now();
    let pushed = strategy.push(clock, gradients, positions.samples(), next, replica);
    let pushing = match pushed.await {
        Err(StrategyError::NonFinite(error)) if non_finite == NonFinite::Skip => {
            counters.skipped.increment(1);
            tracing::warn!("{error}; the step is left out");
            report.skipped = true;
            Pushing::done(Pushed::default())
        }
        pushed => pushed?,
    };
    report.times.push += handed_over.elapsed();
    counters.late.increment(report.late.into());
    Ok(PushedStep {
        end: positions.end,
        report,
        pushing,
    })
}

/// Returns the times of a period without work.
pub(crate) fn idle(took: Duration) -> Times {
    Times {
        wait: took,
        ..Times::default()
    }
}
