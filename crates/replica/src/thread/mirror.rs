//! Commands of strategies without servers to the model's thread.

use std::ops::Range;

use async_trait::async_trait;
use shared_proto::payload::Elements;
use variables::{BucketedGradients, VariablesError};

use super::{Command, ModelReplica};
use crate::error::ReplicaError;
use crate::filling::Filling;
use crate::mirror::{
    DeviceSteps, FirstReplica, Held, InBuckets, Mirror, MirrorState, SlotShare, StageSteps,
    StepsMade, ValuesId,
};
use crate::mirrored::{MirrorCommand, Values};
use crate::rounds::Others;
use crate::step::{Computed, Positions, Step};

impl ModelReplica {
    /// Returns the values of all variables.
    pub(crate) async fn values(&self) -> Result<Vec<Elements>, ReplicaError> {
        self.on_values(|values| values.all()).await
    }

    /// Calls `act` with the values, on their thread.
    async fn on_values<T: Send + 'static>(
        &self,
        act: impl FnOnce(&mut Values) -> Result<T, VariablesError> + Send + 'static,
    ) -> Result<T, ReplicaError> {
        self.ask(|reply| Command::Mirror(MirrorCommand::new(act, reply)))
            .await
    }
}

#[async_trait(?Send)]
impl Mirror for ModelReplica {
    fn first(&self) -> &dyn FirstReplica {
        self
    }

    async fn update(
        &self,
        gradient: BucketedGradients,
        made: StepsMade,
    ) -> Result<BucketedGradients, ReplicaError> {
        self.on_values(move |values| values.update(gradient, made))
            .await
    }

    async fn make_update(&self, new: Vec<f32>, made: StepsMade) -> Result<Vec<f32>, ReplicaError> {
        self.on_values(move |values| values.make(new, made)).await
    }

    async fn scale_learning_rate(&self, factor: f64) -> Result<(), ReplicaError> {
        self.on_values(move |values| {
            values.scale_learning_rate(factor);
            Ok(())
        })
        .await
    }

    async fn note_made(&self, made: StepsMade) -> Result<(), ReplicaError> {
        self.on_values(move |values| {
            values.note_made(made);
            Ok(())
        })
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

    fn fills_buckets(&self) -> bool {
        self.fills_buckets
    }

    async fn compute_in_buckets(
        &self,
        filling: Filling,
        positions: Positions,
        step: Step,
    ) -> Result<InBuckets, ReplicaError> {
        self.ask(|reply| Command::ComputeInBuckets(positions, step, filling, reply))
            .await
    }

    async fn state(&self) -> Result<MirrorState, ReplicaError> {
        self.on_values(|values| values.state()).await
    }

    async fn set_state(&self, state: MirrorState, made: StepsMade) -> Result<(), ReplicaError> {
        self.on_values(move |values| values.set_state(&state, made))
            .await
    }

    async fn made(&self) -> Result<Option<StepsMade>, ReplicaError> {
        self.on_values(|values| values.made()).await
    }

    fn device_steps(&self) -> Option<&dyn DeviceSteps> {
        self.steps_on_device.then_some(self)
    }
}

#[async_trait(?Send)]
impl FirstReplica for ModelReplica {
    async fn swap_averages(&self) -> Result<(), ReplicaError> {
        self.on_values(|values| values.swap_averages()).await
    }

    async fn bucketed_gradients(&self) -> Result<Vec<Elements>, ReplicaError> {
        self.ask(Command::BucketedGradients).await
    }

    async fn gradient_order(&self) -> Result<Vec<usize>, ReplicaError> {
        self.ask(Command::GradientOrder).await
    }

    async fn prepare_update(
        &self,
        gradient: Option<Vec<f32>>,
        made: StepsMade,
    ) -> Result<Vec<f32>, ReplicaError> {
        self.on_values(move |values| values.prepare(gradient, made))
            .await
    }

    async fn held(&self) -> Result<Held, ReplicaError> {
        self.on_values(|values| Ok(values.held())).await
    }

    async fn slots(
        &self,
        range: Range<usize>,
        of: ValuesId,
        before: bool,
    ) -> Result<Vec<f32>, ReplicaError> {
        self.on_values(move |values| values.slots(&range, of, before))
            .await
    }

    async fn hold(
        &self,
        share: SlotShare,
        ranges: Vec<Range<usize>>,
        slots: Option<Vec<Vec<f32>>>,
    ) -> Result<(), ReplicaError> {
        self.on_values(move |values| values.hold(share, &ranges, slots.as_deref()))
            .await
    }

    async fn state_with(&self, slots: Vec<f32>) -> Result<MirrorState, ReplicaError> {
        self.on_values(move |values| values.state_with(slots)).await
    }

    async fn forget(&self) -> Result<(), ReplicaError> {
        self.on_values(|values| {
            values.forget();
            Ok(())
        })
        .await
    }

    fn stages(&self) -> Option<&dyn StageSteps> {
        (self.stage_devices > 0).then_some(self)
    }
}
