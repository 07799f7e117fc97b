//! Training steps with gradients that stay in the memory of the replica's device.

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use candle_core::{Error, Tensor};
use model::candle_error::plain;
use model::tables;
use nn::backward;
use shared_proto::job::Clip;
use shared_proto::payload::Elements;
use shared_proto::step::Gradients;
use variables::{DeviceGradients, UpdateGroups, VariablesError, sum_of_squares};

use super::gpus::{GroupCommunicator, LocalCommunicator, NcclId};
use super::memory::OutOfMemory;
use super::pass::{Begun, loss_value};
use super::{Command, ModelReplica, Thread, nothing};
use crate::error::ReplicaError;
use crate::mirror::{DeviceGroup, DeviceSteps, GroupError, StepsMade};
use crate::mirrored::Reply;
use crate::step::{Computed, Positions, Step};

/// The state of steps on the device.
#[derive(Default)]
pub(super) struct OnDevice {
    groups: Option<Arc<UpdateGroups>>,
    /// The gradients of the newest step that was computed on the device.
    gradients: Option<DeviceGradients>,
    /// The sum of the squares of the gradients of tables' rows.
    squares_of_rows: f64,
    /// The membership in the group of the worker's GPUs.
    communicator: Option<LocalCommunicator>,
    /// The communicator of several workers' GPUs.
    group: Option<GroupCommunicator>,
}

impl OnDevice {
    /// Forgets the gradients.
    pub(super) fn forget(&mut self) {
        self.gradients = None;
    }
}

/// A command of steps on the device.
pub(super) enum DeviceCommand {
    Compute(Positions, Step, Reply<Computed>),
    Update(StepsMade, Reply<()>),
    Gradients(Reply<Vec<Elements>>),
    /// With the id of the group, the rank of this GPU, and the number of ranks.
    JoinLocal(NcclId, usize, usize, Reply<()>),
    ComputePart(PartOfStep, Reply<f64>),
    AddUpLocal(Clip, Reply<f64>),
    NewGroup(GroupReply<Bytes>),
    /// With the id of the group, the rank of this GPU among the GPUs of all workers, and the number of ranks.
    JoinGroup(Bytes, usize, usize, GroupReply<()>),
    LeaveGroup(Reply<()>),
    AddUpInGroup(f64, GroupReply<()>),
}

/// Takes the result of an operation of several workers' GPUs.
type GroupReply<T> = Reply<Result<T, GroupError>>;

/// One device's part of a step that several devices compute. `part` is the fraction of the step's samples that it has.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PartOfStep {
    pub(crate) positions: Positions,
    pub(crate) step: Step,
    pub(crate) part: f64,
}

impl Thread {
    /// Executes a command. A caller that is gone does not need the answer.
    pub(super) fn serve_on_device(&mut self, command: DeviceCommand) {
        match command {
            DeviceCommand::Compute(positions, step, reply) => {
                drop(reply.send(self.compute_on_device(positions, step)));
            }
            DeviceCommand::Update(made, reply) => drop(reply.send(self.update_on_device(made))),
            DeviceCommand::Gradients(reply) => drop(reply.send(self.gradients_on_device())),
            DeviceCommand::JoinLocal(id, rank, ranks, reply) => {
                drop(reply.send(self.join_gpus(id, rank, ranks)));
            }
            DeviceCommand::ComputePart(of, reply) => drop(reply.send(self.compute_part(of))),
            DeviceCommand::AddUpLocal(clip, reply) => drop(reply.send(self.add_up_gradients(clip))),
            DeviceCommand::NewGroup(reply) => {
                drop(reply.send(Ok(GroupCommunicator::new_id())));
            }
            DeviceCommand::JoinGroup(id, rank, ranks, reply) => {
                let joined = self.join_group(&id, (rank, ranks), &|| reply.is_closed());
                drop(reply.send(Ok(joined)));
            }
            DeviceCommand::LeaveGroup(reply) => {
                self.on_device.group = None;
                drop(reply.send(Ok(())));
            }
            DeviceCommand::AddUpInGroup(part, reply) => {
                let added = self.add_up_in_group(part, &|| reply.is_closed());
                drop(reply.send(Ok(added)));
            }
        }
    }

    /// Computes the loss and the gradients of a step. The gradients of variables are kept.
    fn compute_on_device(
        &mut self,
        positions: Positions,
        step: Step,
    ) -> Result<Computed, ReplicaError> {
        let (loss, mut gradients) = self.compute_gradients(positions, step)?;
        gradients.norm = self.clip_gradients(self.job.worker_clip())?;
        Ok(Computed::new(loss_value(&loss)?, gradients))
    }

