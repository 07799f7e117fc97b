//! The interface of replicas that keep the values themselves.

use std::ops::Range;

use async_trait::async_trait;
use bytes::Bytes;
use shared_proto::ids::{Clock, Epoch, RunNumber};
use shared_proto::payload::Elements;
use variables::BucketedGradients;

use super::error::ReplicaError;
use super::filling::Filling;
use super::neighbours::Neighbours;
use super::rounds::Others;
use super::step::{Computed, Positions, Step};

/// A replica that keeps the values between steps, with the optimizer's state: all replicas of a job hold the same bits.
#[async_trait(?Send)]
pub trait Mirror {
    /// Returns the replica on the first device. It alone evaluates, has stages of a model, and shares out the optimizer's state with
    /// other workers.
    fn first(&self) -> &dyn FirstReplica;

    /// Updates the values by the gradient of the step before `made`, which has the elements of all variables that are not
    /// frozen. Returns the memory of the gradient.
    async fn update(
        &self,
        gradient: BucketedGradients,
        made: StepsMade,
    ) -> Result<BucketedGradients, ReplicaError>;

    /// Makes the update that [`FirstReplica::prepare_update`] has prepared. `values` has the new values of all elements. Returns its
    /// memory.
    async fn make_update(
        &self,
        values: Vec<f32>,
        made: StepsMade,
    ) -> Result<Vec<f32>, ReplicaError>;

    /// Makes later updates with this factor of the learning rate.
    async fn scale_learning_rate(&self, factor: f64) -> Result<(), ReplicaError>;

    /// Notes that the values have these steps, although there was no update.
    async fn note_made(&self, made: StepsMade) -> Result<(), ReplicaError>;

    /// Computes as [`Replica::compute`](super::Replica::compute) does, together with `others` that compute the same step: batch
    /// normalisation takes the mean and the variance over the samples of all. There must be samples.
    async fn compute_with(
        &self,
        others: Others,
        positions: Positions,
        step: Step,
    ) -> Result<Computed, ReplicaError>;

    /// Returns whether [`Self::compute_in_buckets`] is possible.
    fn fills_buckets(&self) -> bool;

    /// Computes as [`Replica::compute`](super::Replica::compute) does, and fills buckets with the gradients meanwhile. There must be
    /// samples.
    async fn compute_in_buckets(
        &self,
        filling: Filling,
        positions: Positions,
        step: Step,
    ) -> Result<InBuckets, ReplicaError>;

    /// Returns the values and the optimizer's state; of a state that is shared out, only what each replica has.
    async fn state(&self) -> Result<MirrorState, ReplicaError>;

    /// Takes the values of another replica. If the optimizer's state is shared out, `state` may have all of it, which is then held, or
    /// only what each replica has.
    async fn set_state(&self, state: MirrorState, made: StepsMade) -> Result<(), ReplicaError>;

    /// Returns the steps that the values have; none if they are initial values, or were overwritten.
    async fn made(&self) -> Result<Option<StepsMade>, ReplicaError>;

    /// Returns the replica as one with gradients that can stay on its device. Returns none by default.
    fn device_steps(&self) -> Option<&dyn DeviceSteps> {
        None
    }
}

/// The replica on the first device of a worker. It alone has stages of a model, evaluates, and shares out the optimizer's state with other
/// workers. In that state, elements are numbered over all variables that are not frozen; in vectors of slots, those of an element follow each
/// other.
#[async_trait(?Send)]
pub trait FirstReplica {
    /// Exchanges the weights and their moving averages, if the job keeps averages.
    async fn swap_averages(&self) -> Result<(), ReplicaError>;

    /// Returns the gradients of the newest step that was computed in buckets, as [`Replica::compute`](super::Replica::compute) does. They are
    /// kept until the next command on the values.
    async fn bucketed_gradients(&self) -> Result<Vec<Elements>, ReplicaError>;

    /// Returns the variables with gradients that were complete before the backward pass ended, in the order of completion. They are
    /// those of the newest step that was computed in buckets.
    async fn gradient_order(&self) -> Result<Vec<usize>, ReplicaError>;

    /// Prepares the update of the step before `made`. The vector has the gradient of the elements that this replica holds; afterwards
    /// it has their new values. Nothing else changes, and a later update may be prepared instead. Without a gradient the step
    /// changes no values. [`Mirror::make_update`] makes it.
    async fn prepare_update(
        &self,
        gradient: Option<Vec<f32>>,
        made: StepsMade,
    ) -> Result<Vec<f32>, ReplicaError>;

    /// Returns the slots and the prepared update that this replica has.
    async fn held(&self) -> Result<Held, ReplicaError>;

    /// Returns the slots of a range of elements at these values, the present ones or those of the prepared update. They are those of the
    /// present share, or of the one before.
    async fn slots(
        &self,
        range: Range<usize>,
        of: ValuesId,
        before: bool,
    ) -> Result<Vec<f32>, ReplicaError>;

    /// Replaces the ranges of elements that this replica holds, in this share. `slots` has the slots of each range; `None` gives them their
    /// initial values. A prepared update is given up. The slots before are kept until an update is made with these.
    async fn hold(
        &self,
        share: SlotShare,
        ranges: Vec<Range<usize>>,
        slots: Option<Vec<Vec<f32>>>,
    ) -> Result<(), ReplicaError>;

    /// Returns the values with these slots of all elements, in the form of a replica that has all of the state.
    async fn state_with(&self, slots: Vec<f32>) -> Result<MirrorState, ReplicaError>;

    /// Forgets the values, because no member has some of the slots that belong to them.
    async fn forget(&self) -> Result<(), ReplicaError>;

