//! The strategy of a job.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::settings::settings;
use super::{Mode, Wire};
use crate::staleness::StalenessBound;

/// The strategy: where variables live, and how far workers may lead.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(from = "Written")]
pub struct Strategy {
    /// The place where variables live.
    pub name: StrategyName,
    /// The training mode, which decides when gradients become updates.
    pub mode: Mode,
    /// The largest lead of a worker over the slowest, in steps; used in bounded mode.
    pub staleness: u64,
    /// The number of steps that a worker computes ahead of the acknowledgement of its gradients: 0 or 1. Used outside sync mode, with
    /// the strategy `parameter-server`.
    pub pipeline: u32,
    /// The type of numbers in which weights and gradients travel. Servers keep and compute `f32`.
    pub wire: Wire,
    /// The samples over which batch normalisation takes mean and variance.
    pub batch_norm: BatchNorm,
    /// The number of workers of a ring that hold each part of the optimizer's state. Absent: all workers hold all of
    /// it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub optimizer_copies: Option<u32>,
    /// The size in MiB of the buckets in which a worker sends gradients to the other workers of a ring while the
    /// backward pass makes the next ones; absent: an eighth of the gradients, at least 0.5 and at most 25.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bucket_mebibytes: Option<f64>,
    /// The place where devices add up their gradients; absent: with `mirrored` the GPUs, by NCCL, if this is possible,
    /// otherwise the workers' memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cross_device: Option<CrossDevice>,
    /// `model-parallel`: the order in which stages compute micro-batches; absent: [`PipelineSchedule::OneForwardOneBackward`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub schedule: Option<PipelineSchedule>,
    /// `model-parallel`: the number of micro-batches that a batch is cut into; absent: four for each device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub micro_batches: Option<u32>,
    /// `model-parallel`: the number of stages that the model is cut into; absent: one for each device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stages: Option<u32>,
    /// `model-parallel`: the number of workers that hold the stages of a model together; absent: each worker holds all
    /// stages.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stage_workers: Option<u32>,
    /// The number of workers of a ring that a step does not wait for; absent: each step waits for all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backup_workers: Option<u32>,
    /// What servers do about gradients that were computed with old weights.
    #[serde(skip_serializing_if = "Correction::is_default")]
    pub correction: Correction,
}

settings! {
    /// What servers do, outside sync mode, about gradients that were computed with old weights. The updates of a single
    /// worker stay as they are. Steps of rows are scaled by each row's own staleness; `step_limit`, `look_ahead` and
    /// `average` concern only dense variables.
    #[derive(Copy)]
    Correction {
        /// False: each gradient is applied as if it were new.
        enabled: bool = true,
        /// The norm by which all updates in flight together may move a block's weights, relative to the norm of these
        /// weights. With momentum `m`, the limit is multiplied by the square root of `1 - m`. A longer step is shortened,
        /// but not below about its share of a synchronous step.
        step_limit: f64 = 0.05,
        /// True: workers compute with look-ahead weights, which are the weights to which the momentum will have led when
        /// the gradient arrives.
        look_ahead: bool = true,
        /// The length of the average of the weights that evaluations measure and `model.safetensors` holds, as a part of a
        /// pass over the data. The average is over at most an eighth of the job and 1,000 updates. With 0, or with
        /// `ema_decay` in the job, there is no such average.
        average: f64 = 1.0,
    }
}

impl Correction {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

impl Default for Strategy {
    fn default() -> Self {
        Written::default().into()
    }
}

impl Strategy {
    /// Returns the largest lead of a worker.
    pub fn bound(&self) -> StalenessBound {
        match self.mode {
            Mode::Sync => StalenessBound::Steps(0),
            Mode::Bounded => StalenessBound::Steps(self.staleness),
            Mode::Async => StalenessBound::Unbounded,
        }
    }

    /// Returns whether workers compute with look-ahead weights of variables whose optimizer has momentum.
    pub fn looks_ahead(&self) -> bool {
        self.corrects() && self.correction.look_ahead
    }