    /// Computes a part of a step. Keeps the gradients, multiplied by `part`. Returns the loss, multiplied by `part`.
    fn compute_part(&mut self, of: PartOfStep) -> Result<f64, ReplicaError> {
        let groups = self.groups();
        if of.positions.is_empty() {
            let nothing = DeviceGradients::zeros(&groups, &self.variables)?;
            self.on_device.gradients = Some(nothing);
            return Ok(0.0);
        }
        let (loss, _) = self.compute_gradients(of.positions, of.step)?;
        let gradients = self.on_device.gradients.take().ok_or_else(not_kept)?;
        self.on_device.gradients = Some(gradients.times(of.part)?);
        Ok(loss_value(&loss)? * of.part)
    }

    /// Joins the group of the worker's GPUs.
    fn join_gpus(&mut self, id: NcclId, rank: usize, ranks: usize) -> Result<(), ReplicaError> {
        let joined = LocalCommunicator::join(&self.device, id, rank, ranks)?;
        self.on_device.communicator = Some(joined);
        Ok(())
    }

    /// Adds up the kept gradients of all of the worker's GPUs, and clips the sum. Returns the norm of the sum before
    /// clipping.
    fn add_up_gradients(&mut self, clip: Clip) -> Result<f64, ReplicaError> {
        let on_device = &self.on_device;
        let (Some(gradients), Some(communicator)) = (&on_device.gradients, &on_device.communicator)
        else {
            return Err(not_kept().into());
        };
        for vector in gradients.vectors() {
            communicator.add_up(vector)?;
        }
        self.clip_gradients(clip)
    }

    /// Forms a communicator with the GPUs of other workers, in place of the one before.
    fn join_group(
        &mut self,
        id: &[u8],
        place: (usize, usize),
        cancelled: &dyn Fn() -> bool,
    ) -> Result<(), GroupError> {
        self.on_device.group = None;
        let joined = GroupCommunicator::join(&self.device, id, place, cancelled);
        self.on_device.group = Some(joined?);
        Ok(())
    }

    /// Adds up the kept gradients, multiplied by this worker's part, with those of the other workers. A worker with the
    /// part 0 adds zeros. After a failure or a cancellation there is no communicator.
    fn add_up_in_group(
        &mut self,
        part: f64,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<(), GroupError> {
        let mut group = self.on_device.group.take().ok_or_else(no_group)?;
        let own = self.part_of_gradients(part).map_err(of_device)?;
        for vector in own.vectors() {
            group.add_up(vector, cancelled)?;
        }
        if !cancelled() {
            self.on_device.gradients = Some(own);
            self.on_device.group = Some(group);
        }
        Ok(())
    }

    /// Takes the kept gradients, multiplied by `part`. If `part` is 0, returns zeros.
    fn part_of_gradients(&mut self, part: f64) -> candle_core::Result<DeviceGradients> {
        let groups = self.groups();
        match self.on_device.gradients.take() {
            Some(kept) if part > 0.0 => kept.times(part),
            None if part > 0.0 => Err(not_kept()),
            _ => DeviceGradients::zeros(&groups, &self.variables),
        }
    }

    /// Computes the gradients of a step, and keeps those of variables. Returns the loss and the gradients of rows,
    /// without a norm.
    fn compute_gradients(
        &mut self,
        positions: Positions,
        step: Step,
    ) -> Result<(Tensor, Gradients), ReplicaError> {
        self.on_device.forget();
        let groups = self.groups();
        let Begun {
            batches,
            rows,
            step_rows,
        } = self.begin(positions)?;
        let [batch] = &batches[..] else {
            return Err(nothing().into());
        };
        let before = self.variables.measured_on_device()?;
        let passed = self.both_passes(batch, &self.training_pass(step), backward);
        // Also after a failure: the step may be made again with others, and then counts from these values.
        let changes = self.variables.restore_on_device(&before);
        let (loss, store) = passed?;
        // Without the results of the passes, which it would keep.
        let loss = loss.detach();
        let gradients = DeviceGradients::of(&groups, &self.variables, &store, &changes?)?;
        let of_rows = step_rows.gradients(&store)?;
        drop(store);
        self.on_device.squares_of_rows = of_rows.iter().map(|values| sum_of_squares(values)).sum();
        self.on_device.gradients = Some(gradients);
        let gradients = Gradients {
            values: Vec::new(),
            rows: tables::gradients(&rows, of_rows),
            norm: f64::NAN,
        };
        Ok((loss, gradients))
    }

    /// Clips the kept gradients. Returns their norm before clipping.
    fn clip_gradients(&mut self, clip: Clip) -> Result<f64, ReplicaError> {
        let groups = self.groups();
        let gradients = self.on_device.gradients.take().ok_or_else(not_kept)?;
        let norm = gradients.norm(&groups, self.on_device.squares_of_rows)?;
        let clipped = gradients.clipped(&groups, clip, norm)?;
        self.on_device.gradients = Some(clipped);
        Ok(norm)
    }

    /// Updates the variables by the gradients that are kept.
    fn update_on_device(&mut self, made: StepsMade) -> Result<(), ReplicaError> {
        let groups = self.groups();
        let gradients = self.on_device.gradients.take().ok_or_else(not_kept)?;
        let samples = self.description.training_samples;
        self.overwritten = true;
        let mut values = self.mirrored.values(&self.job, &self.variables, samples)?;
        let updated = values.update_on_device(&groups, gradients, made);
        updated.map_err(|error| match error {
            VariablesError::Candle(error) => {
                let step = made.clock.0.saturating_sub(1);
                let missing = OutOfMemory {
                    variables: &self.variables,
                    batch: None,
                    loss: None,
                };
                missing.explain(error, &self.device, step).into()
            }
            error => error.into(),
        })
    }

    /// Returns the gradients that are kept.
    fn gradients_on_device(&mut self) -> Result<Vec<Elements>, ReplicaError> {
        let groups = self.groups();
        let gradients = self.on_device.gradients.as_ref().ok_or_else(not_kept)?;
        Ok(gradients.on_host(&groups, self.description.variables.len())?)
    }

    fn groups(&mut self) -> Arc<UpdateGroups> {
        let groups = &mut self.on_device.groups;
        let new = || Arc::new(UpdateGroups::new(&self.job, &self.variables));
        Arc::clone(groups.get_or_insert_with(new))
    }
}

fn not_kept() -> Error {
    Error::msg(
        "no gradients of a step are kept on the device; this is a fault of the program, please report it",
    )
}

fn no_group() -> ReplicaError {
    ReplicaError::Devices("the GPU is in no group of GPUs".to_owned())
}

/// Returns candle's error as one of this worker's device. Other workers can then continue without this worker.
fn of_device(error: Error) -> ReplicaError {
    ReplicaError::Devices(plain(&error))
}

#[async_trait(?Send)]
impl DeviceSteps for ModelReplica {
    fn saves_copies(&self) -> bool {
        self.on_gpu
    }

