//! Backup workers: a step counts the gradients that are ready first (Chen et al., "Revisiting Distributed Synchronous SGD", 2016,
//! section 3).
//!
//! In each step, each other member sends rank 0 one answer: its gradient is ready, it has no samples, or it is late. As
//! soon as all but `strategy.backup_workers` members have a gradient or no samples, and one has a gradient, rank 0
//! *closes* the step: it sends a signal to each other member. A member whose gradient is not ready then is late. Then
//! all members add up their gradients, and late members add zeros.
//!
//! The replica of a late member goes on with its pass. Meanwhile the member takes part in the sums of the next steps, and is late in each. It
//! keeps the mean gradients, and makes the updates once the pass is over. So all members make the same updates.

use std::cell::Cell;
use std::collections::VecDeque;
use std::future::pending;
use std::pin::{Pin, pin};
use std::time::Instant;

use futures_util::stream::{FuturesUnordered, StreamExt};
use replica::{Computed, Description, Mirror, Positions, Replica, ReplicaError, Step, StepsMade};
use shared_proto::ids::Clock;
use shared_proto::planted;
use shared_proto::step::Gradients;

use super::Mirrored;
use super::gradient::{self, SampleCounts, Total};
use super::open_step::{Answer, CLOSE};
use super::ring::{Lost, Ring};
use super::unpushed::Unpushed;
use crate::strategy::StrategyError;

/// The most steps that a member misses during one pass. After that the others wait for it.
const MOST_MISSED: usize = 8;

/// The number of late gradients in a row after which a member sits out a step, so that it begins the next step together
/// with the others.
const MOST_LATE_IN_A_ROW: u32 = 2;

/// The backup workers of a job, and the steps in which this member was late.
pub(super) struct Backup {
    /// The number of members that a step does not wait for.
    backups: usize,
    /// The mean gradients of the steps that the replica has not made yet, each with the clock of its step; `None` for a
    /// step that changes no values.
    missed: VecDeque<(Clock, Option<Vec<f32>>)>,
    /// The number of gradients in a row that were late.
    late_in_a_row: u32,
}

impl Backup {
    /// Creates the state for a job with `backups` backup workers. With 0, each step waits for all members.
    pub(super) fn new(backups: u32) -> Self {
        Self {
            backups: backups as usize,
            missed: VecDeque::new(),
            late_in_a_row: 0,
        }
    }

    /// Returns whether the job has backup workers.
    pub(super) fn has_some(&self) -> bool {
        self.backups > 0
    }

    /// Forgets a ring that is over.
    pub(super) fn forget(&mut self) {
        self.missed.clear();
        self.late_in_a_row = 0;
    }

    /// Records the outcome of the step at `clock`. `begun` is true if the replica has begun a pass for the step.
    fn note(&mut self, clock: Clock, outcome: Outcome, begun: bool) -> (Computed, Unpushed) {
        match outcome {
            Outcome::InTime(computed) => {
                self.late_in_a_row = 0;
                (computed, Unpushed::InMemory)
            }
            Outcome::Late(means) => {
                self.late_in_a_row = if begun { self.late_in_a_row + 1 } else { 0 };
                self.missed = (clock.0..).map(Clock).zip(means).collect();
                (Computed::late(), Unpushed::Late)
            }
        }
    }

    fn has_missed(&self, clock: Clock) -> bool {
        let next = self.missed.front();
        next.is_some_and(|(missed, _)| *missed == clock)
    }
}

/// What a member does while a step is open.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    /// It computes a gradient of this step, and then sends this answer.
    Computes(Answer),
    /// It goes on with the pass of an earlier step.
    IsLate,
    /// It computes nothing, and waits until the step is closed.
    SitsOut,
}

/// The result of a step that does not wait for the slowest members.
enum Outcome {
    /// The member's gradient counts.
    InTime(Computed),
    /// The member was late in one or more steps. The vector has their mean gradients.
    Late(Vec<Option<Vec<f32>>>),
}

