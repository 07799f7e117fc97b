//! The interface of replicas that keep the values themselves.

use async_trait::async_trait;
use shared_proto::ids::{Clock, Epoch, RunNumber};

use super::error::ReplicaError;
use super::rounds::Others;
use super::step::{Computed, Positions, Step};

/// A replica that keeps the values between steps, with the optimizer's state: all replicas of a job hold the same bits.
#[async_trait(?Send)]
pub trait Mirror {
    /// Updates the values by the gradient of the step before `made`, which has the elements of all variables that are not
    /// frozen, in the order of their numbers. Returns the memory of the gradient.
    async fn update(&self, gradient: Vec<f32>, made: StepsMade) -> Result<Vec<f32>, ReplicaError>;

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

    /// Returns the values and the optimizer's state.
    async fn state(&self) -> Result<MirrorState, ReplicaError>;

    /// Takes the values of another replica.
    async fn set_state(&self, state: MirrorState, made: StepsMade) -> Result<(), ReplicaError>;

    /// Returns the steps that the values have; none if they are initial values, or were overwritten.
    async fn made(&self) -> Result<Option<StepsMade>, ReplicaError>;

    /// Exchanges the weights and their moving averages, if the job keeps averages.
    async fn swap_averages(&self) -> Result<(), ReplicaError>;
}

/// The values of a replica, and the optimizer's state.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MirrorState {
    /// The elements of all variables in the order of their numbers, then all slots.
    pub values: Vec<f32>,
    /// The number of updates that made them.
    pub updates: u64,
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
