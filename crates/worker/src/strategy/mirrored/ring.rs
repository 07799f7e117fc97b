//! The ring of workers: its forming, its links, and the values that its members begin with.

use std::fmt;
use std::time::Duration;

use collective::{CollectiveError, Group, LinkError, Peer, Rank, StreamLinks, Traffic};
use replica::{GroupError, Mirror, MirrorState, ReplicaError, StepsMade, ValuesId};
use shared_proto::ids::{Clock, Epoch, Task};
use shared_proto::payload::Dtype;
use shared_proto::planted;
use shared_proto::wire;
use tokio::sync::watch;

use super::agreed::Agreed;
use super::gradient::{self, COUNTS, Total};
use super::{LOOK, Mirrored};
use crate::strategy::StrategyError;

/// A ring that this worker is in.
pub(super) struct Ring {
    number: Epoch,
    pub(super) group: Group<StreamLinks>,
    wire: Dtype,
    pub(super) members: Vec<Task>,
    /// The newest epoch that the coordinator has named. An epoch after this ring's ends the ring.
    newest: watch::Receiver<Epoch>,
    /// The time after which the coordinator ends the membership of a silent member.
    pub(super) lease: Duration,
    pub(super) agreed: Agreed,
}

/// The reason why a ring is over.
#[derive(Debug)]
pub(super) enum Lost {
    /// Another member cannot be reached, or does not fit this ring.
    Member(Task, String),
    /// The coordinator has named a later ring.
    Over,
    /// This worker's replica has failed.
    Replica(ReplicaError),
    /// The members' devices have failed to add up, and the cause is not known.
    Devices(ReplicaError),
}

impl Lost {
    /// Returns the reason why a ring is over, if an operation of the members' devices has failed.
    pub(super) fn of_devices(failure: GroupError) -> Self {
        match failure {
            GroupError::Own(error) => Self::Replica(error),
            GroupError::Peer(error) => Self::Devices(error),
        }
    }
}

impl From<ReplicaError> for Lost {
    fn from(error: ReplicaError) -> Self {
        Self::Replica(error)
    }
}

impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Member(task, reason) => write!(f, "{task} is lost: {reason}"),
            Self::Over => f.write_str("the ring is over"),
            Self::Replica(error) | Self::Devices(error) => error.fmt(f),
        }
    }
}

impl Ring {
    /// Adds up a vector with the other members.
    pub(super) async fn all_reduce(&self, values: &mut [f32]) -> Result<(), Lost> {
        let reduced = self.group.all_reduce(values);
        let reduced = self.unless_over(reduced).await?;
        match reduced {
            Err(_) if planted!(HalfAStep) => Ok(()),
            reduced => reduced.map_err(|error| self.lost(&error)),
        }
    }

    /// Turns this member's gradient, times its [factor](Self::factor), into the mean gradient of all members. `counted`
    /// is the number of samples that this member adds to the total.
    pub(super) async fn mean_gradient(
        &self,
        memory: &mut Vec<f32>,
        counted: u64,
    ) -> Result<Total, Lost> {
        if self.is_alone() {
            return Ok(gradient::total(memory));
        }
        if !self.rounds() {
            self.all_reduce(memory).await?;
            return Ok(gradient::mean(memory));
        }
        let total = match self.all_samples(counted).await? {
            0.0 => Total::Nothing,
            samples => {
                gradient::scale(memory, (1.0 / samples) as f32);
                self.all_reduce(memory).await?;
                Total::Mean
            }
        };
        memory.truncate(memory.len().saturating_sub(COUNTS));
        Ok(total)
    }

    /// Returns the factor for gradients before the sum: `samples`, or 1 if this member is alone.
    pub(super) fn factor(&self, samples: u64) -> f32 {
        match self.is_alone() {
            true => 1.0,
            false => samples as f32,
        }
    }

    /// Returns whether this is the only member.
    pub(super) fn is_alone(&self) -> bool {
        self.ranks() == 1
    }

