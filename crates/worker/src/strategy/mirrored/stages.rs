//! A model in stages on several members of a ring. A *stage group* is several consecutive ranks that hold the model together. It computes
//! the samples of its members as one batch. Ranks behind the last whole group are spare: they compute nothing, and make the same updates.
//!
//! Each member has the values of all variables, and so can take any place. A member's gradients are zeros for the
//! variables of the other members of its group, so the sum over the ring is the sum of the groups' gradients.

use std::ops::Range;

use collective::Rank;
use replica::{
    Carried, Carrier, Computed, Ends, Mirror, Neighbours, Positions, ReplicaError, StageSteps, Step,
};
use shared_proto::job::StageGroups;
use shared_proto::planted;

use super::Mirrored;
use super::agreed::StageWaits;
use super::gradient::SampleCounts;
use super::ring::{Lost, Ring};
use crate::strategy::StrategyError;

impl Mirrored {
    /// Returns the sample counts of this member's gradients. Only the first member of a stage group counts the group's
    /// samples.
    pub(super) fn counts(&self, samples: u64) -> SampleCounts {
        let rank = self.ring.as_ref().map_or(0, Ring::rank) as u32;
        let counts = self.stage_groups.place(rank) == 0 || planted!(GroupCountsTwice);
        SampleCounts {
            samples,
            counted: if counts { samples } else { 0 },
        }
    }

    /// Takes the stages of this member's rank in a ring. All members must have the same number of devices: as many as
    /// the rank `with_values`, which has the values, or, if there are no values yet, as many as most members.
    pub(super) async fn take_stages(
        &self,
        ring: &Ring,
        with_values: Option<Rank>,
        mirror: &dyn Mirror,
    ) -> Result<(), Lost> {
        let workers = self.stage_groups.workers;
        if workers == 1 {
            return Ok(());
        }
        let stages = stages(mirror)?;
        let devices = stages.devices() as f64;
        let mut all = vec![0.0; ring.ranks()];
        all[ring.rank()] = devices;
        let all = ring.sum_short(all).await?;
        let expected = match with_values {
            Some(rank) => all[rank],
            None => most_frequent(&all),
        };
        if devices != expected {
            return Err(Lost::Replica(ReplicaError::Devices(format!(
                "this worker has {devices} devices, and others have {expected}; with `strategy.stage_workers = {workers}` all workers must have the same number of devices: set it by --devices"
            ))));
        }
        if let Some(other) = all.iter().position(|other| *other != expected) {
            let found = all[other];
            let why = format!("it has {found} devices, and others have {expected}");
            return Err(Lost::Member(ring.members[other], why));
        }
        let place = ring
            .stage_group(self.stage_groups)
            .map(|group| ring.rank() - group.start);
        match place {
            Some(place) => tracing::info!(place, workers, "in a stage group"),
            None => tracing::info!(workers, "spare: it computes no stages"),
        }
        Ok(stages.take_place(place).await?)
    }

    /// Computes the stages of this member, while the others of its group compute theirs.
    pub(super) async fn compute_in_stages(
        &mut self,
        positions: Positions,
        step: Step,
        mirror: &dyn Mirror,
    ) -> Result<Computed, StrategyError> {
        let (stages, groups) = (stages(mirror)?, self.stage_groups);
        let compute = async |ring: &Ring| {
            let Some(group) = ring.stage_group(groups) else {
                let what = "a spare worker has samples of a step; this is a fault of the program, please report it";
                return Ok(Err(ReplicaError::Chain(what.to_owned())));
            };
            let computed = ring.compute_stages(group, positions, step, stages).await;
            *ring.agreed.in_stages.borrow_mut() = None;
            computed
        };
        Ok(self.in_ring(compute).await??)
    }
}

/// Returns the most frequent number; if several are equally frequent, the first of them.
fn most_frequent(numbers: &[f64]) -> f64 {
    let count = |number: &f64| numbers.iter().filter(|other| *other == number).count();
    // Of equal ones, the last is returned.
    let most = numbers.iter().rev().max_by_key(|number| count(number));
    most.copied().unwrap_or_default()
}