impl Mirrored {
    /// Computes a step that does not wait for the slowest members. If this member is one of them, the result is marked
    /// as late and has no gradients, and [`Self::make_missed`] makes the update. `is_last` is true if the step may be
    /// the last one of a pass over the data.
    pub(super) async fn compute_unless_late(
        &mut self,
        positions: Positions,
        step: Step,
        is_last: bool,
        replica: &dyn Replica,
    ) -> Result<(Computed, Unpushed), StrategyError> {
        let backup = &self.backup;
        if backup.has_missed(step.clock) {
            return Ok((Computed::late(), Unpushed::Late));
        }
        // A member that was in time does not sit out, so each step has a gradient. In the last step it may have no samples.
        let sits_out = backup.late_in_a_row >= MOST_LATE_IN_A_ROW && !is_last;
        let (begun, backups) = (Cell::new(false), backup.backups);
        let worked_until = Cell::new(Instant::now());
        let pass = async {
            if sits_out {
                return pending().await;
            }
            begun.set(true);
            let computed = match positions.is_empty() {
                true => Ok(Computed::nothing()),
                false => replica.compute(positions, step).await,
            };
            worked_until.set(Instant::now());
            computed
        };
        let part = match (sits_out, positions.is_empty()) {
            (true, _) => Part::SitsOut,
            (false, true) => Part::Computes(Answer::NoSamples),
            (false, false) => Part::Computes(Answer::Ready),
        };
        let compute = async |ring: &Ring| {
            ring.pass_or_sums(backups, part, pin!(pass), &begun, replica.description())
                .await
        };
        let outcome = self.in_ring(compute).await??;
        let (mut computed, held) = self.backup.note(step.clock, outcome, begun.get());
        computed.waited = worked_until.get().elapsed();
        Ok((computed, held))
    }

    /// Makes a step in which this member was late, with the mean gradient of the others.
    pub(super) async fn make_missed(
        &mut self,
        clock: Clock,
        made: StepsMade,
        mirror: &dyn Mirror,
    ) -> Result<(), StrategyError> {
        let missed = self.backup.missed.pop_front();
        let Some((_, mean)) = missed.filter(|(missed, _)| *missed == clock) else {
            let why = "the ring of a late step is over";
            return Err(StrategyError::Abandoned(why.to_owned()));
        };
        match mean {
            Some(mean) if !planted!(MissedNotMade) => drop(mirror.update(mean.into(), made).await?),
            _ => mirror.note_made(made).await?,
        }
        Ok(())
    }
}

impl Ring {
    /// Waits for the pass of a step while the step is open. If the step is closed first, takes part in the sums of this
    /// step and the next ones until the pass is over.
    async fn pass_or_sums(
        &self,
        backups: usize,
        part: Part,
        mut pass: Pin<&mut impl Future<Output = Result<Computed, ReplicaError>>>,
        begun: &Cell<bool>,
        model: &Description,
    ) -> Result<Result<Outcome, ReplicaError>, Lost> {
        let own = self.while_open(backups, part, pass.as_mut());
        if let Some(computed) = own.await? {
            return Ok(computed.map(Outcome::InTime));
        }
        let mut means = Vec::new();
        loop {
            means.push(self.mean_of_others(model).await?);
            let over = if !begun.get() {
                break;
            } else if means.len() == MOST_MISSED {
                Some(pass.as_mut().await)
            } else {
                self.while_open(backups, Part::IsLate, pass.as_mut())
                    .await?
            };
            match over {
                Some(Ok(_)) => break,
                Some(Err(error)) => return Ok(Err(error)),
                None => {}
            }
        }
        Ok(Ok(Outcome::Late(means)))
    }

