//! The kinds of steps, and the place of a step's gradients between `compute` and `push`.

use replica::{DeviceSteps, Mirror, Positions, ReplicaError};
use shared_proto::ids::Clock;
use shared_proto::job::BatchNorm;
use shared_proto::step::Gradients;

use super::Mirrored;
use super::buckets::{Summed, whole};
use super::devices::device;
use super::ring::Ring;
use crate::strategy::StrategyError;

/// The way in which this member computes a step.
pub(super) enum StepKind<'a> {
    /// Its layers add up numbers with those of the other members.
    Synchronised,
    /// Its gradients stay on the device.
    OnDevice(&'a dyn DeviceSteps),
    /// Its gradients are sent in buckets while the replica computes.
    InBuckets,
    /// The other members do not wait for this one if it is late.
    UnlessLate,
    /// It has no samples.
    Nothing,
    /// It computes some stages of the model, and other members the rest.
    InStages,
    /// The replica computes it without the other members.
    Whole,
}

/// The place of the gradients of a computed step.
pub(super) enum Unpushed {
    /// They are in the worker's memory.
    InMemory,
    /// They are in buckets, of which all but the last are added up.
    InBuckets(Summed),
    /// They are on the device of the only member.
    OnDevice,
    /// They are on the devices of the members, which add them up. This member may have no samples.
    InGroup,
    /// There are none, because the step was closed before. The mean gradient of the other members is known.
    Late,
}

impl Unpushed {
    /// Returns the gradients of a step with values that are not finite. Fetches those of the variables from the replica
    /// if buckets or the device hold them. Gradients in buckets no longer count.
    pub(super) async fn take_back(
        &mut self,
        mut gradients: Gradients,
        samples: u64,
        mirror: &dyn Mirror,
    ) -> Result<Gradients, ReplicaError> {
        match self {
            Self::InMemory | Self::Late => {}
            Self::InBuckets(summed) => {
                summed.take_back();
                gradients = whole(gradients, samples, mirror).await?;
            }
            Self::OnDevice | Self::InGroup => {
                gradients.values = device(mirror)?.gradients_on_device().await?;
            }
        }
        Ok(gradients)
    }
}

impl Mirrored {
    /// Returns the way in which this member computes a step with these samples in its present ring.
    pub(super) fn kind_of_step<'a>(
        &self,
        positions: &Positions,
        mirror: &'a dyn Mirror,
    ) -> StepKind<'a> {
        if self.batch_norm == BatchNorm::Synchronised {
            return StepKind::Synchronised;
        }
        match self.device_steps(mirror) {
            Some(device) if !positions.is_empty() => StepKind::OnDevice(device),
            _ if self.ring.as_ref().is_some_and(Ring::has_buckets) => StepKind::InBuckets,
            _ if self.backup.has_some() => StepKind::UnlessLate,
            _ if positions.is_empty() => StepKind::Nothing,
            _ if self.stage_groups.workers > 1 => StepKind::InStages,
            _ => StepKind::Whole,
        }
    }

    /// Takes the gradients of the step at `clock`, which has `samples` samples.
    pub(super) fn take_unpushed(
        &mut self,
        clock: Clock,
        samples: u64,
        mirror: &dyn Mirror,
    ) -> Result<Unpushed, StrategyError> {
        let unpushed = self.unpushed.take();
        let unpushed = unpushed.filter(|(computed, _)| *computed == clock);
        let unpushed = unpushed.map_or(Unpushed::InMemory, |(_, unpushed)| unpushed);
        let in_group = self.ring.as_ref().is_some_and(Ring::has_device_group);
        let stays = self.device_steps(mirror).is_some();
        match (unpushed, in_group) {
            (Unpushed::OnDevice, true) if stays => Ok(Unpushed::InGroup),
            (Unpushed::InMemory, true) if stays && samples == 0 => Ok(Unpushed::InGroup),
            (Unpushed::OnDevice, false) if stays => Ok(Unpushed::OnDevice),
            (unpushed @ (Unpushed::InMemory | Unpushed::InBuckets(_) | Unpushed::Late), false) => {
                Ok(unpushed)
            }
            _ => {
                let why = "the ring has changed since the step was computed";
                Err(StrategyError::Abandoned(why.to_owned()))
            }
        }
    }
}