    async fn compute_on_device(
        &self,
        positions: Positions,
        step: Step,
    ) -> Result<Computed, ReplicaError> {
        self.ask(|reply| Command::OnDevice(DeviceCommand::Compute(positions, step, reply)))
            .await
    }

    async fn update_on_device(&self, made: StepsMade) -> Result<(), ReplicaError> {
        self.ask(|reply| Command::OnDevice(DeviceCommand::Update(made, reply)))
            .await
    }

    async fn gradients_on_device(&self) -> Result<Vec<Elements>, ReplicaError> {
        self.ask(|reply| Command::OnDevice(DeviceCommand::Gradients(reply)))
            .await
    }

    fn device_group(&self) -> Option<&dyn DeviceGroup> {
        self.unique_name.is_some().then_some(self)
    }
}

#[async_trait(?Send)]
impl DeviceGroup for ModelReplica {
    fn device(&self) -> String {
        self.unique_name.clone().unwrap_or_default()
    }

    async fn new_group(&self) -> Result<Bytes, GroupError> {
        self.ask(|reply| Command::OnDevice(DeviceCommand::NewGroup(reply)))
            .await?
    }

    async fn join_group(&self, id: Bytes, rank: usize, ranks: usize) -> Result<(), GroupError> {
        self.ask(|reply| Command::OnDevice(DeviceCommand::JoinGroup(id, rank, ranks, reply)))
            .await?
    }

    async fn leave_group(&self) -> Result<(), ReplicaError> {
        self.ask(|reply| Command::OnDevice(DeviceCommand::LeaveGroup(reply)))
            .await
    }

    async fn add_up(&self, part: f64) -> Result<(), GroupError> {
        self.ask(|reply| Command::OnDevice(DeviceCommand::AddUpInGroup(part, reply)))
            .await?
    }
}

/// Several replicas, each on a GPU of its own, that add up their gradients on the GPUs.
impl ModelReplica {
    pub(crate) async fn join_gpus(
        &self,
        id: NcclId,
        rank: usize,
        ranks: usize,
    ) -> Result<(), ReplicaError> {
        self.ask(|reply| Command::OnDevice(DeviceCommand::JoinLocal(id, rank, ranks, reply)))
            .await
    }

    pub(crate) async fn compute_part(&self, of: PartOfStep) -> Result<f64, ReplicaError> {
        self.ask(|reply| Command::OnDevice(DeviceCommand::ComputePart(of, reply)))
            .await
    }

    pub(crate) async fn add_up_gradients(&self, clip: Clip) -> Result<f64, ReplicaError> {
        self.ask(|reply| Command::OnDevice(DeviceCommand::AddUpLocal(clip, reply)))
            .await
    }
}
