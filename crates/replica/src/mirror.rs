//! The interface of replicas for strategies without servers: they keep the values themselves.

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

/// A replica that keeps the values and the optimizer's state between steps. All replicas of a job have bitwise equal
/// values.
#[async_trait(?Send)]
pub trait Mirror {
    /// Returns the replica on the first device. Only this replica evaluates, has stages of a model, and shares out the
    /// optimizer's state with other workers.
    fn first(&self) -> &dyn FirstReplica;

    /// Updates the values with a gradient, which has the elements of all variables that are not frozen. The values then
    /// have the steps `made`. Returns the gradient's memory for reuse.
    async fn update(
        &self,
        gradient: BucketedGradients,
        made: StepsMade,
    ) -> Result<BucketedGradients, ReplicaError>;

    /// Makes the update that [`FirstReplica::prepare_update`] has prepared. `values` has the new values of all
    /// elements. Returns the memory of `values` for reuse.
    async fn make_update(
        &self,
        values: Vec<f32>,
        made: StepsMade,
    ) -> Result<Vec<f32>, ReplicaError>;

    /// Sets the factor by which later updates multiply the learning rate of the job.
    async fn scale_learning_rate(&self, factor: f64) -> Result<(), ReplicaError>;

    /// Records that the values have these steps, although there was no update.
    async fn note_made(&self, made: StepsMade) -> Result<(), ReplicaError>;

    /// Computes like [`Replica::compute`](super::Replica::compute), together with `others`, the other replicas of the
    /// same step. Batch normalisation uses the mean and the variance over the samples of all these replicas. There must
    /// be samples.
    async fn compute_with(
        &self,
        others: Others,
        positions: Positions,
        step: Step,
    ) -> Result<Computed, ReplicaError>;

    /// Returns whether [`Self::compute_in_buckets`] is possible.
    fn fills_buckets(&self) -> bool;

    /// Computes like [`Replica::compute`](super::Replica::compute), and fills buckets with the gradients during the
    /// backward pass. There must be samples.
    async fn compute_in_buckets(
        &self,
        filling: Filling,
        positions: Positions,
        step: Step,
    ) -> Result<InBuckets, ReplicaError>;

    /// Returns the values and the optimizer's state. If the job shares out the optimizer's state, returns only the part
    /// of it that all replicas have.
    async fn state(&self) -> Result<MirrorState, ReplicaError>;

    /// Takes over the state of another replica. If the job shares out the optimizer's state, `state` either has all
    /// slots, which this replica then holds, or none.
    async fn set_state(&self, state: MirrorState, made: StepsMade) -> Result<(), ReplicaError>;

    /// Returns the steps that the values have; `None` if they are initial values, or were overwritten.
    async fn made(&self) -> Result<Option<StepsMade>, ReplicaError>;

    /// Returns the interface for steps with gradients that stay on the device; `None` by default.
    fn device_steps(&self) -> Option<&dyn DeviceSteps> {
        None
    }
}

/// The replica on the first device of a worker. Only this replica has stages of a model, evaluates, and shares out the
/// optimizer's state with other workers. In that state, indices of elements count over all variables that are not
/// frozen. A vector of slots has all slots of the first element, then those of the second, and so on.
#[async_trait(?Send)]
pub trait FirstReplica {
    /// Swaps the weights with their moving averages, if the job keeps averages.
    async fn swap_averages(&self) -> Result<(), ReplicaError>;

    /// Returns the gradients of the newest step that was computed in buckets, in the form in which
    /// [`Replica::compute`](super::Replica::compute) returns them. They are kept until the next command on the values.
    async fn bucketed_gradients(&self) -> Result<Vec<Elements>, ReplicaError>;

    /// Returns the indices of the variables whose gradients were complete before the backward pass ended, in the order
    /// of completion, in the newest step that was computed in buckets.
    async fn gradient_order(&self) -> Result<Vec<usize>, ReplicaError>;

    /// Prepares an update: returns the new values of the elements that this replica holds, in the vector with their
    /// gradient. The values do not change until [`Mirror::make_update`] makes the update. The next call replaces it.
    /// The values will then have the steps `made`. `None` prepares a step that changes no values.
    async fn prepare_update(
        &self,
        gradient: Option<Vec<f32>>,
        made: StepsMade,
    ) -> Result<Vec<f32>, ReplicaError>;

    /// Describes the slots and the prepared update that this replica has.
    async fn held(&self) -> Result<Held, ReplicaError>;

    /// Returns the slots of a range of elements: those that belong to the present values, or, if `of` names the values
    /// of the prepared update, those after this update. If `before`, returns the slots of the previous share.
    async fn slots(
        &self,
        range: Range<usize>,
        of: ValuesId,
        before: bool,
    ) -> Result<Vec<f32>, ReplicaError>;

    /// Replaces the share that this replica holds by `share`, which has these ranges of elements. `slots` has the slots
    /// of each range; with `None`, they are initial. A prepared update can no longer be made. The previous slots, and
    /// that update, are kept for [`Self::slots`] until the next update.
    async fn hold(
        &self,
        share: SlotShare,
        ranges: Vec<Range<usize>>,
        slots: Option<Vec<Vec<f32>>>,
    ) -> Result<(), ReplicaError>;

    /// Returns the values with `slots`, the slots of all elements, in the form that [`Mirror::state`] has if the job
    /// does not share out the optimizer's state.
    async fn state_with(&self, slots: Vec<f32>) -> Result<MirrorState, ReplicaError>;

