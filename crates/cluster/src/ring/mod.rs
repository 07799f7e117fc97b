//! The ring of a job that keeps dense variables on workers: the workers that make each step together. Each has all of these
//! values, so a step is made once all members have added up their gradients.
//!
//! - `copies`: the copies of values for checkpoints
//! - `forming`: requests to join, broken rings, and the values with which the next one begins
//! - `steps`: the steps that the members make together, leased and counted
//! - `observed`: counts and times of rings; `status`: the status of the ring
//!
//! If a member is lost within a step, some others may have the sum of the gradients already, and the rest cannot get it. So
//! each member joins the next ring with the number of steps that its values have, and the highest number counts: a step
//! that one of them has made is made, and the others take the values of that member. A step that none has made is
//! abandoned by all, and its data is leased again. A step that a member has reported, and that no other member has
//! made when it dies, is not made.
//!
//! A ring is *settled* once all members have asked for work in it, because they have its values then. Only then are the steps
//! of the ring before counted and further ones leased: until then the source of the values may die with a step that no other
//! member has. Values of rings before the newest settled one are of no use. They may have a step that was abandoned.
//!
//! In the strategy `hybrid` servers hold the tables. The number of the ring is then the epoch of the shard map, so each change
//! of a shard breaks the ring, and each break of the ring is an epoch of its own. A worker adds up its gradients only after
//! the servers have acknowledged its rows, so the servers have the rows of a step that any member has made.

mod copies;
mod forming;
mod observed;
mod status;
mod steps;

use serde::{Deserialize, Serialize};
use shared_proto::ids::{Clock, Epoch, Origin, Role, Sequence, Task};
use shared_proto::planted;
use shared_proto::wire;

use super::Cluster;
use super::ledger::Split;

pub use forming::Joined;
pub use observed::{Cause, Rings};
pub use status::RingFigures;

/// The ring that is formed, or being formed.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Ring {
    /// Grows each time that a ring is broken. It is the epoch of all calls of the members.
    pub(super) number: Epoch,
    /// The members in rank order. While a ring is being formed: those of the one before that are live, and those that have
    /// asked to join.
    members: Vec<RingMember>,
    formed: bool,
    /// The number of the newest settled ring.
    settled: Epoch,
    /// The number of steps that the values had when the ring was formed.
    clock: Clock,
    /// The rank with these values.
    source: usize,
    /// True if another rank lacks them.
    broadcast: bool,
    /// The checkpoint from which that rank loads them first: its location, its number and its run.
    #[serde(default)]
    from: Option<(String, u64, String)>,
    /// True if the servers have gone back to the newest checkpoint, so that the workers are to load it too.
    #[serde(default)]
    goes_back: bool,
    /// The steps that the members make at present; until the ring is settled, those of the settled one before.
    span: Option<Span>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct RingMember {
    task: Task,
    /// True once it has asked to join the ring that is being formed.
    joined: bool,
    /// True once it has asked for work in the ring.
    entered: bool,
    /// The number of steps that its values have, according to its request; none if it has no values that count.
    values: Option<Clock>,
    /// The number of steps that it has made.
    made: Clock,
    /// The member that it could not exchange numbers with.
    lost: Option<Task>,
    /// The number of its newest request.
    #[serde(default)]
    sequence: Sequence,
    /// The clock before its newest step, if its gradient of that step was NaN or infinite.
    #[serde(default)]
    skipped: Option<Clock>,
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
    /// The members that make them, in rank order.
    #[serde(default)]
    members: Vec<Task>,
    /// The members that have reported NaN or infinity in their gradients of the newest step.
    #[serde(default)]
    skipped: Vec<Task>,
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

    /// Returns the members with gradients in the step after this clock, each with its number of samples.
    fn contributors(&self, clock: Clock) -> Vec<(Task, u64)> {
        let (start, end) = (self.position(clock), self.position(clock.next()));
        let share = self.size / (self.members.len() as u64).max(1);
        let samples = |rank: u64| {
            let from = end.min(start.saturating_add(rank.saturating_mul(share)));
            end.min(from.saturating_add(share)) - from
        };
        let members = self.members.iter().zip(0..);
        let contributes =
            |(task, samples): &(Task, u64)| *samples > 0 && !self.skipped.contains(task);
        let counted = members.map(|(task, rank)| (*task, samples(rank)));
        let forgotten = usize::from(planted!(RowsForgotten) && self.members.len() > 1);
        counted.filter(contributes).skip(forgotten).collect()
    }
}

impl Ring {
    fn member(&self, task: Task) -> Option<&RingMember> {
        self.members.iter().find(|member| member.task == task)
    }

    fn member_mut(&mut self, task: Task) -> Option<&mut RingMember> {
        self.members.iter_mut().find(|member| member.task == task)
    }

    /// Returns whether a later request of this member to join has come.
    fn has_asked_after(&self, origin: &Origin) -> bool {
        let member = self.member(origin.task);
        member.is_some_and(|member| origin.sequence < member.sequence)
    }