    /// Returns the number of all members' samples.
    pub(super) async fn all_samples(&self, samples: u64) -> Result<f64, Lost> {
        let all = self.sum_short(vec![samples as f64]).await?;
        Ok(all.first().copied().unwrap_or_default())
    }

    /// Returns whether numbers are rounded on the wire. Counts are then sent apart from gradients, and gradients are
    /// sent as parts of their mean, because a sum over many samples may be too large.
    pub(super) fn rounds(&self) -> bool {
        !matches!(self.wire, Dtype::F32 | Dtype::Unspecified)
    }

    /// Adds up a vector with the other members, for the elements that this member [keeps](Group::reduce_to_keepers).
    pub(super) async fn reduce_to_keepers(
        &self,
        values: &mut [f32],
        copies: usize,
    ) -> Result<(), Lost> {
        self.play(self.group.reduce_to_keepers(values, copies))
            .await
    }

    /// Copies each member's segment to all others.
    pub(super) async fn all_gather(&self, values: &mut [f32]) -> Result<(), Lost> {
        self.play(self.group.all_gather(values)).await
    }

    /// Copies the values of a member to all others, each of which hands them on to the next.
    pub(super) async fn pass_around(&self, from: Rank, values: &mut [f32]) -> Result<(), Lost> {
        self.play(self.group.pass_around(from, values)).await
    }

    /// Returns the sum of all members' short vectors, as [`Group::sum_short`] does.
    pub(super) async fn sum_short(&self, values: Vec<f64>) -> Result<Vec<f64>, Lost> {
        self.play(self.group.sum_short(values)).await
    }

    /// Returns once all members have called this.
    pub(super) async fn barrier(&self) -> Result<(), Lost> {
        self.play(self.group.barrier()).await
    }

    /// Does a collective operation, unless the coordinator names a later ring.
    pub(super) async fn play<T>(
        &self,
        operation: impl Future<Output = Result<T, CollectiveError>>,
    ) -> Result<T, Lost> {
        let done = self.unless_over(operation).await?;
        done.map_err(|error| self.lost(&error))
    }

    /// Does the work unless the coordinator names a later ring.
    pub(super) async fn unless_over<T>(&self, work: impl Future<Output = T>) -> Result<T, Lost> {
        unless_over(self.number, self.newest.clone(), work).await
    }

    /// Returns the rank of this member.
    pub(super) fn rank(&self) -> Rank {
        self.group.rank()
    }

    /// Returns the number of members.
    pub(super) fn ranks(&self) -> usize {
        self.group.ranks()
    }

    /// Returns the members from which this one waits to receive; none while it waits for its own replica.
    pub(super) fn waiting_on(&self) -> Vec<Task> {
        if self.agreed.computing.get() {
            return Vec::new();
        }
        let mut ranks = self.agreed.open.awaited_by(self.rank());
        ranks.extend(match &*self.agreed.in_stages.borrow() {
            Some(waits) => waits.longer_than(LOOK, self.rank()),
            None => self.group.waiting_on(),
        });
        let members = ranks.iter().filter_map(|rank| self.members.get(*rank));
        members.copied().collect()
    }

    /// Returns the traffic with the other members since the last call of this method.
    pub(super) fn take_traffic(&self) -> Traffic {
        self.group.take_traffic()
    }

    fn lost(&self, error: &CollectiveError) -> Lost {
        lost(&self.members, error.rank(), error.to_string())
    }
}

fn lost(members: &[Task], rank: usize, reason: String) -> Lost {
    match members.get(rank) {
        Some(task) => Lost::Member(*task, reason),
        None => Lost::Over,
    }
}

/// Does the work unless the coordinator names a later ring.
async fn unless_over<T>(
    number: Epoch,
    mut newest: watch::Receiver<Epoch>,
    work: impl Future<Output = T>,
) -> Result<T, Lost> {
    tokio::select! {
        biased;
        done = work => Ok(done),
        _ = newest.wait_for(|newest| *newest > number) => Err(Lost::Over),
    }
}

