//! The forming of a ring: requests to join, rings that are broken, and the values with which the next one begins.

use std::time::{Duration, Instant};

use shared_proto::ids::{Clock, Epoch, Origin, Task};
use shared_proto::planted;
use shared_proto::refusal::{Reason, Refusal};
use shared_proto::view::JobPhase;
use shared_proto::wire;

use super::{Cause, RingMember};
use crate::Cluster;
use crate::checkpoints::DurableCheckpoint;
use crate::due::FollowUp;

/// The time for which a ring that is being formed waits for absent members to which others have lost the connection.
const ABSENCE: Duration = Duration::from_secs(1);

/// The answer to a worker that asks to join.
#[derive(Clone, Debug, PartialEq)]
pub enum Joined {
    /// The ring is formed, and the worker is a member.
    Ring(wire::Ring),
    /// The worker must wait; the text says for what.
    Pending(String),
    /// The job has ended.
    Ended,
}

impl Cluster {
    /// Notes a worker's request to join the ring. Returns the answer; `None` if it depends on whether the ring can be
    /// formed now.
    ///
    /// # Errors
    /// As [`Self::join_ring`] says.
    pub(crate) fn ask_to_join(
        &mut self,
        now: Instant,
        origin: &Origin,
        request: &wire::JoinRingRequest,
    ) -> Result<Option<Joined>, Refusal> {
        let task = origin.task;
        if !self.has_ring() {
            let what =
                "the workers of a job with `strategy.name = \"parameter-server\"` form no ring";
            return Err(Refusal::new(Reason::Malformed, what));
        }
        if self.ended() {
            return Ok(Some(Joined::Ended));
        }
        if !self.durable.initialized() {
            let what = "no worker has registered variables; register them first";
            return Err(Refusal::new(Reason::NotInitialized, what));
        }
        if self.durable.ring.has_asked_after(origin) {
            let what = "a later request of this worker has come before this one";
            return Ok(Some(Joined::Pending(what.to_owned())));
        }
        self.durable.awaited.remove(&task.id);
        let values = self.valid_values(origin.clock, Epoch(request.values_ring));
        let lost = request.lost.as_ref().and_then(|lost| lost.try_into().ok());
        if self.durable.ring.formed {
            let ring = &self.durable.ring;
            if ring.member(task).is_some() && origin.epoch < ring.number {
                // The answer to its last request was lost.
                return Ok(Some(Joined::Ring(self.wire_ring())));
            }
            let cause = match ring.member(task) {
                None => Cause::Newcomer,
                Some(_) if lost.is_some() => Cause::Link,
                Some(_) => Cause::Again,
            };
            self.break_ring(now, cause);
        }
        self.observed.rings.begun(now);
        self.note_joined(RingMember {
            task,
            joined: true,
            entered: false,
            values,
            made: Clock(0),
            lost,
            sequence: origin.sequence,
            skipped: request.skipped.map(Clock),
        });
        self.due.add(FollowUp::FormRing);
        Ok(None)
    }

    /// Answers a worker that has asked to join.
    ///
    /// # Errors
    /// [`Reason::Fenced`] if the sender is evicted.
    pub(crate) fn answer_to_join(&self, origin: &Origin) -> Result<Joined, Refusal> {
        // It may have been removed, or the job has failed.
        self.admit(origin)?;
        match self.durable.ring.formed {
            _ if self.ended() => Ok(Joined::Ended),
            true => Ok(Joined::Ring(self.wire_ring())),
            false => Ok(Joined::Pending(self.missing_in_ring())),
        }
    }