    /// Returns the mean gradient of a step in which this member is late.
    async fn mean_of_others(&self, model: &Description) -> Result<Option<Vec<f32>>, Lost> {
        let none = SampleCounts {
            samples: 0,
            counted: 0,
        };
        let mut vector = Vec::new();
        gradient::fill(&mut vector, &Gradients::none(), none, 0.0, model);
        let total = self.mean_gradient(&mut vector, none.counted).await?;
        Ok((total == Total::Mean).then_some(vector))
    }

    /// Waits for a pass while the present step is open. Returns `None` if the step is closed before the pass is over. Once a pass of the
    /// present step is over, this member gives its answer, and waits until the step is closed. Once a pass of an earlier step is over, this
    /// returns at once.
    async fn while_open(
        &self,
        backups: usize,
        part: Part,
        pass: Pin<&mut impl Future<Output = Result<Computed, ReplicaError>>>,
    ) -> Result<Option<Result<Computed, ReplicaError>>, Lost> {
        match part {
            Part::SitsOut => self.waits_for_others(),
            Part::Computes(_) | Part::IsLate => self.agreed.computing.set(true),
        }
        let over = match self.rank() {
            0 => self.close_with_enough(backups, part, pass).await,
            _ => self.until_closed(part, pass).await,
        };
        self.agreed.computing.set(false);
        self.agreed.open.waits.set(false);
        over
    }

    /// Waits for a pass while the present step is open, as a rank that does not close it.
    async fn until_closed(
        &self,
        part: Part,
        pass: Pin<&mut impl Future<Output = Result<Computed, ReplicaError>>>,
    ) -> Result<Option<Result<Computed, ReplicaError>>, Lost> {
        let mut closed = pin!(self.signal_of(0, |signal| (signal == CLOSE).then_some(())));
        let over = tokio::select! {
            biased;
            // First, so that no pass of a closed step begins.
            closed = &mut closed => closed.map(|()| None)?,
            over = pass => Some(over),
        };
        match (over, part) {
            (None, _) => {
                self.answer(Answer::Late).await?;
                Ok(None)
            }
            (Some(Ok(computed)), Part::Computes(answer)) => {
                self.answer(answer).await?;
                self.waits_for_others();
                closed.await?;
                Ok(Some(Ok(computed)))
            }
            (over, _) => Ok(over),
        }
    }

    /// Waits for a pass while the present step is open, as rank 0: closes the step once there are enough answers, and then waits for the rest
    /// of them.
    async fn close_with_enough(
        &self,
        backups: usize,
        part: Part,
        mut pass: Pin<&mut impl Future<Output = Result<Computed, ReplicaError>>>,
    ) -> Result<Option<Result<Computed, ReplicaError>>, Lost> {
        let open = &self.agreed.open;
        open.answers.borrow_mut().resize(self.ranks(), None);
        let answers = open.missing().into_iter().map(async |rank| {
            let answer = self.signal_of(rank, Answer::of_signal).await?;
            open.note(rank, answer);
            Ok::<_, Lost>(())
        });
        let mut answers: FuturesUnordered<_> = answers.collect();
        let mut own = None;
        while !open.has_enough(backups) {
            tokio::select! {
                biased;
                // First, so that no pass of a step begins that can be closed.
                Some(noted) = answers.next() => noted?,
                over = pass.as_mut(), if own.is_none() => match (over, part) {
                    (Ok(computed), Part::Computes(answer)) => {
                        open.note(0, answer);
                        own = Some(computed);
                        self.waits_for_others();
                    }
                    (over, _) => return Ok(Some(over)),
                },
                // All have answered, and none has a gradient.
                else => break,
            }
        }
        for rank in 1..self.ranks() {
            self.play(self.group.send_signal(rank, CLOSE)).await?;
        }
        self.waits_for_others();
        while let Some(noted) = answers.next().await {
            noted?;
        }
        open.answers.borrow_mut().clear();
        Ok(own.map(Ok))
    }

    /// Records that this member waits for others, not for its own pass.
    fn waits_for_others(&self) {
        self.agreed.computing.set(false);
        self.agreed.open.waits.set(true);
    }
}
