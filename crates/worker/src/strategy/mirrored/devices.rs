//! Gradients that stay in the memory of the members' devices. A member that is alone updates its values there. Several members add up
//! their gradients there if the job says so (`strategy.cross_device = "nccl"`), and each makes the same update.
//!
//! The devices' sums do not end if a member dies. So the members also exchange signals over the ring's links before and after a sum, and a member
//! that detects a closed link cancels the sum. The step is then made in the next ring.

use std::pin::pin;
use std::time::Instant;

use bytes::Bytes;
use collective::Rank;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use replica::{DeviceGroup, DeviceSteps, GroupError, Mirror, ReplicaError, StepsMade};
use shared_proto::planted;
use tokio::time::sleep;

use super::Mirrored;
use super::open_step::{Answer, CLOSE};
use super::ring::{Lost, Ring};
use crate::strategy::StrategyError;

/// The time, in leases, within which a member learns that another one is lost.
const LEARNS_WITHIN: u32 = 2;

/// The number of failures in a row, without the loss of a member, after which a member ends.
const MOST_FAILURES: usize = 2;

impl Mirrored {
    /// Returns the replica's interface for gradients on its device, if they can stay there: this member is alone, or
    /// the members' devices form a group that adds them up.
    pub(super) fn device_steps<'a>(&self, mirror: &'a dyn Mirror) -> Option<&'a dyn DeviceSteps> {
        let ring = self.ring.as_ref()?;
        let needed_elsewhere = ring.ranks() > 1 && !ring.has_device_group();
        let steps = mirror.device_steps()?;
        (!needed_elsewhere && self.shares.is_none() && steps.saves_copies()).then_some(steps)
    }

    /// Makes a step together with the other members, with gradients that the devices add up. This member has `samples`
    /// samples.
    pub(super) async fn make_step_on_devices(
        &mut self,
        samples: u64,
        made: StepsMade,
        mirror: &dyn Mirror,
    ) -> Result<(), StrategyError> {
        let begun = Instant::now();
        let device = device(mirror)?;
        let group = group(device)?;
        let add_up = async |ring: &Ring| ring.add_up_on_devices(group, samples).await;
        let summed = self.in_ring(add_up).await?;
        self.device_failures.clear();
        self.counters.reduced(begun.elapsed());
        match summed {
            true => device.update_on_device(made).await?,
            false => mirror.note_made(made).await?,
        }
        Ok(())
    }

    /// Makes the devices of a ring's members a group, if they add up gradients.
    pub(super) async fn form_device_group(
        &self,
        ring: &Ring,
        mirror: &dyn Mirror,
    ) -> Result<(), Lost> {
        if !self.adds_up_on_devices {
            return Ok(());
        }
        let group = group(device(mirror)?)?;
        match ring.ranks() {
            1 => Ok(group.leave_group().await?),
            _ => ring.join_devices(group).await,
        }
    }

    /// Returns the last failure of the members' devices if there were too many in a row.
    pub(super) fn check_devices(&mut self) -> Result<(), ReplicaError> {
        match self.device_failures.len() {
            MOST_FAILURES.. => self.device_failures.pop().map_or(Ok(()), Err),
            _ => Ok(()),
        }
    }
}

impl Ring {
    /// Returns whether the members' devices add up gradients.
    pub(super) fn has_device_group(&self) -> bool {
        self.agreed.has_device_group.get()
    }

    /// Makes the members' devices a group.
    async fn join_devices(&self, group: &dyn DeviceGroup) -> Result<(), Lost> {
        let devices = self.gather(group.device().into()).await?;
        self.check_different(&devices)?;
        let id = match self.rank() {
            0 => group.new_group().await.map_err(Lost::of_devices)?,
            _ => Bytes::new(),
        };
        let id = self.gather(id).await?.swap_remove(0);
        tracing::debug!("the devices of the ring form a group");
        self.run_on_devices(group.join_group(id, self.rank(), self.ranks()))
            .await?;
        self.agreed.has_device_group.set(true);
        Ok(())
    }

    /// Checks that no two members have the same device. Of two such members, the one with the higher rank must leave.
    fn check_different(&self, devices: &[Bytes]) -> Result<(), Lost> {
        let Some((first, second)) = same(devices) else {
            return Ok(());
        };
        let first = self.members[first];
        if second != self.rank() {
            let why = format!("it has the same GPU as {first}");
            return Err(Lost::Member(self.members[second], why));
        }
        Err(Lost::Replica(ReplicaError::no_nccl(&format!(
            "this worker has the same GPU as {first}, and needs one of its own (--device)"
        ))))
    }