fn stages(mirror: &dyn Mirror) -> Result<&dyn StageSteps, ReplicaError> {
    let missing = || {
        let what = "this replica has no stages, so `strategy.stage_workers` cannot be used with it";
        ReplicaError::Chain(what.to_owned())
    };
    mirror.first().stages().ok_or_else(missing)
}

impl Ring {
    /// Returns the ranks of this member's stage group; `None` if it is spare.
    fn stage_group(&self, groups: StageGroups) -> Option<Range<Rank>> {
        let group = groups.of(self.rank() as u32, self.ranks() as u32)?;
        Some(group.start as Rank..group.end as Rank)
    }

    async fn compute_stages(
        &self,
        group: Range<Rank>,
        positions: Positions,
        step: Step,
        stages: &dyn StageSteps,
    ) -> Result<Result<Computed, ReplicaError>, Lost> {
        let rank = self.rank();
        let (has_before, has_next) = (rank > group.start, rank + 1 < group.end);
        let (neighbours, carrier) = Neighbours::new(has_before, has_next);
        // All members of a group draw the same random numbers.
        let first = self.members.get(group.start);
        let step = Step {
            rank: first.map_or(step.rank, |first| first.id.index),
            ..step
        };
        let carry = self.carry(carrier, group);
        let compute = stages.compute_in_stages(neighbours, positions, step);
        tokio::pin!(carry, compute);
        let mut carried = false;
        loop {
            // If the ring is lost, the ways of the replica close, and its pass fails. If the replica fails, its worker leaves the ring.
            tokio::select! {
                biased;
                computed = &mut compute => match computed {
                    Ok(computed) if !carried => {
                        carry.await?;
                        return Ok(Ok(computed));
                    }
                    computed => return Ok(computed),
                },
                done = &mut carry, if !carried => {
                    done?;
                    carried = true;
                }
            }
        }
    }

    /// Carries the messages of a step between the replica and its neighbours, and then the sums of the group, until the replica asks for no
    /// more.
    async fn carry(&self, carrier: Carrier, group: Range<Rank>) -> Result<(), Lost> {
        let Ok(carried) = carrier.carried.await else {
            // The replica has failed.
            return Ok(());
        };
        let Carried {
            mut before,
            mut next,
            messages,
        } = carried;
        let wait = |ends: &Option<Ends>| ends.as_ref().map(|ends| ends.waits.clone());
        *self.agreed.in_stages.borrow_mut() = Some(StageWaits {
            before: wait(&before),
            next: wait(&next),
        });
        let (rank, mut rounds) = (self.rank(), carrier.rounds);
        let with_before = self.exchange(before.as_mut(), rank.saturating_sub(1), messages);
        let with_next = self.exchange(next.as_mut(), rank + 1, messages);
        tokio::try_join!(with_before, with_next)?;
        *self.agreed.in_stages.borrow_mut() = None;
        while let Some(round) = rounds.next().await {
            let sum = self.group.sum_short_among(group.clone(), round.values);
            let sum = self.play(sum).await?;
            // A pass that has failed does not need the sum.
            drop(round.sum.send(sum));
        }
        Ok(())
    }

    /// Sends `messages` messages to a neighbour, and receives as many, if there is a neighbour.
    async fn exchange(
        &self,
        ends: Option<&mut Ends>,
        peer: Rank,
        messages: usize,
    ) -> Result<(), Lost> {
        let Some(Ends {
            outgoing, incoming, ..
        }) = ends
        else {
            return Ok(());
        };
        let send = async {
            for _ in 0..messages {
                let Some(message) = outgoing.recv().await else {
                    // The replica has failed, which ends the step.
                    return std::future::pending().await;
                };
                self.group.send_message(peer, message).await?;
            }
            Ok(())
        };
        let receive = async {
            for _ in 0..messages {
                let message = self.group.receive_message(peer).await?;
                // A replica that has failed does not need it.
                drop(incoming.send(message).await);
            }
            Ok(())
        };
        self.play(async { tokio::try_join!(send, receive).map(drop) })
            .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_most_members_counts() {
        assert_eq!(most_frequent(&[2.0, 1.0, 1.0]), 1.0);
        assert_eq!(most_frequent(&[1.0, 2.0]), 1.0);
        assert_eq!(most_frequent(&[3.0, 1.0, 2.0, 2.0, 1.0]), 1.0);
    }
}
