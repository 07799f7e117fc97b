//! The ring of a job without servers: the workers that make each step together. Each has all values, so a step is made
//! once all members have added up their gradients.
//!
//! If a member is lost within a step, some others may have the sum of the gradients already, and the rest cannot get it. So
//! each member joins the next ring with the number of steps that its values have, and the highest number counts: a step
//! that one of them has made is made, and the others take the values of that member. A step that none has made is
//! abandoned by all, and its data is leased again. A member that reports a step and dies before another member has
//! made it has not made it.

use std::time::Instant;

use serde::{Deserialize, Serialize};
use shared_proto::ids::{Clock, Epoch, Origin, Role, Task, TaskId};
use shared_proto::refusal::{Reason, Refusal};
use shared_proto::view::JobPhase;
use shared_proto::wire;

use super::Cluster;
use super::admission::not_leased;
use super::checkpoints::DurableCheckpoint;
use super::ledger::{HELD_BY_ALL, Split};
use super::training::{MOST_BATCHES, Work};

/// The ring that is formed, or being formed.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Ring {
    /// Grows each time that a ring is broken. It is the epoch of all calls of the members.
    pub(super) number: Epoch,
    /// The members in rank order. While a ring is being formed: those of the one before that are live, and those that have
    /// asked to join.
    members: Vec<RingMember>,
    formed: bool,
    /// The number of steps that the values had when the ring was formed.
    clock: Clock,
    source: usize,
    broadcast: bool,
    /// The checkpoint from which the source loads the values: its location, its number, and the run that wrote it.
    from: Option<(String, u64, String)>,
    /// Values of rings before this one are of steps that were dropped when the job went back to a checkpoint.
    valid_since: Epoch,
    /// The steps that the members make at present.
    span: Option<Span>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct RingMember {
    task: Task,
    /// True once it has asked to join the ring that is being formed.
    joined: bool,
    /// The number of steps that its values have, according to its request; none if it has no values.
    values: Option<Clock>,
    /// The number of steps that it has made.
    made: Clock,
    /// The member that it could not exchange numbers with.
    lost: Option<Task>,
}

/// Consecutive steps, of which all members have the data together.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Span {
    split: Split,
    /// The clock before the first step.
    first: Clock,
    steps: u64,
    /// Samples of a step.
    size: u64,
}

impl Span {
    /// Returns the clock after the last step.
    fn end(&self) -> Clock {
        Clock(self.first.0.saturating_add(self.steps))
    }

    /// Returns the position after the steps before this clock.
    fn position(&self, clock: Clock) -> u64 {
        let made = clock.0.saturating_sub(self.first.0);
        let samples = made.saturating_mul(self.size);
        self.split.start.saturating_add(samples).min(self.split.end)
    }
}

impl Ring {
    fn member(&self, task: Task) -> Option<&RingMember> {
        self.members.iter().find(|member| member.task == task)
    }

    /// Returns the number of steps that all members of the formed ring have made.
    fn made_by_all(&self) -> Clock {
        let made = self.members.iter().map(|member| member.made);
        made.min().unwrap_or(self.clock)
    }

    /// Returns the members that the others wait for: those that have not joined, or have made the fewest steps of the span.
    /// `waits` returns whether a member itself waits for another.
    fn slowest(&self, waits: impl Fn(&Task) -> bool) -> Vec<Task> {
        let made = self.made_by_all();
        let is_slow = |member: &&RingMember| match self.formed {
            true => self.span.is_some() && member.made <= made && !waits(&member.task),
            false => !member.joined,
        };
        let slow = self.members.iter().filter(is_slow);
        slow.map(|member| member.task).collect()
    }

    /// Checks that the parts fit together.
    ///
    /// # Errors
    /// Describes the impossible value.
    pub(super) fn check(&self) -> Result<(), String> {
        let ranks = self.members.len();
        if self.formed && self.source >= ranks {
            return Err(format!("rank {} of {ranks} has the values", self.source));
        }
        match &self.span {
            Some(span) if span.size == 0 || span.split.start > span.split.end => {
                Err("the ring's steps have no samples".to_owned())
            }
            _ => Ok(()),
        }
    }
}