    /// Returns the number of steps that a worker's values have. `of` is the ring in which the worker got these values
    /// or made its newest step. Returns `None` if the worker has no values, or they are useless: a later ring is
    /// settled, no worker can have made this number of steps, or the job goes back to a checkpoint.
    fn valid_values(&self, clock: Clock, of: Epoch) -> Option<Clock> {
        let ring = &self.durable.ring;
        let min_clock = self.durable.training.min_clock;
        let possible = match &ring.span {
            Some(_) if self.commits_rows() => min_clock.next(),
            Some(span) => span.end(),
            None => min_clock,
        };
        let newest = of >= ring.settled || planted!(AbandonedValues);
        let valid = of.0 > 0 && newest && clock <= possible && !ring.goes_back;
        valid.then_some(clock)
    }

    fn note_joined(&mut self, joined: RingMember) {
        let ring = &mut self.durable.ring;
        match ring.member_mut(joined.task) {
            Some(member) => *member = joined,
            None => ring.members.push(joined),
        }
        ring.members.sort_by_key(|member| member.task.id.index);
        self.must_persist();
    }

    /// Removes a worker that is gone from the ring.
    pub(crate) fn leave_ring(&mut self, now: Instant, task: Task) {
        if self.durable.ring.member(task).is_none() {
            return;
        }
        // Also after the end: a job that has failed may be resumed, with other members.
        self.break_ring(now, Cause::Gone);
        self.give_up_copy_of(task);
        let ring = &mut self.durable.ring;
        ring.members.retain(|member| member.task != task);
        self.must_persist();
        self.due.add(FollowUp::FormRing);
    }

    /// Forms the ring if all expected workers have joined, and each shard has a server.
    pub(crate) fn form_ring(&mut self, now: Instant) {
        let ring = &self.durable.ring;
        if ring.members.is_empty()
            || self.durable.orphans().next().is_some()
            || !self.durable.awaited.is_empty()
        {
            return;
        }
        self.leave_out_lost(now);
        let ring = &self.durable.ring;
        let wanted = self.wanted_in_ring() as usize;
        let complete = ring.members.iter().all(|member| member.joined);
        if ring.formed || !complete || ring.members.len() < wanted || self.ended() {
            return;
        }
        if self.evict_unreachable() {
            return;
        }
        let values = self.durable.ring.members.iter().map(|member| member.values);
        match values.max().flatten() {
            Some(newest) => self.form_at(now, newest, None),
            None => self.form_without_values(now),
        }
    }

    /// Leaves absent members out of the ring that is being formed, if others have lost the connection to each of them,
    /// and they have not joined for [`ABSENCE`]. They stay members of the cluster until their leases end. One that
    /// still works joins a later ring.
    fn leave_out_lost(&mut self, now: Instant) {
        let ring = &self.durable.ring;
        let joined = || ring.members.iter().filter(|member| member.joined);
        let absent: Vec<Task> = ring
            .members
            .iter()
            .filter(|member| !member.joined)
            .map(|member| member.task)
            .collect();
        let is_lost = |task: &Task| joined().any(|member| member.lost == Some(*task));
        let enough = joined().count() >= self.wanted_in_ring() as usize;
        let waited = self.observed.rings.age(now);
        if ring.formed
            || self.durable.outcome.phase != JobPhase::Training
            || waited.is_none_or(|waited| waited < ABSENCE)
            || !joined().any(|member| member.values.is_some())
            || absent.is_empty()
            || !enough
            || !absent.iter().all(is_lost)
        {
            return;
        }
        for task in absent {
            tracing::info!(%task, "the next ring is formed without a member that others have lost");
            self.give_up_copy_of(task);
            self.durable.evaluations.release(task);
            let members = &mut self.durable.ring.members;
            members.retain(|member| member.task != task);
        }
        self.must_persist();
    }