    /// Returns the number of a member's newest request to join.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(super) fn newest_request(&self, task: Task) -> Sequence {
        let member = self.member(task);
        member.map_or(Sequence::default(), |member| member.sequence)
    }

    fn rank(&self, task: Task) -> u32 {
        let rank = self.members.iter().position(|member| member.task == task);
        rank.unwrap_or(0) as u32
    }

    /// Returns whether a member is the one that loads the values of the ring with this number from a checkpoint.
    pub(super) fn is_loaded_by(&self, task: Task, number: u64) -> bool {
        let source = self.members.get(self.source);
        self.formed
            && self.from.is_some()
            && self.number.0 == number
            && source.is_some_and(|member| member.task == task)
    }

    /// Ends the ring that is formed, or being formed. The next one has this number.
    pub(super) fn end(&mut self, next: Epoch) {
        (self.number, self.formed) = (next, false);
        for member in &mut self.members {
            member.joined = false;
        }
    }

    /// Drops all values of members, because the job goes back to a checkpoint.
    pub(super) fn go_back(&mut self) {
        (self.span, self.goes_back) = (None, true);
    }

    /// Returns whether a ring is formed.
    pub(super) fn is_formed(&self) -> bool {
        self.formed
    }

    fn is_settled(&self) -> bool {
        self.formed && self.settled == self.number
    }

    /// Returns the number of steps that all members of the formed ring have made.
    fn made_by_all(&self) -> Clock {
        let made = self.members.iter().map(|member| member.made);
        made.min().unwrap_or(self.clock)
    }

    /// Returns the members that the others wait for. While the ring forms: those that have not joined or entered. In a span: of the members
    /// that wait for no other, those with the fewest steps. `waits` returns whether a member waits.
    fn slowest(&self, waits: impl Fn(&Task) -> bool) -> Vec<Task> {
        let busy = || self.members.iter().filter(|member| !waits(&member.task));
        let fewest = busy().map(|member| member.made).min();
        let is_slow = |member: &&RingMember| match self.formed {
            true if self.is_settled() => {
                self.span.is_some() && Some(member.made) == fewest && !waits(&member.task)
            }
            true => !member.entered,
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
        if self.settled > self.number {
            let (settled, number) = (self.settled, self.number);
            return Err(format!("ring {settled} is settled before ring {number}"));
        }
        match &self.span {
            Some(span) if span.size == 0 || span.split.start > span.split.end => {
                Err("the ring's steps have no samples".to_owned())
            }
            _ => Ok(()),
        }
    }
}

impl Cluster {
    /// Returns the number of the ring's part of a checkpoint: it comes behind those of the servers.
    pub(super) fn part_of_ring(&self) -> usize {
        self.durable.servers().len()
    }

    /// Returns whether members of this role write and load checkpoints.
    pub(crate) fn keeps_values(&self, role: Role) -> bool {
        let name = self.job.strategy.name;
        match role {
            Role::Ps => name.has_servers(),
            Role::Worker => name.has_ring(),
            Role::Coordinator => false,
        }
    }

    /// Returns the first member of the ring, if one is formed.
    pub(super) fn first_of_ring(&self) -> Option<Task> {
        let ring = &self.durable.ring;
        let first = ring.members.first().filter(|_| ring.formed);
        first.map(|member| member.task)
    }

    /// Returns whether all members of the ring have the same values, and make no steps at present.
    pub(super) fn ring_rests(&self) -> bool {
        self.durable.ring.is_settled() && self.durable.ring.span.is_none()
    }

    /// Returns whether the workers are to form another ring.
    pub(super) fn is_ring_broken(&self) -> bool {
        self.has_ring() && !self.durable.ring.formed
    }

    /// Returns whether a worker is in the ring that is formed.
    pub(super) fn is_in_ring(&self, origin: &Origin) -> bool {
        let ring = &self.durable.ring;
        ring.formed && origin.epoch == ring.number && ring.member(origin.task).is_some()
    }

    /// Returns the workers that the others of the ring wait for.
    pub(super) fn slowest_of_ring(&self) -> Vec<Task> {
        let waits = |task: &Task| {
            let member = self.durable.member(task.id);
            member.is_some_and(|member| !member.progress.waiting_on.is_empty())
        };
        self.durable.ring.slowest(waits)
    }

    fn wire_ring(&self) -> wire::Ring {
        let ring = &self.durable.ring;
        let address = |task: Task| {
            self.durable
                .member(task.id)
                .map(|member| member.address.clone())
        };
        let member = |member: &RingMember| wire::RingMember {
            task: Some(member.task.into()),
            address: address(member.task).unwrap_or_default(),
        };
        wire::Ring {
            number: ring.number.0,
            members: ring.members.iter().map(member).collect(),
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
                    shard: self.part_of_ring() as u32,
                }),
        }
    }
}
