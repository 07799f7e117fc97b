//! Reports finished steps to the coordinator while training continues. Steps that finish while a report is
//! under way are added to the next one. Most reports need no reply ([`StepReports`]).

use std::sync::Arc;
use std::time::Duration;

use daemon::membership::{Membership, MembershipError, Sender, StepReports};
use parking_lot::Mutex;
use shared_proto::ids::{Clock, Epoch};
use shared_proto::job::{Job, Mode};
use shared_proto::task;
use shared_proto::wire;
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::error::WorkerError;
use crate::step_report::{StepReport, Times};
use crate::strategy::Reconciled;

/// The least time between two reports in async mode. Steps that finish meanwhile are added together. In bounded mode
/// there is no pause, because other workers may wait for each step.
const PAUSE: Duration = Duration::from_millis(10);

/// A worker's progress in a split.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SplitProgress {
    pub(crate) clock: Clock,
    pub(crate) split: u64,
    pub(crate) position: u64,
}

/// The training's side, which hands in finished steps.
pub(crate) struct Reporter {
    pending: Arc<Mutex<Pending>>,
    /// The work in the newest answer.
    work: Arc<Mutex<Option<wire::LeaseWorkReply>>>,
    handed_in: watch::Sender<HandedIn>,
    /// The number of steps with an answered report, or the error of a report that failed.
    answered: watch::Receiver<Result<u64, String>>,
    failure: Arc<Mutex<Option<WorkerError>>>,
    _stop: DropGuard,
}

/// Numbers of steps, counted from the reporter's start.
#[derive(Clone, Copy, Debug, Default)]
struct HandedIn {
    steps: u64,
    /// A caller of [`Reporter::flush`] waits until this number of steps is answered.
    awaited: u64,
}

#[derive(Default)]
struct Pending {
    place: Option<SplitProgress>,
    steps: u64,
    samples: u64,
    skipped: u64,
    late: u64,
    loss_sum: f64,
    times: Times,
    /// The proofs of the newest step. In sync mode a report has one step.
    receipts: Vec<wire::ShardReceipt>,
    /// True if the answer may contain the next work.
    wants_work: bool,
}

impl Reporter {
    /// Starts to report.
    pub(crate) fn start(
        job: &Job,
        membership: &Membership,
        reconciled: Box<dyn Reconciled>,
    ) -> Self {
        let strategy = &job.strategy;
        let pending = Arc::<Mutex<Pending>>::default();
        let work = Arc::<Mutex<Option<wire::LeaseWorkReply>>>::default();
        let failure = Arc::<Mutex<Option<WorkerError>>>::default();
        let (handed_in, counts) = watch::channel(HandedIn::default());
        let (tell, answered) = watch::channel(Ok(0));
        let stop = CancellationToken::new();
        let reports = Reports {
            steps: membership.step_reports(),
            sender: membership.sender(),
            reconciled,
            waits: strategy.mode == Mode::Sync || strategy.name.has_ring(),
            pause: match strategy.mode {
                Mode::Async => PAUSE,
                Mode::Bounded | Mode::Sync => Duration::ZERO,
            },
            pushes: 0,
            pending: Arc::clone(&pending),
            work: Arc::clone(&work),
            failure: Arc::clone(&failure),
        };
        task::spawn_until(stop.clone(), reports.send_all(counts, tell));
        Self {
            pending,
            work,
            handed_in,
            answered,
            failure,
            _stop: stop.drop_guard(),
        }
    }

    /// Adds a finished step to the next report. `wants_work` is true if the step is the last of its split and the
    /// worker is in no ring.
    pub(crate) fn finished(&self, place: SplitProgress, step: StepReport, wants_work: bool) {
        {
            let mut pending = self.pending.lock();
            pending.place = Some(place);
            pending.steps += 1;
            pending.samples += step.samples;
            pending.skipped += u64::from(step.skipped && step.reports_skip);
            pending.late += u64::from(step.late);
            // A NaN would spoil the sum of all steps' losses.
            pending.loss_sum += if step.skipped { 0.0 } else { step.loss };
            pending.times.add(&step.times);
            pending.receipts = step.receipts;
            pending.wants_work = wants_work;
        }
        self.handed_in.send_modify(|handed_in| handed_in.steps += 1);
    }

    /// Adds time between steps to the next report.
    pub(crate) fn waited(&self, times: &Times) {
        self.pending.lock().times.add(times);
    }

    /// Waits until all steps that were handed in are answered.
    pub(crate) async fn flush(&mut self) -> Result<(), WorkerError> {
        let steps = self.handed_in.borrow().steps;
        self.handed_in
            .send_modify(|handed_in| handed_in.awaited = steps);
        let done = |answered: &Result<u64, String>| match answered {
            Ok(count) => *count >= steps,
            Err(_) => true,
        };
        let failed = match self.answered.wait_for(done).await {
            Ok(answered) => answered.clone().err(),
            Err(_) => Some("the reporter has ended".to_owned()),
        };
        failed.map_or(Ok(()), |reason| Err(error_of(&self.failure, reason)))
    }