    /// Forms the ring when no worker has values. A worker loads the newest checkpoint. During training, servers go back
    /// to it first. Without a checkpoint, a starting job begins with the initial values, and any other job fails.
    fn form_without_values(&mut self, now: Instant) {
        let starting = self.durable.outcome.phase == JobPhase::Starting;
        // The writer of an ordered checkpoint may live, but it has lost the values that the order is for, as all members have.
        self.give_up_saving();
        match self.durable.checkpoints.newest.clone() {
            // The servers go back as well. The workers register again, and form a ring then.
            Some(kept)
                if !starting && self.durable.map().is_some() && !self.durable.ring.goes_back =>
            {
                self.raise_epoch(now, Cause::Restore);
                self.go_back(now, &kept);
            }
            Some(kept) => {
                if !starting && self.durable.map().is_none() {
                    self.durable.ring.span = None;
                    self.restore_progress(&kept.progress);
                    self.record_restore(now, kept.number, None);
                }
                self.form_at(now, kept.progress.clock, Some(&kept));
            }
            None if starting => self.form_at(now, Clock(0), None),
            None => {
                let lost = match self.job.strategy.optimizer_copies {
                    Some(_) => {
                        "all workers with the values are gone, or all copies of a part of the optimizer's state"
                    }
                    None => "all workers with the values are gone",
                };
                let reason = format!("{lost}, and there is no checkpoint; start the job again");
                self.fail(now, reason);
            }
        }
    }

    /// Forms the ring with the values at `clock`: those of the checkpoint `from` or, if `from` is `None`, those of a
    /// member.
    fn form_at(&mut self, now: Instant, clock: Clock, from: Option<&DurableCheckpoint>) {
        self.observed.rings.formed(now);
        let (part, epoch) = (self.part_of_ring(), self.durable.epoch());
        let loading = &mut self.durable.checkpoints.loading;
        loading.remove(&part);
        loading.extend(from.map(|_| (part, String::new())));
        let ring = &mut self.durable.ring;
        ring.goes_back = false;
        ring.from = from.map(|kept| (kept.location.clone(), kept.number, kept.run.clone()));
        let has = |member: &RingMember| from.is_none() && member.values == Some(clock);
        ring.source = ring.members.iter().position(has).unwrap_or(0);
        let others = ring.members.iter().enumerate();
        let mut others = others.filter(|(rank, _)| *rank != ring.source);
        let lacks = |member: &RingMember| match planted!(NoBroadcast) {
            true => member.values.is_none(),
            false => !has(member),
        };
        ring.broadcast = others.any(|(_, member)| lacks(member));
        (ring.clock, ring.formed) = (clock, true);
        for member in &mut ring.members {
            (member.made, member.entered) = (clock, false);
        }
        // The first ring has a number too: 0 means none.
        ring.number = epoch.max(Epoch(1));
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

    /// Evicts a worker if it and another worker have lost the connection to each other twice in a row although both
    /// live. The network between them is cut, so the next ring would break as well. Returns whether a worker was
    /// evicted.
    fn evict_unreachable(&mut self) -> bool {
        let ring = &mut self.durable.ring;
        let lost: Vec<(Task, Task)> = ring
            .members
            .iter()
            .filter_map(|member| Some((member.task, member.lost?)))
            // One that was left out is not the cause of the next break.
            .filter(|(_, lost)| ring.member(*lost).is_some())
            .collect();
        let progressed = ring
            .members
            .iter()
            .any(|member| member.values > Some(ring.clock));
        let Some((by, lost)) = lost.first().copied().filter(|_| !progressed) else {
            self.observed.rings.lost = None;
            return false;
        };
        let pair = [by.id, lost.id];
        let again = self.observed.rings.lost.replace(pair);
        let same = again.is_some_and(|again| again.iter().all(|id| pair.contains(id)));
        if !same {
            return false;
        }
        // Of the two, the one that came last leaves.
        let leaves = by.id.max(lost.id);
        self.observed.rings.lost = None;
        let known = self
            .durable
            .member(leaves)
            .is_some_and(|member| member.is_alive());
        if known {
            self.observed.rings.evicted();
            let why = "another worker cannot reach it";
            self.due.add(FollowUp::Evict(leaves, why));
        }
        known
    }
}