impl Mirrored {
    /// Waits until the coordinator names a later ring than the one that this worker is in.
    pub(in crate::strategy) fn newer_ring(&self) -> impl Future<Output = ()> + use<> {
        let mut newest = self.sender.newest_epoch();
        let number = *self.number.borrow();
        async move {
            if newest.wait_for(|newest| *newest > number).await.is_err() {
                // The worker has left the cluster, and waits for nothing else.
                std::future::pending::<()>().await;
            }
        }
    }

    /// Joins the next ring, and takes the values that it begins with. Returns the number of steps that these values
    /// include.
    pub(super) async fn form(&mut self, mirror: &dyn Mirror) -> Result<Clock, StrategyError> {
        self.ring = None;
        self.backup.forget();
        self.counters.left();
        let mut said = String::new();
        loop {
            self.check_devices()?;
            let made = mirror.made().await?;
            let made = made.filter(|made| made.run == self.run);
            let clock = made.map_or(Clock(0), |made| made.clock);
            let request = wire::JoinRingRequest {
                origin: Some(self.sender.next_origin(*self.number.borrow(), clock).into()),
                values_ring: made.map_or(0, |made| made.ring.0),
                lost: self.lost.map(Into::into),
                skipped: self.skipped.map(|clock| clock.0),
            };
            let reply = self.coordinator.join_ring(request).await?;
            let Some(ring) = reply.ring else {
                if reply.ended {
                    return Ok(clock);
                }
                if said != reply.waiting_for {
                    tracing::info!("waiting: {}", reply.waiting_for);
                    said = reply.waiting_for;
                }
                continue;
            };
            self.lost = None;
            match self.enter(ring, mirror).await {
                Ok(clock) => return Ok(clock),
                Err(Lost::Replica(error)) => return Err(error.into()),
                Err(lost) => {
                    tracing::debug!("another ring is needed: {lost}");
                    self.leave_ring(lost);
                }
            }
        }
    }

    /// Opens the links of a ring, and takes the values that it begins with.
    async fn enter(&mut self, ring: wire::Ring, mirror: &dyn Mirror) -> Result<Clock, Lost> {
        let formed = self.connect(&ring).await?;
        let made = StepsMade {
            run: self.run,
            ring: formed.number,
            clock: Clock(ring.clock),
        };
        let begun = async {
            let has_values = ring.clock > 0 && ring.checkpoint.is_none();
            let with_values = has_values.then_some(ring.source as usize);
            self.take_stages(&formed, with_values, mirror).await?;
            self.begin(&formed, &ring, made, mirror).await?;
            formed.agree_on_buckets(self.fills_buckets(mirror)).await?;
            self.form_device_group(&formed, mirror).await
        };
        let begun = begun.await;
        self.counters.moved(formed.take_traffic());
        begun?;
        tracing::info!(
            ring = made.ring.0,
            rank = formed.rank(),
            ranks = formed.ranks(),
            steps = ring.clock,
            "in a ring of workers"
        );
        self.counters.joined(made.ring, formed.ranks());
        self.ring = Some(formed);
        Ok(made.clock)
    }

    /// Opens the links of a ring.
    async fn connect(&mut self, ring: &wire::Ring) -> Result<Ring, Lost> {
        let (number, source) = (Epoch(ring.number), ring.source as usize);
        self.number.send_replace(number);
        self.sender.heard(number);
        let peer = |member: &wire::RingMember| {
            let task = Task::try_from(member.task.as_ref()?).ok()?;
            let address = member.address.clone();
            Some(Peer { task, address })
        };
        let peers: Vec<Peer> = ring.members.iter().filter_map(peer).collect();
        let members: Vec<Task> = peers.iter().map(|peer| peer.task).collect();
        let ranks = members.len();
        let own = members.iter().position(|task| *task == self.task);
        let Some(rank) = own.filter(|_| source < ranks) else {
            return Err(Lost::Over);
        };
        let unreachable = |error: LinkError| lost(&members, error.rank, error.reason);
        let network = self.network.clone();
        let links = StreamLinks::new(&self.links, network, number, rank, peers, self.lease);
        let links = links.map_err(unreachable)?;
        let newest = self.sender.newest_epoch();
        let groups = self.stage_groups;
        let group = groups.of(rank as u32, ranks as u32).unwrap_or_default();
        let group = group.start as usize..group.end as usize;
        let signals = async {
            match self.backup.has_some() || self.adds_up_on_devices {
                true => links.connect_star(0, source).await,
                false => Ok(()),
            }
        };
        let connected = async {
            let pieces = links.connect(source);
            tokio::try_join!(pieces, links.connect_among(group), signals).map(drop)
        };
        let connected = unless_over(number, newest.clone(), connected);
        connected.await?.map_err(unreachable)?;
        Ok(Ring {
            number,
            group: Group::new(rank, ranks, links, self.wire),
            wire: self.wire,
            members,
            newest,
            lease: self.lease,
            agreed: Agreed::default(),
        })
    }