/// The answer to a worker that asks to join.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Joined {
    Ring(wire::Ring),
    /// It waits for what the text names.
    Pending(String),
    Ended,
}

impl Cluster {
    /// Returns whether the workers form a ring.
    pub(super) fn has_ring(&self) -> bool {
        !self.job.strategy.name.has_servers()
    }

    /// Returns the role of the members that write checkpoints.
    pub(crate) fn writer_role(&self) -> Role {
        match self.has_ring() {
            true => Role::Worker,
            false => Role::Ps,
        }
    }

    /// Returns whether the workers are to form another ring.
    pub(super) fn is_ring_broken(&self) -> bool {
        self.has_ring() && !self.durable.ring.formed
    }

    /// Takes a worker's request to join the ring. A member of a formed ring breaks it thereby, and so does a newcomer.
    ///
    /// # Errors
    /// [`Reason::Malformed`] in a job with servers, [`Reason::NotInitialized`] before a worker has registered variables.
    pub(crate) fn join_ring(
        &mut self,
        now: Instant,
        origin: &Origin,
        request: &wire::JoinRingRequest,
    ) -> Result<Joined, Refusal> {
        let task = origin.task;
        if !self.has_ring() {
            let what = "the workers of a job with parameter servers form no ring";
            return Err(Refusal::new(Reason::Malformed, what));
        }
        if self.ended() {
            return Ok(Joined::Ended);
        }
        if !self.initialized() {
            let what = "no worker has registered variables; register them first";
            return Err(Refusal::new(Reason::NotInitialized, what));
        }
        let values = self.valid_values(origin.clock, Epoch(request.values_ring));
        if self.durable.ring.formed {
            let ring = &self.durable.ring;
            if ring.member(task).is_some() && origin.epoch < ring.number {
                // The answer to its last request was lost.
                return Ok(Joined::Ring(self.wire_ring()));
            }
            self.break_ring(now, "a worker asks for another");
        }
        let lost = request.lost.as_ref().and_then(|lost| lost.try_into().ok());
        self.note_joined(task, values, lost);
        self.form_ring(now);
        // It may have been removed, or the job has failed.
        self.admit(origin)?;
        match self.durable.ring.formed {
            _ if self.ended() => Ok(Joined::Ended),
            true => Ok(Joined::Ring(self.wire_ring())),
            false => Ok(Joined::Pending(self.missing_in_ring())),
        }
    }

    /// Returns the number of steps of a worker's values; none if it has none, or they are of no use: they belong to steps that
    /// were dropped, or to more steps than can have been made.
    fn valid_values(&self, clock: Clock, ring: Epoch) -> Option<Clock> {
        let possible = match &self.durable.ring.span {
            Some(span) => span.end(),
            None => self.durable.training.min_clock,
        };
        let valid = ring.0 > 0 && ring >= self.durable.ring.valid_since && clock <= possible;
        valid.then_some(clock)
    }

    fn note_joined(&mut self, task: Task, values: Option<Clock>, lost: Option<Task>) {
        let ring = &mut self.durable.ring;
        let joined = RingMember {
            task,
            joined: true,
            values,
            made: Clock(0),
            lost,
        };
        match ring.members.iter_mut().find(|member| member.task == task) {
            Some(member) => *member = joined,
            None => ring.members.push(joined),
        }
        ring.members.sort_by_key(|member| member.task.id.index);
        self.must_persist();
    }

    /// Describes what the ring that is being formed waits for.
    pub(super) fn missing_in_ring(&self) -> String {
        let ring = &self.durable.ring;
        let absent = ring.members.iter().find(|member| !member.joined);
        if let Some(member) = absent {
            return format!("{} has not joined the next ring yet", member.task);
        }
        let wanted = self.job.workers();
        format!("{} of {wanted} workers have joined", ring.members.len())
    }