    /// Adds up the gradients that the members' devices keep, each times its member's part of all samples. Returns false if there are no
    /// samples; nothing is added up then.
    async fn add_up_on_devices(&self, group: &dyn DeviceGroup, samples: u64) -> Result<bool, Lost> {
        // Each member knows from this that all others have computed.
        let all = self.all_samples(samples).await?;
        if all == 0.0 {
            return Ok(false);
        }
        let part = samples as f64 / all;
        match self.run_on_devices(group.add_up(part)).await {
            Err(Lost::Member(..) | Lost::Over) if planted!(SumOfSome) => Ok(true),
            added => added.map(|()| true),
        }
    }

    /// Runs this member's part of an operation of all members' devices. Returns once rank 0 knows that all parts are done. Until then each
    /// member listens to rank 0, and rank 0 to all others, so a loss ends the operation for all.
    async fn run_on_devices(
        &self,
        part: impl Future<Output = Result<(), GroupError>>,
    ) -> Result<(), Lost> {
        let own = async {
            let Err(failure) = part.await else {
                // Set only now: a member with a hanging device must not count as waiting.
                self.agreed.open.waits.set(true);
                return Ok(());
            };
            if let GroupError::Peer(failure) = &failure {
                let seconds = (LEARNS_WITHIN * self.lease).as_secs_f64();
                tracing::warn!(seconds, "waiting to learn which worker is lost: {failure}");
                self.unless_over(sleep(LEARNS_WITHIN * self.lease)).await?;
            }
            Err(Lost::of_devices(failure))
        };
        let done = match self.rank() {
            0 => self.run_and_release(own).await,
            _ => self.run_until_released(own).await,
        };
        self.agreed.open.waits.set(false);
        done
    }

    /// Runs this member's part as rank 0, and releases the others once all parts are done.
    async fn run_and_release(
        &self,
        own: impl Future<Output = Result<(), Lost>>,
    ) -> Result<(), Lost> {
        let open = &self.agreed.open;
        *open.answers.borrow_mut() = vec![None; self.ranks()];
        let listen = |rank| async move {
            let answer = self.signal_of(rank, Answer::of_signal).await?;
            Ok::<_, Lost>((rank, answer))
        };
        let mut signals: FuturesUnordered<_> = (1..self.ranks()).map(listen).collect();
        let (mut own, mut is_done) = (pin!(own), false);
        while !is_done || !open.missing().is_empty() {
            tokio::select! {
                biased;
                Some(signal) = signals.next() => {
                    let (rank, answer) = signal?;
                    open.note(rank, answer);
                    // The member can still be lost.
                    signals.push(listen(rank));
                }
                done = own.as_mut(), if !is_done => {
                    done?;
                    is_done = true;
                }
            }
        }
        drop(signals);
        for rank in 1..self.ranks() {
            self.play(self.group.send_signal(rank, CLOSE)).await?;
        }
        open.answers.borrow_mut().clear();
        Ok(())
    }

    /// Runs this member's part as a rank other than 0.
    async fn run_until_released(
        &self,
        own: impl Future<Output = Result<(), Lost>>,
    ) -> Result<(), Lost> {
        let own = async {
            own.await?;
            self.answer(Answer::Ready).await
        };
        let released = self.signal_of(0, |signal| (signal == CLOSE).then_some(()));
        tokio::try_join!(own, released).map(drop)
    }

    async fn gather(&self, own: Bytes) -> Result<Vec<Bytes>, Lost> {
        self.play(self.group.gather_bytes(own)).await
    }
}

/// Returns two ranks with the same device, if there are any, in ascending order.
fn same(devices: &[Bytes]) -> Option<(Rank, Rank)> {
    let mut ranks = devices.iter().enumerate();
    ranks.find_map(|(rank, device)| {
        let first = devices.iter().position(|other| other == device)?;
        (first != rank).then_some((first, rank))
    })
}

/// Returns the replica's interface for gradients on its device.
pub(super) fn device(mirror: &dyn Mirror) -> Result<&dyn DeviceSteps, ReplicaError> {
    mirror.device_steps().ok_or_else(impossible)
}

fn group(device: &dyn DeviceSteps) -> Result<&dyn DeviceGroup, ReplicaError> {
    device.device_group().ok_or_else(impossible)
}

fn impossible() -> ReplicaError {
    ReplicaError::no_nccl("this worker's model or device cannot do it")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_members_with_one_device_are_found() {
        let devices = |names: &[&'static str]| -> Vec<Bytes> {
            names
                .iter()
                .map(|name| Bytes::from_static(name.as_bytes()))
                .collect()
        };
        assert_eq!(same(&devices(&["a", "b", "c"])), None);
        assert_eq!(same(&devices(&["a", "b", "a"])), Some((0, 2)));
        assert_eq!(same(&devices(&["a", "b", "b", "a"])), Some((1, 2)));
        assert_eq!(same(&[]), None);
    }
}
