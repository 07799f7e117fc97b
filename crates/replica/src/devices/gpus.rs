//! Sums of gradients that GPUs compute through NCCL.

use std::collections::BTreeSet;

use async_trait::async_trait;
use candle_core::{Device, DeviceLocation};
use futures_util::future::try_join_all;
use shared_proto::job::{BatchNorm, CrossDevice, Job, StrategyName};
use shared_proto::payload::Elements;
use shared_proto::step::Gradients;

use super::DeviceReplicas;
use crate::device;
use crate::error::ReplicaError;
use crate::mirror::{DeviceSteps, StepsMade};
use crate::step::{Computed, Positions, Step};
use crate::thread::{ModelReplica, NcclId, PartOfStep};

/// Returns the devices, each with one stream for all threads. NCCL needs the same stream in all calls of a rank; by
/// default, candle gives each thread its own stream.
pub(super) fn with_one_queue_each(devices: &[Device]) -> Result<Vec<Device>, ReplicaError> {
    let devices = devices.iter().map(device::with_one_queue);
    let devices = devices.collect::<Result<_, _>>();
    devices.map_err(|error| ReplicaError::Devices(error.to_string()))
}

/// The GPUs that add up their gradients through NCCL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Adding {
    /// No GPUs: gradients are added up on the host.
    Nowhere,
    /// All GPUs of this worker.
    WithinWorker,
    /// The GPUs of several workers. Each worker has one GPU.
    AmongWorkers,
}

/// Returns which GPUs add up their gradients, if a worker of the job has these devices.
///
/// # Errors
/// [`ReplicaError::Devices`] if the job wants NCCL where it is not possible.
pub(super) fn adding(job: &Job, devices: &[Device]) -> Result<Adding, ReplicaError> {
    let wanted = job.strategy.cross_device;
    let (adding, wanted) = match (job.strategy.name, wanted) {
        (_, Some(CrossDevice::Host)) => return Ok(Adding::Nowhere),
        (StrategyName::Mirrored, Some(CrossDevice::Nccl)) => (Adding::WithinWorker, true),
        (StrategyName::Mirrored, None) if devices.len() > 1 => (Adding::WithinWorker, false),
        (_, Some(CrossDevice::Nccl)) => (Adding::AmongWorkers, true),
        (_, None) => return Ok(Adding::Nowhere),
    };
    match problem(job, devices, adding) {
        None => Ok(adding),
        Some(problem) if wanted => Err(ReplicaError::no_nccl(problem)),
        Some(_) => Ok(Adding::Nowhere),
    }
}

/// Returns the reason why these devices cannot add up gradients through NCCL; `None` if they can.
fn problem(job: &Job, devices: &[Device], adding: Adding) -> Option<&'static str> {
    let number = |device: &Device| match device.location() {
        DeviceLocation::Cuda { gpu_id } => Some(gpu_id),
        DeviceLocation::Cpu | DeviceLocation::Metal { .. } => None,
    };
    let numbers: Option<BTreeSet<usize>> = devices.iter().map(number).collect();
    if !cfg!(feature = "nccl") {
        return Some("this program was built without the feature `nccl` (docs/cuda.md)");
    }
    if adding == Adding::AmongWorkers && devices.len() != 1 {
        return Some("each worker must have one GPU; start a worker for each");
    }
    match numbers {
        None => return Some("a device is no GPU"),
        Some(numbers) if numbers.len() < devices.len() => {
            return Some("each device must be a different GPU");
        }
        Some(_) => {}
    }
    if job.accumulate > 1 {
        return Some("the job adds up several batches in a step (`accumulate`)");
    }
    let synchronised = job.strategy.batch_norm == BatchNorm::Synchronised;
    synchronised
        .then_some("`strategy.batch_norm = \"synchronised\"` adds up in the worker's memory")
}

/// Joins the replicas, each on its own GPU, into one NCCL group.
pub(super) async fn join(replicas: &[ModelReplica]) -> Result<(), ReplicaError> {
    let (id, ranks) = (NcclId::new()?, replicas.len());
    let joining = replicas.iter().enumerate();
    let joining = joining.map(|(rank, replica)| replica.join_gpus(id, rank, ranks));
    try_join_all(joining).await.map(drop)
}

/// The replicas add up their gradients on the GPUs, and each makes the same update.
#[async_trait(?Send)]
impl DeviceSteps for DeviceReplicas {
    fn saves_copies(&self) -> bool {
        true
    }

    async fn compute_on_device(
        &self,
        positions: Positions,
        step: Step,
    ) -> Result<Computed, ReplicaError> {
        let parts = self.replicas.iter().enumerate();
        let computing = parts.map(|(number, replica)| {
            let share = self.share(positions, number, replica);
            let (positions, step, part) = (share.positions, share.of(step), share.part);
            replica.compute_part(PartOfStep {
                positions,
                step,
                part,
            })
        });
        // All parts are computed first: NCCL would wait forever for a GPU that has failed.
        let losses = try_join_all(computing).await?;
        let adding = self.replicas.iter();
        let adding = adding.map(|replica| replica.add_up_gradients(self.clip));
        let norms = try_join_all(adding).await?;
        let gradients = Gradients {
            values: Vec::new(),
            rows: Vec::new(),
            norm: norms.first().copied().unwrap_or_default(),
        };
        Ok(Computed::new(losses.iter().sum(), gradients))
    }

    async fn update_on_device(&self, made: StepsMade) -> Result<(), ReplicaError> {
        let updating = self.replicas.iter();
        let updating = updating.map(|replica| replica.update_on_device(made));
        try_join_all(updating).await.map(drop)
    }

    async fn gradients_on_device(&self) -> Result<Vec<Elements>, ReplicaError> {
        self.first_replica().gradients_on_device().await
    }
}