    /// Returns whether servers average the weights for evaluations.
    pub fn averages(&self) -> bool {
        self.corrects() && self.correction.average > 0.0
    }

    /// Returns whether servers correct updates whose gradients were computed with old weights.
    pub fn corrects(&self) -> bool {
        self.correction.enabled && self.mode != Mode::Sync && !self.name.has_ring()
    }

    /// Returns the stage groups of the job's workers.
    pub fn stage_groups(&self) -> StageGroups {
        StageGroups {
            workers: self.stage_workers.unwrap_or(1).max(1),
        }
    }

    /// Returns the default number of workers of a cluster on one machine. With `model-parallel` this is one stage
    /// group: its stages take all devices of the machine, so a second group would only share them.
    pub fn usual_workers(&self) -> u32 {
        match self.name {
            StrategyName::ModelParallel => self.stage_groups().workers,
            name if name.has_one_worker() => 1,
            _ => 2,
        }
    }
}

/// The stage groups of a ring: workers of consecutive ranks that hold the stages of a model together. A group of one worker has the whole
/// model. Ranks behind the last whole group are spare.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StageGroups {
    /// The number of workers of a group.
    pub workers: u32,
}

impl StageGroups {
    /// Returns how many of `members` members are in whole groups.
    pub fn computing(self, members: u64) -> u64 {
        members - members % u64::from(self.workers)
    }

    /// Returns the ranks of the group to which `rank` belongs, in a ring with `ranks` ranks. `None` if the rank is
    /// spare.
    pub fn of(self, rank: u32, ranks: u32) -> Option<Range<u32>> {
        let first = rank - self.place(rank);
        let end = first.saturating_add(self.workers);
        (end <= ranks).then_some(first..end)
    }

    /// Returns the place of a rank in its group, from 0.
    pub fn place(self, rank: u32) -> u32 {
        rank % self.workers
    }
}

/// A strategy as it is written in a job file: the usual mode of its name may be left out.
#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Written {
    name: StrategyName,
    mode: Option<Mode>,
    staleness: u64,
    pipeline: u32,
    wire: Wire,
    batch_norm: BatchNorm,
    optimizer_copies: Option<u32>,
    bucket_mebibytes: Option<f64>,
    cross_device: Option<CrossDevice>,
    schedule: Option<PipelineSchedule>,
    micro_batches: Option<u32>,
    stages: Option<u32>,
    stage_workers: Option<u32>,
    backup_workers: Option<u32>,
    correction: Correction,
}

impl Default for Written {
    fn default() -> Self {
        Self {
            name: StrategyName::ParameterServer,
            mode: None,
            staleness: 4,
            pipeline: 0,
            wire: Wire::F32,
            batch_norm: BatchNorm::PerReplica,
            optimizer_copies: None,
            bucket_mebibytes: None,
            cross_device: None,
            schedule: None,
            micro_batches: None,
            stages: None,
            stage_workers: None,
            backup_workers: None,
            correction: Correction::default(),
        }
    }
}

impl From<Written> for Strategy {
    fn from(written: Written) -> Self {
        let Written {
            name,
            mode,
            staleness,
            pipeline,
            wire,
            batch_norm,
            optimizer_copies,
            bucket_mebibytes,
            cross_device,
            schedule,
            micro_batches,
            stages,
            stage_workers,
            backup_workers,
            correction,
        } = written;
        Self {
            mode: mode.unwrap_or(name.usual_mode()),
            name,
            staleness,
            pipeline,
            wire,
            batch_norm,
            optimizer_copies,
            bucket_mebibytes,
            cross_device,
            schedule,
            micro_batches,
            stages,
            stage_workers,
            backup_workers,
            correction,
        }
    }
}

/// The place where devices add up their gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CrossDevice {
    /// The workers' memory.
    Host,
    /// The GPUs, by NVIDIA's NCCL.
    Nccl,
}

impl CrossDevice {
    /// Returns the name in job files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Nccl => "nccl",
        }
    }
}