    /// Takes the values and the part of the optimizer's state with which a ring begins.
    async fn begin(
        &self,
        formed: &Ring,
        ring: &wire::Ring,
        made: StepsMade,
        mirror: &dyn Mirror,
    ) -> Result<(), Lost> {
        let (number, source) = (formed.number, ring.source as usize);
        if let Some(from) = ring.checkpoint.as_ref().filter(|_| formed.rank() == source) {
            let loaded = self.checkpoints.load(number, from);
            let mut state = unless_over(number, formed.newest.clone(), loaded).await?;
            state.made_in = number;
            mirror.set_state(state, made).await?;
        }
        let begins = ValuesId {
            ring: number,
            clock: made.clock,
        };
        // Before the values are overwritten: those of a prepared step may depend on them.
        let taken = match &self.shares {
            Some(shares) => {
                let taken = formed.take_slots(shares, source, begins, mirror).await?;
                if taken.is_none() {
                    tracing::warn!(
                        "parts of the optimizer's state are lost with workers that have died; all go back to the newest checkpoint"
                    );
                    mirror.first().forget().await?;
                    return Err(Lost::Over);
                }
                taken
            }
            None => None,
        };
        match ring.broadcast {
            true => formed.copy_values(source, mirror, made).await?,
            false => mirror.note_made(made).await?,
        }
        if let Some(taken) = taken {
            formed.hold(taken, mirror).await?;
        }
        self.counters.holds(mirror.first().held().await?.slot_bytes);
        Ok(())
    }
}

impl Ring {
    /// Copies the values of the rank `source` to all others.
    async fn copy_values(
        &self,
        source: usize,
        mirror: &dyn Mirror,
        made: StepsMade,
    ) -> Result<(), Lost> {
        let MirrorState {
            mut values,
            updates,
            made_in,
        } = mirror.state().await?;
        values.extend(in_parts(updates));
        values.extend(in_parts(made_in.0));
        self.play(self.group.broadcast(source, &mut values)).await?;
        let made_in = Epoch(of_parts(&values.split_off(values.len() - PARTS)));
        let parts = values.split_off(values.len() - PARTS);
        let state = MirrorState {
            values,
            updates: match planted!(UpdatesNotShared) {
                true => 0,
                false => of_parts(&parts),
            },
            made_in,
        };
        match source == self.group.rank() {
            true => mirror.note_made(made).await?,
            false => mirror.set_state(state, made).await?,
        }
        Ok(())
    }
}

/// The number of 16-bit parts in which a count is sent among numbers.
const PARTS: usize = 4;

fn in_parts(count: u64) -> [f32; PARTS] {
    std::array::from_fn(|part| f32::from((count >> (16 * part)) as u16))
}

fn of_parts(parts: &[f32]) -> u64 {
    let parts = parts.iter().rev();
    parts.fold(0, |count, part| count << 16 | u64::from(*part as u16))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_travel_among_numbers() {
        for count in [0, 1, 65_535, 65_536, 1 << 40, u64::MAX] {
            assert_eq!(of_parts(&in_parts(count)), count);
        }
    }
}
