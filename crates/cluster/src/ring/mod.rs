//! The ring of a job that keeps dense variables on workers: the workers that make each step together. Each member, or
//! each stage group, has all dense values, so a step is made once all members have added up their gradients.
//!
//! - `copies`: the copies of values for checkpoints
//! - `forming`: requests to join, broken rings, and the values with which the next one begins
//! - `steps`: the steps that the members make together, leased and counted
//! - `observed`: counts and times of rings; `status`: the status of the ring
//!
//! If a member is lost within a step, some members may already have the sum of the gradients, and the others cannot get
//! it. So each member that joins the next ring states the number of steps that its values have, and the highest number
//! counts. A step that one of these members has made counts as made, and the others take the values of that member. A
//! step that none of them has made is abandoned by all, and its data is leased again. This holds even for a step that a
//! member has reported, if that member dies and no other member has made the step.
//!
//! A ring is *settled* once all members have asked for work in it, because they all have its values then. Only then are
//! the steps of the previous ring counted and further steps leased. Until then, the source of the values may die with a
//! step that no other member has. Values of rings before the newest settled one are useless, because they may have a
//! step that was abandoned.
//!
//! In the strategy `hybrid`, servers hold the tables. The number of the ring is then the epoch of the shard map, so
//! each change of a shard breaks the ring, and each break of the ring begins a new epoch. A worker adds up its
//! gradients only after the servers have acknowledged the gradients of its rows. So the servers have the row gradients
//! of each step that any member has made.

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
    /// The number of the ring, which grows each time that a ring breaks. Members use it as the epoch of their calls.
    pub(super) number: Epoch,
    /// The members in rank order. While a ring is being formed: the live members of the previous ring, and the workers
    /// that have asked to join.
    members: Vec<RingMember>,
    formed: bool,
    /// The number of the newest settled ring.
    settled: Epoch,
    /// The number of steps that the ring's values had when the ring was formed.
    clock: Clock,
    /// The rank of the member from which the others get these values.
    source: usize,
    /// True if any other member lacks these values.
    broadcast: bool,
    /// The checkpoint from which the source first loads these values: its location, its number and its run; `None` if
    /// the source has the values.
    #[serde(default)]
    from: Option<(String, u64, String)>,
    /// True if the job has gone back to the newest checkpoint, so that the workers must load it.
    #[serde(default)]
    goes_back: bool,
    /// The steps that the members make at present; `None` if there are none. Until the ring is settled: the steps of
    /// the previous settled ring.
    span: Option<Span>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct RingMember {
    task: Task,
    /// True once the worker has asked to join the ring that is being formed.
    joined: bool,
    /// True once the worker has asked for work in the ring.
    entered: bool,
    /// The number of steps that the worker's values have, according to its request; `None` if it has no values that
    /// count.
    values: Option<Clock>,
    /// The number of steps that the worker has made.
    made: Clock,
    /// The member with which the worker could not exchange data; `None` if there is none.
    lost: Option<Task>,
    /// The sequence number of the worker's newest request to join.
    #[serde(default)]
    sequence: Sequence,
    /// The clock before the worker's newest step, if its gradient of that step was NaN or infinite; `None` otherwise.
    #[serde(default)]
    skipped: Option<Clock>,
}

/// Consecutive steps whose data is leased to all members together.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Span {
    split: Split,
    /// The clock before the first step.
    first: Clock,
    steps: u64,
    /// The number of samples of a step.
    size: u64,
    /// The members that make these steps, in rank order.
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

    /// Returns the position in the data at which the step at this clock begins.
    fn position(&self, clock: Clock) -> u64 {
        let made = clock.0.saturating_sub(self.first.0);
        let samples = made.saturating_mul(self.size);
        self.split.start.saturating_add(samples).min(self.split.end)
    }

    /// Returns the members whose gradients count in the step at this clock, each with its number of samples.
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

    /// Returns whether a later request to join than this one has come from the same worker.
    fn has_asked_after(&self, origin: &Origin) -> bool {
        let member = self.member(origin.task);
        member.is_some_and(|member| origin.sequence < member.sequence)
    }

    /// Returns the sequence number of a member's newest request to join; 0 if it is no member.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(super) fn newest_request(&self, task: Task) -> Sequence {
        let member = self.member(task);
        member.map_or(Sequence::default(), |member| member.sequence)
    }

    fn rank(&self, task: Task) -> u32 {
        let rank = self.members.iter().position(|member| member.task == task);
        rank.unwrap_or(0) as u32
    }

    /// Returns whether `task` is the member that loads the values of ring `number` from a checkpoint.
    pub(super) fn is_loaded_by(&self, task: Task, number: u64) -> bool {
        let source = self.members.get(self.source);
        self.formed
            && self.from.is_some()
            && self.number.0 == number
            && source.is_some_and(|member| member.task == task)
    }

    /// Ends the ring that is formed or being formed. The next ring has the number `next`.
    pub(super) fn end(&mut self, next: Epoch) {
        (self.number, self.formed) = (next, false);
        for member in &mut self.members {
            member.joined = false;
        }
    }

    /// Drops the leased steps, and makes the values of all members invalid, because the job goes back to a checkpoint.
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

    /// Returns the members that the others wait for. Before the ring is settled, these are the members that have not
    /// joined it or not asked for work. In a span, these are the members with the fewest steps among those that wait
    /// for no other. `waits` returns whether a member waits for another.
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
    /// Returns the index of the ring's part of a checkpoint, which comes after the servers' parts.
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

    /// Returns the first member of the ring; `None` if no ring is formed.
    pub(super) fn first_of_ring(&self) -> Option<Task> {
        let ring = &self.durable.ring;
        let first = ring.members.first().filter(|_| ring.formed);
        first.map(|member| member.task)
    }

    /// Returns whether all members of the ring have the same values, and make no steps at present.
    pub(super) fn ring_rests(&self) -> bool {
        self.durable.ring.is_settled() && self.durable.ring.span.is_none()
    }

    /// Returns whether the job has rings, and none is formed at present.
    pub(super) fn is_ring_broken(&self) -> bool {
        self.has_ring() && !self.durable.ring.formed
    }

    /// Returns whether the sender is a member of the formed ring, and calls in this ring's epoch.
    pub(super) fn is_in_ring(&self, origin: &Origin) -> bool {
        let ring = &self.durable.ring;
        ring.formed && origin.epoch == ring.number && ring.member(origin.task).is_some()
    }

    /// Returns the members of the ring that the others wait for.
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