    /// Breaks the ring: all members are to join the next one.
    fn break_ring(&mut self, now: Instant, why: &str) {
        let ring = &mut self.durable.ring;
        if !std::mem::replace(&mut ring.formed, false) {
            return;
        }
        // The others have waited for the one that is lost.
        for member in self.durable.members.values_mut() {
            member.progress.moved = now;
        }
        tracing::info!(ring = ring.number.0, why, "the ring is broken");
        self.give_up_copy(None);
        let ring = &mut self.durable.ring;
        ring.number = ring.number.next();
        for member in &mut ring.members {
            member.joined = false;
        }
        self.must_persist();
    }

    /// Removes a worker that is gone from the ring.
    pub(super) fn leave_ring(&mut self, now: Instant, task: Task) {
        if self.durable.ring.member(task).is_none() {
            return;
        }
        if !self.ended() {
            self.break_ring(now, "a member is gone");
        }
        self.give_up_copy(Some(task));
        let ring = &mut self.durable.ring;
        ring.members.retain(|member| member.task != task);
        self.must_persist();
        self.form_ring(now);
    }

    /// Forms the ring if all that are expected have joined.
    fn form_ring(&mut self, now: Instant) {
        let ring = &self.durable.ring;
        let starting = self.durable.outcome.phase == JobPhase::Starting;
        let wanted = if starting { self.job.workers() } else { 1 } as usize;
        let complete = ring.members.iter().all(|member| member.joined);
        if ring.formed || !complete || ring.members.len() < wanted || self.ended() {
            return;
        }
        if self.part_the_cut_off(now) {
            return;
        }
        let newest = self
            .durable
            .ring
            .members
            .iter()
            .map(|member| member.values)
            .max();
        let Some(newest) = newest.flatten() else {
            return self.form_without_values(now);
        };
        self.settle_span(now, newest);
        self.form_at(newest, None);
    }

    /// Forms the ring of workers of which none has values: they begin with the initial values, or with a checkpoint.
    fn form_without_values(&mut self, now: Instant) {
        let begun = self.durable.outcome.phase != JobPhase::Starting;
        match self.durable.checkpoints.newest.clone() {
            Some(kept) => {
                if begun {
                    self.durable.ring.span = None;
                    self.durable.ring.valid_since = self.durable.ring.number;
                    self.give_up_saving();
                    self.restore_progress(&kept.progress);
                    self.record_restore(now, kept.number, None);
                }
                self.form_at(kept.progress.clock, Some(&kept));
            }
            None if !begun => self.form_at(Clock(0), None),
            None => self.fail(
                now,
                "all workers with the values are gone, and there is no checkpoint; start the job again".to_owned(),
            ),
        }
    }

    fn form_at(&mut self, clock: Clock, from: Option<&DurableCheckpoint>) {
        let ring = &mut self.durable.ring;
        ring.from = from.map(|kept| (kept.location.clone(), kept.number, kept.run.clone()));
        let has = |member: &RingMember| from.is_none() && member.values == Some(clock);
        ring.source = ring.members.iter().position(has).unwrap_or(0);
        let others = ring.members.iter().enumerate();
        let mut others = others.filter(|(rank, _)| *rank != ring.source);
        ring.broadcast = others.any(|(_, member)| !has(member));
        (ring.clock, ring.formed) = (clock, true);
        for member in &mut ring.members {
            member.made = clock;
        }
        // The first ring has a number too: 0 means none.
        ring.number = ring.number.max(Epoch(1));
        tracing::info!(
            ring = ring.number.0,
            ranks = ring.members.len(),
            clock = clock.0,
            "a ring is formed"
        );
        for member in &ring.members {
            if let Some(known) = self.durable.members.get_mut(&member.task.id) {
                known.progress.clock = clock;
            }
        }
        self.must_persist();
    }

