//! Gradients that the GPUs of a worker add up themselves, by NCCL.

use std::collections::BTreeSet;

use async_trait::async_trait;
use candle_core::{Device, DeviceLocation};
use futures_util::future::try_join_all;
use shared_proto::job::{BatchNorm, CrossDevice, Job, StrategyName};
use shared_proto::payload::Elements;
use shared_proto::step::Gradients;

use super::DeviceReplicas;
use crate::device;
use crate::replica::error::ReplicaError;
use crate::replica::mirror::{DeviceSteps, StepsMade};
use crate::replica::step::{Computed, Positions, Step};
use crate::replica::thread::{ModelReplica, NcclId, PartOfStep};

/// Returns the devices, each with one queue for the work of all threads. NCCL needs one stream for all calls of a rank; by default candle gives
/// each thread its own.
pub(super) fn with_one_queue_each(devices: &[Device]) -> Result<Vec<Device>, ReplicaError> {
    let devices = devices.iter().map(device::with_one_queue);
    let devices = devices.collect::<Result<_, _>>();
    devices.map_err(|error| ReplicaError::Devices(error.to_string()))
}

/// Returns whether the replicas of a job add up their gradients on these GPUs.
pub(super) fn add_up(job: &Job, devices: &[Device]) -> Result<bool, ReplicaError> {
    let wanted = job.strategy.cross_device;
    let several = devices.len() > 1 || wanted == Some(CrossDevice::Nccl);
    let mirrored = job.strategy.name == StrategyName::Mirrored;
    if !mirrored || wanted == Some(CrossDevice::Host) || !several {
        return Ok(false);
    }
    let numbers = devices.iter().map(|device| match device.location() {
        DeviceLocation::Cuda { gpu_id } => Some(gpu_id),
        DeviceLocation::Cpu | DeviceLocation::Metal { .. } => None,
    });
    let numbers: Option<BTreeSet<usize>> = numbers.collect();
    let apart = numbers.is_some_and(|numbers| numbers.len() == devices.len());
    let problem = match apart {
        _ if !cfg!(feature = "nccl") => {
            "this program was built without the feature `nccl` (docs/cuda.md)"
        }
        false => "each device must be a different GPU",
        true if job.accumulate > 1 => "the job adds up several batches in a step (`accumulate`)",
        true if job.strategy.batch_norm == BatchNorm::Synchronised => {
            "`strategy.batch_norm = \"synchronised\"` adds up in the worker's memory"
        }
        true => return Ok(true),
    };
    match wanted {
        Some(CrossDevice::Nccl) => Err(ReplicaError::Devices(format!(
            "`strategy.cross_device = \"nccl\"` is not possible: {problem}; leave it out, or use \"host\""
        ))),
        None | Some(CrossDevice::Host) => Ok(false),
    }
}

/// Makes the replicas, each on a GPU of its own, a group of NCCL.
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
        self.first().gradients_on_device().await
    }
}
