//! The step with an unacknowledged push. The worker reports the step once the servers have acknowledged it, and pushes no other
//! gradients before. With `strategy.pipeline = 1` it computes the next step meanwhile.

use std::pin::{Pin, pin};

use shared_proto::ids::Clock;
use tokio::time::Instant;

use crate::error::WorkerError;
use crate::step::PushedStep;
use crate::step_report::StepReport;
use crate::strategy::{Pushed, StrategyError};

/// A step that is pushed and not finished, if there is one.
pub(crate) struct Unfinished<R> {
    /// The number of finished steps.
    clock: Clock,
    step: Option<PushedStep>,
    /// Ready with an error once steps no longer count.
    failed: Pin<Box<dyn Future<Output = WorkerError>>>,
    /// Reports a finished step: the number of finished steps including this one, the step, and the position in the
    /// split after it.
    report: R,
}

impl<R: FnMut(Clock, StepReport, u64)> Unfinished<R> {
    /// Creates the state of a worker without a pushed step, after `clock` finished steps. `failed` is ready once finished steps do not
    /// count.
    pub(crate) fn none(
        clock: Clock,
        failed: impl Future<Output = WorkerError> + 'static,
        report: R,
    ) -> Self {
        Self {
            clock,
            step: None,
            failed: Box::pin(failed),
            report,
        }
    }

    /// Returns the clock of the step that is computed next.
    pub(crate) fn next_clock(&self) -> Clock {
        match self.step {
            Some(_) => self.clock.next(),
            None => self.clock,
        }
    }

    /// Takes a step that is pushed. The step before must be finished.
    pub(crate) fn pushed(&mut self, step: PushedStep) {
        debug_assert!(self.step.is_none(), "at most one push is unacknowledged");
        self.step = Some(step);
    }

    /// Does `work`, and finishes the step before if its gradients are acknowledged meanwhile.
    ///
    /// # Errors
    /// The error of `work`; the strategy's, if the step before does not count; or an error because an earlier step, and
    /// so each later one, does not count.
    pub(crate) async fn meanwhile<T>(
        &mut self,
        work: impl Future<Output = Result<T, WorkerError>>,
    ) -> Result<T, WorkerError> {
        let mut work = pin!(work);
        loop {
            tokio::select! {
                biased;
                pushed = acknowledged(&mut self.step), if self.step.is_some() => {
                    let (step, pushed) = pushed?;
                    self.report(step, pushed);
                }
                done = &mut work => return done,
                error = &mut self.failed => return Err(error),
            }
        }
    }

    /// Waits until the gradients of the step are acknowledged, and finishes it. The wait counts as time of the step's push.
    ///
    /// # Errors
    /// The strategy's, if the step does not count; or the error of an earlier step, because no step after that one
    /// counts.
    pub(crate) async fn finish(&mut self) -> Result<(), WorkerError> {
        if self.step.is_none() {
            return Ok(());
        }
        let began = Instant::now();
        let (mut step, pushed) = tokio::select! {
            biased;
            pushed = acknowledged(&mut self.step) => pushed?,
            error = &mut self.failed => return Err(error),
        };
        step.report.times.push += began.elapsed();
        self.report(step, pushed);
        Ok(())
    }

    fn report(&mut self, step: PushedStep, pushed: Pushed) {
        self.clock = self.clock.next();
        let mut report = step.report;
        report.receipts = pushed.receipts;
        (self.report)(self.clock, report, step.end);
    }
}