    /// Returns the replica as one that can compute some stages of the model. Returns none by default.
    fn stages(&self) -> Option<&dyn StageSteps> {
        None
    }
}

/// A replica that computes some stages of the model, while others of its stage group compute the rest.
#[async_trait(?Send)]
pub trait StageSteps {
    /// Returns the number of devices.
    fn devices(&self) -> usize;

    /// Takes a place in a stage group, from 0, and with it stages; or gives all stages back.
    async fn take_place(&self, place: Option<usize>) -> Result<(), ReplicaError>;

    /// Computes as [`Replica::compute`](super::Replica::compute) does, together with the other workers of the stage group. There must be
    /// samples. The loss and the norm are those of the group; the gradients of variables of other workers' stages have no elements.
    async fn compute_in_stages(
        &self,
        neighbours: Neighbours,
        positions: Positions,
        step: Step,
    ) -> Result<Computed, ReplicaError>;
}

/// A replica that can make steps with gradients that stay in the memory of its device.
#[async_trait(?Send)]
pub trait DeviceSteps {
    /// Returns whether the device has memory of its own, so that steps on it need fewer copies.
    fn saves_copies(&self) -> bool;

    /// Computes as [`Replica::compute`](super::Replica::compute) does, and keeps the gradients of variables until the next step or command on
    /// the values. There must be samples.
    async fn compute_on_device(
        &self,
        positions: Positions,
        step: Step,
    ) -> Result<Computed, ReplicaError>;

    /// Updates the values by the kept gradients, for the step before `made`.
    async fn update_on_device(&self, made: StepsMade) -> Result<(), ReplicaError>;

    /// Returns the kept gradients.
    async fn gradients_on_device(&self) -> Result<Vec<Elements>, ReplicaError>;

    /// Returns the replica as one of a group with the replicas of other workers. Returns none by default.
    fn device_group(&self) -> Option<&dyn DeviceGroup> {
        None
    }
}

/// A replica on a device that can add up gradients with the devices of other workers, without a copy on the host. If a member of the group
/// dies, the operations of the others may never return. Dropping their futures cancels them.
#[async_trait(?Send)]
pub trait DeviceGroup {
    /// Returns the name of the device, which no other device has.
    fn device(&self) -> String;

    /// Returns the id of a new group.
    async fn new_group(&self) -> Result<Bytes, GroupError>;

    /// Joins a group as one of `ranks` replicas, and leaves the one before. Returns once all have joined.
    async fn join_group(&self, id: Bytes, rank: usize, ranks: usize) -> Result<(), GroupError>;

    /// Leaves the group, if the replica is in one.
    async fn leave_group(&self) -> Result<(), ReplicaError>;

    /// Replaces the kept gradients by the sum of all replicas' gradients, each times its `part`. A replica with the part 0 adds zeros, whatever
    /// it keeps. After an error or a cancellation the replica is in no group, and the kept gradients are undefined.
    async fn add_up(&self, part: f64) -> Result<(), GroupError>;
}

/// The failure of an operation of several workers' devices.
#[derive(Debug, thiserror::Error)]
pub enum GroupError {
    /// This replica or its device has failed.
    #[error(transparent)]
    Own(#[from] ReplicaError),
    /// Another worker or the network may be the cause.
    #[error("{0}")]
    Peer(ReplicaError),
}

/// The result of a step with gradients that are in buckets.
#[derive(Debug)]
pub struct InBuckets {
    /// The result, without the gradients of variables.
    pub computed: Computed,
    /// False if the pass added to a gradient that was already in its bucket; the buckets are then wrong.
    pub complete: bool,
}

impl InBuckets {
    /// The result of a step without samples.
    pub fn nothing() -> Self {
        Self {
            computed: Computed::nothing(),
            complete: true,
        }
    }
}

/// The part that a replica has of an optimizer's state that is shared out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// The values of the replica; none if they are initial values, or were overwritten.
    pub values: Option<ValuesId>,
    /// The number of updates that made them.
    pub updates: u64,
    /// The slots that it holds.
    pub share: Option<SlotShare>,
    /// The values that the prepared update would make.
    pub prepared: Option<ValuesId>,
    /// The slots that it held before these, if it has made no update since.
    pub share_before: Option<SlotShare>,
    /// The values that an update with those would have made.
    pub prepared_before: Option<ValuesId>,
    /// The memory of the slots.
    pub slot_bytes: usize,
}

/// The slots that a replica holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotShare {
    /// The values that they belong to.
    pub of: ValuesId,
    /// The rank to which they were given.
    pub rank: usize,
    /// The number of ranks.
    pub ranks: usize,
}

/// Values of a run: those that a ring has made with a step, or has begun with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ValuesId {
    /// The ring.
    pub ring: Epoch,
    /// The number of steps that they have.
    pub clock: Clock,
}

/// The values of a replica, and the optimizer's state.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MirrorState {
    /// The elements of all variables in the order of their numbers, then all slots.
    pub values: Vec<f32>,
    /// The number of updates that made them.
    pub updates: u64,
    /// The ring that made them, or that has begun with them.
    pub made_in: Epoch,
}

/// The steps that a replica's values have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepsMade {
    /// The run that made them.
    pub run: RunNumber,
    /// The ring that made the newest of them.
    pub ring: Epoch,
    /// Their number.
    pub clock: Clock,
}

impl StepsMade {
    /// Returns the values that the newest of these steps makes.
    pub(crate) fn values(&self) -> ValuesId {
        ValuesId {
            ring: self.ring,
            clock: self.clock,
        }
    }
}