    /// Returns whether the ring makes no steps at present, so that all members have the same values.
    pub(super) fn ring_rests(&self) -> bool {
        self.durable.ring.formed && self.durable.ring.span.is_none()
    }

    /// Returns the first member of the ring, if one is formed.
    pub(super) fn first_of_ring(&self) -> Option<Task> {
        let ring = &self.durable.ring;
        let first = ring.members.first().filter(|_| ring.formed);
        first.map(|member| member.task)
    }

    /// Removes a worker that others have lost twice in a row although it lives: the network between them is cut, and the next
    /// ring would break as this one did. Returns whether there was one.
    fn part_the_cut_off(&mut self, now: Instant) -> bool {
        let ring = &mut self.durable.ring;
        let lost: Vec<(Task, Task)> = ring
            .members
            .iter()
            .filter_map(|member| Some((member.task, member.lost?)))
            .collect();
        let progressed = ring
            .members
            .iter()
            .any(|member| member.values > Some(ring.clock));
        let Some((by, lost)) = lost.first().copied().filter(|_| !progressed) else {
            self.observed.lost_in_ring = None;
            return false;
        };
        let pair = [by.id, lost.id];
        let again = self.observed.lost_in_ring.replace(pair);
        let same = again.is_some_and(|again| again.iter().all(|id| pair.contains(id)));
        if !same {
            return false;
        }
        // Of the two, the one that came last leaves.
        let leaves = by.id.max(lost.id);
        self.observed.lost_in_ring = None;
        let known = self.member(leaves).is_some_and(|member| member.alive);
        if known {
            self.remove(now, leaves, "another worker cannot reach it");
        }
        known
    }

    fn wire_ring(&self) -> wire::Ring {
        let ring = &self.durable.ring;
        let address = |task: Task| self.member(task.id).map(|member| member.address.clone());
        wire::Ring {
            number: ring.number.0,
            members: ring
                .members
                .iter()
                .map(|member| wire::RingMember {
                    task: Some(member.task.into()),
                    address: address(member.task).unwrap_or_default(),
                })
                .collect(),
            clock: ring.clock.0,
            source: ring.source as u32,
            broadcast: ring.broadcast,
            checkpoint: ring
                .from
                .clone()
                .map(|(location, number, run)| wire::RingCheckpoint {
                    location,
                    number,
                    run,
                }),
        }
    }

    /// Returns whether a worker is in the ring that is formed.
    pub(super) fn is_in_ring(&self, origin: &Origin) -> bool {
        let ring = &self.durable.ring;
        ring.formed && origin.epoch == ring.number && ring.member(origin.task).is_some()
    }

    /// Returns the steps that a member of the ring is to make; none if it has made all that are leased.
    pub(super) fn work_in_ring(&self, task: Task) -> Option<Work> {
        let ring = &self.durable.ring;
        let member = ring.member(task)?;
        let span = ring.span.as_ref().filter(|span| member.made < span.end())?;
        Some(Work::Shared {
            split: Split {
                start: span.position(member.made),
                ..span.split
            },
            rank: ring.rank(task),
            ranks: ring.members.len() as u32,
        })
    }

    /// Leases the next steps to the ring, unless it has some.
    pub(super) fn plan_span(&mut self, now: Instant) {
        if self.ring_rests() {
            self.save_if_due(now);
        }
        let ring = &self.durable.ring;
        let busy = ring.span.is_some()
            || self.awaits_copy()
            || self.durable.evaluations.pending()
            || self.durable.training.stopping
            || self.durable.checkpoints.ending();
        if busy || !ring.formed {
            return;
        }
        let first = ring.made_by_all();
        let ranks = ring.members.len() as u64;
        let size = self.job.samples_per_step().saturating_mul(ranks);
        let Some(ledger) = &mut self.durable.training.ledger else {
            return;
        };
        let Some((split, steps)) = ledger.lease_to_all(size, MOST_BATCHES) else {
            return;
        };
        self.durable.ring.span = Some(Span {
            split,
            first,
            steps,
            size,
        });
        self.must_persist();
    }