    /// Forgets which steps the values have, and their slots. This is called if no member has some of the slots that
    /// belong to the values.
    async fn forget(&self) -> Result<(), ReplicaError>;

    /// Returns the interface for steps that compute some stages of the model; `None` by default.
    fn stages(&self) -> Option<&dyn StageSteps> {
        None
    }
}

/// A replica that computes some stages of the model. Other workers of its stage group compute the rest.
#[async_trait(?Send)]
pub trait StageSteps {
    /// Returns the number of devices of this worker.
    fn devices(&self) -> usize;

    /// Takes the place with this index in a stage group, and with it some of the stages. `None` gives the place and the
    /// stages back.
    async fn take_place(&self, place: Option<usize>) -> Result<(), ReplicaError>;

    /// Computes like [`Replica::compute`](super::Replica::compute), together with the other workers of the stage group.
    /// There must be samples. The loss and the norm are those of the whole group. The gradients of variables in other
    /// workers' stages have no elements.
    async fn compute_in_stages(
        &self,
        neighbours: Neighbours,
        positions: Positions,
        step: Step,
    ) -> Result<Computed, ReplicaError>;
}

/// A replica that can make steps with gradients that stay in the device's memory.
#[async_trait(?Send)]
pub trait DeviceSteps {
    /// Returns whether the device has memory of its own, so that steps on it need fewer copies.
    fn saves_copies(&self) -> bool;

    /// Computes like [`Replica::compute`](super::Replica::compute), but keeps the gradients of variables on the device
    /// until the next step or command on the values. There must be samples.
    async fn compute_on_device(
        &self,
        positions: Positions,
        step: Step,
    ) -> Result<Computed, ReplicaError>;

    /// Updates the values with the kept gradients. The values then have the steps `made`.
    async fn update_on_device(&self, made: StepsMade) -> Result<(), ReplicaError>;

    /// Returns the kept gradients.
    async fn gradients_on_device(&self) -> Result<Vec<Elements>, ReplicaError>;

    /// Returns the interface for sums among the devices of several workers; `None` by default.
    fn device_group(&self) -> Option<&dyn DeviceGroup> {
        None
    }
}

/// A replica whose device can add up gradients with the devices of other workers, without a copy on the host. If a
/// member of the group dies, the operations of the other members may never return. Dropping a future cancels its
/// operation.
#[async_trait(?Send)]
pub trait DeviceGroup {
    /// Returns a name that no other device has, on any machine.
    fn device(&self) -> String;

    /// Returns the id of a new group.
    async fn new_group(&self) -> Result<Bytes, GroupError>;

    /// Leaves the present group, and joins the group `id` as rank `rank` of `ranks`. Returns once all ranks have
    /// joined.
    async fn join_group(&self, id: Bytes, rank: usize, ranks: usize) -> Result<(), GroupError>;

    /// Leaves the group, if the replica is in one.
    async fn leave_group(&self) -> Result<(), ReplicaError>;

    /// Replaces the kept gradients by the sum over the group, in which each replica multiplies its gradients by its
    /// `part`. A replica with the part 0 adds zeros, even if it keeps no gradients. After an error or a cancellation,
    /// the replica is in no group, and the kept gradients are undefined.
    async fn add_up(&self, part: f64) -> Result<(), GroupError>;
}

/// The failure of an operation on the devices of several workers.
#[derive(Debug, thiserror::Error)]
pub enum GroupError {
    /// This replica or its device has failed.
    #[error(transparent)]
    Own(#[from] ReplicaError),
    /// Another worker or the network may be the cause.
    #[error("{0}")]
    Peer(ReplicaError),
}

/// The result of a step whose gradients are in buckets.
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

/// A replica's part of the optimizer's state, in a job that shares it out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// The replica's values; `None` if they are initial values, or were overwritten.
    pub values: Option<ValuesId>,
    /// The number of updates that made the values.
    pub updates: u64,
    /// The share of the slots that the replica holds.
    pub share: Option<SlotShare>,
    /// The values that the prepared update would make.
    pub prepared: Option<ValuesId>,
    /// The share that the replica held before `share`; `None` if it has made an update since.
    pub share_before: Option<SlotShare>,
    /// The values that the update prepared with the previous share would have made.
    pub prepared_before: Option<ValuesId>,
    /// The memory of the held slots, without moving averages.
    pub slot_bytes: usize,
}

/// A share of the slots, as a replica holds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotShare {
    /// The values to which the slots belong.
    pub of: ValuesId,
    /// The rank that got this share.
    pub rank: usize,
    /// The number of ranks among which the slots were shared out.
    pub ranks: usize,
}

/// The identity of values within a run. A ring has made these values in a step, or has begun with them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ValuesId {
    /// The ring.
    pub ring: Epoch,
    /// The number of steps that the values have.
    pub clock: Clock,
}

/// The values of a replica, and the optimizer's state.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MirrorState {
    /// The elements of all variables, in order; then, for each variable, its slots, unless the job shares them out, and
    /// its moving averages.
    pub values: Vec<f32>,
    /// The number of updates that made the values.
    pub updates: u64,
    /// The ring that made the values, or that began with them.
    pub made_in: Epoch,
}

/// The steps that a replica's values have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepsMade {
    /// The run that made the steps.
    pub run: RunNumber,
    /// The ring that made the newest of these steps.
    pub ring: Epoch,
    /// The number of steps.
    pub clock: Clock,
}

impl StepsMade {
    /// Returns the identity of the values that the newest of these steps makes.
    pub(crate) fn values(&self) -> ValuesId {
        ValuesId {
            ring: self.ring,
            clock: self.clock,
        }
    }
}