/// Waits until the gradients of the pushed step are acknowledged or refused, and moves the step out of `step`. Waits
/// for ever if `step` is none.
async fn acknowledged(
    step: &mut Option<PushedStep>,
) -> Result<(PushedStep, Pushed), StrategyError> {
    let result = match step {
        Some(step) => step.pushing.acknowledged().await,
        None => std::future::pending().await,
    };
    match step.take() {
        Some(step) => Ok((step, result?)),
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::future::pending;

    use tokio::sync::oneshot;

    use super::*;
    use crate::step_report::Times;
    use crate::strategy::Pushing;

    /// Returns a step up to a position, and the sender of its acknowledgement.
    fn step(end: u64) -> (PushedStep, oneshot::Sender<Result<(), StrategyError>>) {
        let (acknowledge, acknowledged) = oneshot::channel::<Result<(), StrategyError>>();
        let step = PushedStep {
            end,
            report: StepReport {
                samples: 2,
                loss: 0.5,
                norm: 1.0,
                skipped: false,
                reports_skip: true,
                late: false,
                times: Times::default(),
                receipts: Vec::new(),
            },
            pushing: Pushing::until(async {
                let acknowledged = acknowledged.await.unwrap();
                acknowledged.map(|()| Pushed::default())
            }),
        };
        (step, acknowledge)
    }

    /// Lets the other tasks of the thread run.
    async fn a_moment() -> Result<u32, WorkerError> {
        for _ in 0..9 {
            tokio::task::yield_now().await;
        }
        Ok(7)
    }

    #[tokio::test]
    async fn a_step_is_reported_while_the_next_one_is_computed_once_it_is_acknowledged() {
        let reported = RefCell::new(Vec::new());
        let report = |clock: Clock, _, position| reported.borrow_mut().push((clock.0, position));
        let mut unfinished = Unfinished::none(Clock(4), pending(), report);
        assert_eq!(unfinished.next_clock(), Clock(4));
        unfinished.finish().await.unwrap();

        let (one, acknowledge) = step(32);
        unfinished.pushed(one);
        // The next step is computed with the clock behind this one, which is not reported yet.
        assert_eq!(unfinished.next_clock(), Clock(5));
        assert_eq!(unfinished.meanwhile(a_moment()).await.unwrap(), 7);
        assert!(reported.borrow().is_empty());

        acknowledge.send(Ok(())).unwrap();
        let computing = async {
            a_moment().await?;
            let reported = reported.borrow().clone();
            Ok(reported)
        };
        let meanwhile = unfinished.meanwhile(computing).await.unwrap();
        assert_eq!(meanwhile, [(5, 32)], "it is reported before the work ends");
        assert_eq!(unfinished.next_clock(), Clock(5));
    }

    #[tokio::test]
    async fn each_step_is_reported_once_and_in_order() {
        let reported = RefCell::new(Vec::new());
        let report = |clock: Clock, step: StepReport, position| {
            assert!(step.times.push.as_millis() >= 20, "the wait counts");
            reported.borrow_mut().push((clock.0, position));
        };
        let mut unfinished = Unfinished::none(Clock(0), pending(), report);
        for position in [3, 6] {
            let (one, acknowledge) = step(position);
            unfinished.pushed(one);
            let finish = unfinished.finish();
            let acknowledged = async {
                tokio::time::sleep(std::time::Duration::from_millis(20)).await;
                acknowledge.send(Ok(())).unwrap();
            };
            let (finished, ()) = tokio::join!(finish, acknowledged);
            finished.unwrap();
        }
        assert_eq!(*reported.borrow(), [(1, 3), (2, 6)]);
    }

    #[tokio::test]
    async fn a_step_that_does_not_count_ends_the_next_one() {
        let report = |_, _, _| panic!("it does not count");
        let lost = || StrategyError::Abandoned("lost".to_owned());
        let mut unfinished = Unfinished::none(Clock(0), pending(), report);
        let (one, acknowledge) = step(3);
        unfinished.pushed(one);
        assert!(acknowledge.send(Err(lost())).is_ok());
        let endless = pending::<Result<(), WorkerError>>();
        let error = unfinished.meanwhile(endless).await.unwrap_err();
        assert!(error.to_string().contains("lost"), "{error}");

        // The reports of earlier steps are refused.
        let refused = async { WorkerError::from(StrategyError::Abandoned("refused".to_owned())) };
        let mut unfinished = Unfinished::none(Clock(0), refused, report);
        let (one, _acknowledge) = step(3);
        unfinished.pushed(one);
        let error = unfinished.finish().await.unwrap_err();
        assert!(error.to_string().contains("refused"), "{error}");
    }
}