    /// Counts the steps that a member has made. A report of an earlier ring has no effect: the values with which its sender
    /// joins the next one count.
    ///
    /// # Errors
    /// [`Reason::NotLeased`], [`Reason::FutureClock`] or [`Reason::Malformed`].
    pub(super) fn finish_in_ring(
        &mut self,
        now: Instant,
        origin: &Origin,
        request: &wire::FinishStepRequest,
    ) -> Result<(), Refusal> {
        let task = origin.task;
        let ring = &self.durable.ring;
        let current = ring.formed && origin.epoch == ring.number;
        let Some(member) = ring.member(task).filter(|_| current) else {
            return Ok(());
        };
        if origin.clock <= member.made {
            return Ok(());
        }
        let Some(span) = ring.span.as_ref().filter(|s| s.split.id == request.split) else {
            return Err(not_leased(task, request));
        };
        let made = origin.clock.0.saturating_sub(member.made.0);
        if origin.clock > span.end() || request.steps > made {
            return Err(Refusal::new(
                Reason::FutureClock,
                format!(
                    "{task} says that it has finished {} steps after {} more, but it had finished {}, of the steps up to {}",
                    origin.clock,
                    request.steps,
                    member.made,
                    span.end()
                ),
            ));
        }
        self.check_report(task, request, request.steps)?;
        let samples = made.saturating_mul(self.job.samples_per_step());
        let samples = request.samples.min(samples);
        let ring = &mut self.durable.ring;
        for member in ring.members.iter_mut().filter(|member| member.task == task) {
            member.made = origin.clock;
        }
        self.count(now, origin, request, samples);
        let made = self.durable.ring.made_by_all();
        self.count_made(now, made);
        Ok(())
    }

    /// Counts the steps before `made` as made by all.
    fn count_made(&mut self, now: Instant, made: Clock) {
        let Some(span) = &mut self.durable.ring.span else {
            return;
        };
        let made = made.min(span.end());
        let (position, id, whole) = (span.position(made), span.split.id, made == span.end());
        let ledger = self.durable.training.ledger.as_mut();
        let advanced = ledger.and_then(|ledger| ledger.advance(HELD_BY_ALL, id, position));
        let Some((samples, complete)) = advanced else {
            return;
        };
        self.durable.evaluations.due.extend(complete);
        let tally = &mut self.durable.training.tally;
        let counted = std::mem::replace(&mut self.durable.training.min_clock, made);
        let steps = made.0.saturating_sub(counted.0);
        tally.samples = tally.samples.saturating_add(samples);
        tally.steps = tally.steps.saturating_add(steps);
        if whole {
            self.durable.ring.span = None;
            self.must_persist();
        } else {
            self.may_persist();
        }
        if steps > 0 {
            self.record_progress(now, steps);
        }
        self.schedule_last_evaluation();
    }

    /// Ends the span at a clock: the steps before it are made, the data of the others is leased again.
    fn settle_span(&mut self, now: Instant, made: Clock) {
        self.count_made(now, made);
        let Some(span) = self.durable.ring.span.take() else {
            return;
        };
        if let Some(ledger) = &mut self.durable.training.ledger {
            ledger.take_back(span.size);
        }
        self.must_persist();
    }

    /// Returns the workers that the others of the ring wait for.
    pub(super) fn slowest_of_ring(&self) -> Vec<Task> {
        let waits = |task: &Task| {
            let member = self.member(task.id);
            member.is_some_and(|member| !member.progress.waiting_on.is_empty())
        };
        self.durable.ring.slowest(waits)
    }
}

impl Ring {
    fn rank(&self, task: Task) -> u32 {
        let rank = self.members.iter().position(|member| member.task == task);
        rank.unwrap_or(0) as u32
    }
}

/// The two workers that could not exchange numbers when the newest ring was broken.
pub(super) type LostPair = [TaskId; 2];
