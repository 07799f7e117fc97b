//! What strategies without servers ask of a model replica.

use std::ops::Range;

use async_trait::async_trait;
use shared_proto::payload::Elements;

use super::{Command, ModelReplica};
use crate::replica::error::ReplicaError;
use crate::replica::mirror::{
    Held, Mirror, MirrorState, OptimizerParts, SlotShare, StepsMade, ValuesId,
};
use crate::replica::mirrored::{MirrorCommand, PartsCommand, Reply};
use crate::replica::rounds::Others;
use crate::replica::step::{Computed, Positions, Step};

impl ModelReplica {
    /// Returns the values of all variables.
    pub(in crate::replica) async fn values(&self) -> Result<Vec<Elements>, ReplicaError> {
        self.ask_mirror(MirrorCommand::Values).await
    }

    async fn ask_mirror<T>(
        &self,
        command: impl FnOnce(Reply<T>) -> MirrorCommand,
    ) -> Result<T, ReplicaError> {
        self.ask(|reply| Command::Mirror(command(reply))).await
    }

    async fn ask_parts<T>(
        &self,
        command: impl FnOnce(Reply<T>) -> PartsCommand,
    ) -> Result<T, ReplicaError> {
        self.ask_mirror(|reply| MirrorCommand::Parts(command(reply)))
            .await
    }
}

#[async_trait(?Send)]
impl Mirror for ModelReplica {
    async fn update(&self, gradient: Vec<f32>, made: StepsMade) -> Result<Vec<f32>, ReplicaError> {
        self.ask_mirror(|reply| MirrorCommand::Update(gradient, made, reply))
            .await
    }

    async fn note_made(&self, made: StepsMade) -> Result<(), ReplicaError> {
        self.ask_mirror(|reply| MirrorCommand::NoteMade(made, reply))
            .await
    }

    async fn compute_with(
        &self,
        others: Others,
        positions: Positions,
        step: Step,
    ) -> Result<Computed, ReplicaError> {
        self.ask(|reply| Command::Compute(positions, step, Some(others), reply))
            .await
    }

    async fn state(&self) -> Result<MirrorState, ReplicaError> {
        self.ask_mirror(MirrorCommand::State).await
    }

    async fn set_state(&self, state: MirrorState, made: StepsMade) -> Result<(), ReplicaError> {
        self.ask_mirror(|reply| MirrorCommand::SetState(state, made, reply))
            .await
    }

    async fn made(&self) -> Result<Option<StepsMade>, ReplicaError> {
        self.ask_mirror(MirrorCommand::Made).await
    }

    async fn swap_averages(&self) -> Result<(), ReplicaError> {
        self.ask_mirror(MirrorCommand::SwapAverages).await
    }
}

#[async_trait(?Send)]
impl OptimizerParts for ModelReplica {
    async fn prepare_update(
        &self,
        gradient: Option<Vec<f32>>,
        made: StepsMade,
    ) -> Result<Vec<f32>, ReplicaError> {
        self.ask_parts(|reply| PartsCommand::Prepare(gradient, made, reply))
            .await
    }

    async fn make_update(
        &self,
        values: Vec<f32>,
        made: StepsMade,
    ) -> Result<Vec<f32>, ReplicaError> {
        self.ask_parts(|reply| PartsCommand::Make(values, made, reply))
            .await
    }

    async fn held(&self) -> Result<Held, ReplicaError> {
        self.ask_parts(PartsCommand::Held).await
    }

    async fn slots(&self, range: Range<usize>, of: ValuesId) -> Result<Vec<f32>, ReplicaError> {
        self.ask_parts(|reply| PartsCommand::Slots(range, of, reply))
            .await
    }

    async fn hold(
        &self,
        share: SlotShare,
        ranges: Vec<Range<usize>>,
        slots: Option<Vec<Vec<f32>>>,
    ) -> Result<(), ReplicaError> {
        self.ask_parts(|reply| PartsCommand::Hold(share, ranges, slots, reply))
            .await
    }

    async fn state_with(&self, slots: Vec<f32>) -> Result<MirrorState, ReplicaError> {
        self.ask_parts(|reply| PartsCommand::StateWith(slots, reply))
            .await
    }

    async fn forget(&self) -> Result<(), ReplicaError> {
        self.ask_parts(PartsCommand::Forget).await
    }
}