    /// Returns the work that the coordinator has given with its newest answer.
    pub(crate) fn take_work(&self) -> Option<wire::LeaseWorkReply> {
        self.work.lock().take()
    }

    /// Returns a future that waits until a report fails, and then returns the error.
    pub(crate) fn failed(&self) -> impl Future<Output = WorkerError> + use<> {
        let (mut answered, failure) = (self.answered.clone(), Arc::clone(&self.failure));
        async move {
            let failed = answered.wait_for(Result::is_err).await;
            let reason = failed.ok().and_then(|answered| answered.clone().err());
            error_of(
                &failure,
                reason.unwrap_or_else(|| "the reporter has ended".to_owned()),
            )
        }
    }
}

/// Returns the error of a report that has failed for this reason.
fn error_of(failure: &Mutex<Option<WorkerError>>, reason: String) -> WorkerError {
    let error = failure.lock().take();
    error.unwrap_or(MembershipError::Refused(reason).into())
}

/// The side of the task that sends the reports.
struct Reports {
    steps: StepReports,
    sender: Sender,
    reconciled: Box<dyn Reconciled>,
    /// True if each report waits for its reply, as in sync mode and in rings, where workers make each step together.
    waits: bool,
    pause: Duration,
    /// The number of reported steps with pushed gradients.
    pushes: u64,
    pending: Arc<Mutex<Pending>>,
    work: Arc<Mutex<Option<wire::LeaseWorkReply>>>,
    failure: Arc<Mutex<Option<WorkerError>>>,
}

impl Reports {
    async fn send_all(
        mut self,
        mut counts: watch::Receiver<HandedIn>,
        tell: watch::Sender<Result<u64, String>>,
    ) {
        let mut answered = 0;
        let mut next = Instant::now();
        loop {
            // Biased, so that simulations can be repeated.
            let ended = tokio::select! {
                biased;
                () = self.steps.ended(), if !self.steps.are_confirmed() => true,
                changed = counts.changed() => match changed {
                    Ok(()) => false,
                    Err(_) => return,
                },
            };
            if !ended {
                let hurries = counts.wait_for(|handed_in| handed_in.awaited > answered);
                let _ = timeout_at(next, hurries).await;
            }
            next = Instant::now() + self.pause;
            let HandedIn { steps, awaited } = *counts.borrow_and_update();
            let pending = std::mem::take(&mut *self.pending.lock());
            let awaited = ended || awaited > answered;
            let sent = match pending.place {
                Some(place) => self.send(place, pending, awaited).await,
                // The report before may have included the steps of this count.
                None if awaited => self.confirm().await,
                None => Ok(()),
            };
            if let Err(error) = sent {
                let reason = error.to_string();
                *self.failure.lock() = Some(error);
                let _ = tell.send(Err(reason));
                return;
            }
            if self.steps.are_confirmed() {
                answered = steps;
                let _ = tell.send(Ok(answered));
            }
        }
    }

    /// Reports finished steps. If `awaited`, asks for a reply in any case.
    async fn send(
        &mut self,
        place: SplitProgress,
        pending: Pending,
        awaited: bool,
    ) -> Result<(), WorkerError> {
        let origin = self.sender.next_origin(Epoch(0), place.clock);
        self.pushes += pending.steps - pending.skipped - pending.late;
        let times = pending.times;
        let request = wire::FinishStepRequest {
            split: place.split,
            position: place.position,
            steps: pending.steps,
            samples: pending.samples,
            skipped: pending.skipped,
            late: pending.late,
            loss_sum: pending.loss_sum,
            receipts: pending.receipts,
            wants_work: pending.wants_work,
            pushes: self.pushes,
            times: Some(wire::StepTimes {
                pull: times.pull.as_secs_f64(),
                compute: times.compute.as_secs_f64(),
                push: times.push.as_secs_f64(),
                wait: times.wait.as_secs_f64(),
            }),
            origin: Some(origin.into()),
            ..wire::FinishStepRequest::default()
        };
        let wants_reply = awaited || self.waits || request.wants_work;
        self.report(request, wants_reply).await
    }

    /// Sends the newest report again, if it has no reply, and waits for one.
    async fn confirm(&mut self) -> Result<(), WorkerError> {
        match self.steps.unconfirmed() {
            Some(request) => self.report(request, true).await,
            None => Ok(()),
        }
    }

    /// Makes a report in the epoch in which the strategy has reconciled. If the coordinator has a newer epoch, waits
    /// until the strategy has reconciled there, and reports again.
    async fn report(
        &mut self,
        mut request: wire::FinishStepRequest,
        wants_reply: bool,
    ) -> Result<(), WorkerError> {
        loop {
            let epoch = self.reconciled.epoch();
            if let Some(origin) = &mut request.origin {
                origin.epoch = epoch.0;
            }
            match self.steps.report(request.clone(), wants_reply).await {
                Ok(Some(reply)) => {
                    self.sender.heard(Epoch(reply.epoch));
                    *self.work.lock() = reply.work;
                    return Ok(());
                }
                Ok(None) => return Ok(()),
                Err(MembershipError::Outdated(_)) => {
                    let newer = self.sender.must_move_beyond(epoch);
                    self.reconciled.await_epoch(newer).await?;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
}