/// The order in which the stages of a model compute micro-batches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum PipelineSchedule {
    /// Each stage makes the backward pass of a micro-batch as soon as it can, so it holds the activations of few
    /// micro-batches.
    #[default]
    #[serde(rename = "1f1b")]
    OneForwardOneBackward,
    /// Each stage makes all forward passes, and then all backward passes.
    #[serde(rename = "gpipe")]
    GPipe,
}

impl PipelineSchedule {
    /// Returns the name in job files.
    pub fn name(self) -> &'static str {
        match self {
            Self::OneForwardOneBackward => "1f1b",
            Self::GPipe => "gpipe",
        }
    }
}

/// The samples over which batch normalisation takes mean and variance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BatchNorm {
    /// The samples that a replica computes together.
    PerReplica,
    /// The samples that all replicas of a step compute together. The replicas add up their sums in the middle of their
    /// passes.
    Synchronised,
}

/// The place where variables live.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StrategyName {
    /// On sharded parameter servers.
    ParameterServer,
    /// On each device of the only worker. The devices add up their gradients and make the same update.
    Mirrored,
    /// On the first device of the only worker. The other devices copy the values after each update.
    CentralStorage,
    /// On each worker. The workers add up their gradients and make the same update.
    MultiWorkerMirrored,
    /// Dense variables on each worker, as in `multi-worker-mirrored`; tables on parameter servers.
    Hybrid,
    /// On the only worker.
    OneDevice,
    /// In stages on the devices of a worker, or of several workers. The workers add up their gradients and make the same update.
    ModelParallel,
}

impl StrategyName {
    /// Returns the name in job files.
    pub fn name(self) -> &'static str {
        match self {
            Self::ParameterServer => "parameter-server",
            Self::Mirrored => "mirrored",
            Self::CentralStorage => "central-storage",
            Self::MultiWorkerMirrored => "multi-worker-mirrored",
            Self::Hybrid => "hybrid",
            Self::OneDevice => "one-device",
            Self::ModelParallel => "model-parallel",
        }
    }

    /// Returns whether there are parameter servers.
    pub fn has_servers(self) -> bool {
        match self {
            Self::ParameterServer | Self::Hybrid => true,
            Self::Mirrored
            | Self::CentralStorage
            | Self::MultiWorkerMirrored
            | Self::OneDevice
            | Self::ModelParallel => false,
        }
    }

    /// Returns whether each worker holds the dense variables. The workers then form a ring, and make each step together.
    pub fn has_ring(self) -> bool {
        self != Self::ParameterServer
    }

    /// Returns whether there is exactly one worker, which exchanges numbers with no other process.
    pub fn has_one_worker(self) -> bool {
        match self {
            Self::Mirrored | Self::CentralStorage | Self::OneDevice => true,
            Self::ParameterServer
            | Self::MultiWorkerMirrored
            | Self::Hybrid
            | Self::ModelParallel => false,
        }
    }

    /// Returns whether several workers may hold the dense variables.
    pub fn has_many_replicas(self) -> bool {
        self.has_ring() && !self.has_one_worker()
    }

    /// Checks that replicas compute a step together, and can add up numbers while they compute.
    ///
    /// # Errors
    /// The reason why they cannot, and advice to the user.
    pub fn adds_up_within_steps(self) -> Result<(), &'static str> {
        match self {
            Self::Mirrored | Self::CentralStorage | Self::MultiWorkerMirrored | Self::Hybrid => {
                Ok(())
            }
            Self::ParameterServer => Err(
                "its workers have no links by which they could add up while they compute; leave it out, or use \"mirrored\", \"central-storage\" or \"multi-worker-mirrored\"",
            ),
            Self::OneDevice => {
                Err("its only replica has all samples of a step anyway; leave it out")
            }
            Self::ModelParallel => Err(
                "its stages compute one micro-batch after the other, so the mean over all of them is known only when the first ones are done; leave it out",
            ),
        }
    }

    /// Returns the mode of a job that names none. Without servers all workers make each step together.
    pub fn usual_mode(self) -> Mode {
        match self.has_servers() {
            true => Mode::Bounded,
            false => Mode::Sync,
        }
    }
}

#[cfg(test)]
mod tests;
