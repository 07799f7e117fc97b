//! The strategy of a job.

use serde::{Deserialize, Serialize};

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
    /// The number of workers of a ring that have each part of the optimizer's state. None: all workers have all of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub optimizer_copies: Option<u32>,
    /// The size in MiB of the buckets in which gradients leave for the other workers of a ring, while the backward pass makes the
    /// next ones; absent: an eighth of the gradients, at least 0.5 and at most 25.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bucket_mebibytes: Option<f64>,
    /// `mirrored`: the place where devices add up their gradients; absent: the GPUs, by NCCL, where it is possible.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cross_device: Option<CrossDevice>,
    /// `model-parallel`: the order in which stages compute micro-batches; absent: [`PipelineSchedule::OneForwardOneBackward`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub schedule: Option<PipelineSchedule>,
    /// `model-parallel`: the micro-batches that a batch is cut into; absent: four for each device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub micro_batches: Option<u32>,
    /// `model-parallel`: the stages that the model is cut into; absent: one for each device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stages: Option<u32>,
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
        }
    }
}

/// The place where the devices of `mirrored` add up their gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CrossDevice {
    /// The worker's memory.
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
    /// Each stage makes the backward pass of a micro-batch as soon as it can, so it holds the activations of few.
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
    /// Those that a replica computes together.
    PerReplica,
    /// Those that all replicas of a step compute together. The replicas add up in the middle of their passes.
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
    /// On each worker, in stages on its devices. The workers add up their gradients and make the same update.
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

    /// Returns whether there is one worker, and no process to exchange numbers with.
    pub fn has_one_worker(self) -> bool {
        match self {
            Self::Mirrored | Self::CentralStorage | Self::OneDevice => true,
            Self::ParameterServer
            | Self::MultiWorkerMirrored
            | Self::Hybrid
            | Self::ModelParallel => false,
        }
    }

    /// Returns the number of workers of a cluster on one machine, if the job names none. Stages share out the devices of the
    /// machine already, so more workers would only share those.
    pub fn usual_workers(self) -> u32 {
        match self.has_one_worker() || self == Self::ModelParallel {
            true => 1,
            false => 2,
        }
    }

    /// Returns whether several workers may hold the dense variables.
    pub fn has_many_replicas(self) -> bool {
        self.has_ring() && !self.has_one_worker()
    }

    /// Returns whether replicas compute a step together and can add up while they compute. Otherwise, returns why not, and what to do.
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
mod tests {
    use super::*;
    use crate::job::Job;

    #[test]
    fn the_mode_follows_from_the_name() {
        let mirrored = Job::default()
            .with("strategy.name=multi-worker-mirrored")
            .unwrap();
        assert_eq!(mirrored.strategy.mode, Mode::Sync);
        assert_eq!(Job::from_toml(&mirrored.to_toml()).unwrap(), mirrored);
        let error = mirrored
            .with("strategy.mode=async")
            .unwrap()
            .validate()
            .unwrap_err();
        assert_eq!(
            error.to_string(),
            "job setting `strategy.mode` is \"async\", but must be \"sync\", or absent, for strategies without parameter servers"
        );
        let bounded = Job::default().with("strategy.mode=sync").unwrap();
        assert_eq!(bounded.strategy.mode, Mode::Sync);
    }

    #[test]
    fn batch_norm_is_synchronised_where_replicas_compute_together() {
        let job = |name: &str| {
            Job::from_toml(&format!(
                "[strategy]\nname = \"{name}\"\nbatch_norm = \"synchronised\""
            ))
        };
        for name in ["mirrored", "central-storage", "multi-worker-mirrored"] {
            let job = job(name).unwrap();
            assert_eq!(job.strategy.batch_norm, BatchNorm::Synchronised);
            assert_eq!(Job::from_toml(&job.to_toml()).unwrap(), job);
        }
        for (name, why) in [
            ("parameter-server", "its workers have no links"),
            ("one-device", "its only replica has all samples"),
            ("model-parallel", "its stages compute one micro-batch"),
        ] {
            let error = job(name).unwrap_err().to_string();
            let start = format!(
                "job setting `strategy.batch_norm` is \"synchronised\", but it does not count with `strategy.name` \"{name}\"; {why}"
            );
            assert!(error.starts_with(&start), "{error}");
        }
    }

    #[test]
    fn the_place_where_devices_add_up_is_a_choice_of_mirrored() {
        for place in ["host", "nccl"] {
            let job = |name: &str| {
                let strategy = format!("name = \"{name}\"\ncross_device = \"{place}\"");
                Job::from_toml(&format!("[strategy]\n{strategy}"))
            };
            let mirrored = job("mirrored").unwrap();
            assert_eq!(mirrored.strategy.cross_device.unwrap().name(), place);
            assert_eq!(Job::from_toml(&mirrored.to_toml()).unwrap(), mirrored);
            let error = job("central-storage").unwrap_err().to_string();
            let start = format!(
                "job setting `strategy.cross_device` is \"{place}\", but it does not count with `strategy.name` \"central-storage\""
            );
            assert!(error.starts_with(&start), "{error}");
        }
    }

    #[test]
    fn gradients_leave_in_buckets_where_workers_add_them_up() {
        let job = |settings: &str| Job::from_toml(&format!("[strategy]\n{settings}"));
        for name in ["multi-worker-mirrored", "hybrid"] {
            let job = job(&format!("name = \"{name}\"\nbucket_mebibytes = 0.5")).unwrap();
            assert_eq!(job.strategy.bucket_mebibytes, Some(0.5));
            assert_eq!(Job::from_toml(&job.to_toml()).unwrap(), job);
        }
        let mirrored = "name = \"multi-worker-mirrored\"\nbucket_mebibytes = ";
        for (settings, why) in [
            (
                "bucket_mebibytes = 4.5".to_owned(),
                "is 4.5, but it does not count with `strategy.name` \"parameter-server\"",
            ),
            (
                format!("{mirrored}1.0\noptimizer_copies = 2"),
                "is 1, but it does not count with `strategy.optimizer_copies` 2",
            ),
            (
                format!("{mirrored}1.0\nbatch_norm = \"synchronised\""),
                "is 1, but it does not count with `strategy.batch_norm` \"synchronised\"",
            ),
            (format!("{mirrored}0.0"), "is 0, but must be more than 0"),
            (format!("{mirrored}-1.0"), "is -1, but must be more than 0"),
            (format!("{mirrored}nan"), "is NaN, but must be more than 0"),
            (format!("{mirrored}inf"), "is inf, but must be more than 0"),
        ] {
            let error = job(&settings).unwrap_err().to_string();
            let start = format!("job setting `strategy.bucket_mebibytes` {why}");
            assert!(error.starts_with(&start), "{error}");
        }
        for (setting, other) in [
            ("clip_norm = 0.5", "`clip_norm` 0.5"),
            ("clip_value = 0.5", "`clip_value` 0.5"),
            ("accumulate = 2", "`accumulate` 2"),
        ] {
            let job = Job::from_toml(&format!("{setting}\n[strategy]\n{mirrored}1.0"));
            let error = job.unwrap_err().to_string();
            assert!(
                error.contains(&format!("does not count with {other}")),
                "{error}"
            );
        }
    }

    #[test]
    fn optimizer_state_is_shared_out_where_workers_form_rings() {
        let job = |settings: &str| Job::from_toml(&format!("[strategy]\n{settings}"));
        for name in ["multi-worker-mirrored", "hybrid", "model-parallel"] {
            let job = job(&format!("name = \"{name}\"\noptimizer_copies = 2")).unwrap();
            assert_eq!(job.strategy.optimizer_copies, Some(2));
            assert_eq!(Job::from_toml(&job.to_toml()).unwrap(), job);
        }
        for (settings, why) in [
            (
                "optimizer_copies = 2",
                "job setting `strategy.optimizer_copies` is 2, but it does not count with `strategy.name` \"parameter-server\"",
            ),
            (
                "name = \"mirrored\"\noptimizer_copies = 1",
                "job setting `strategy.optimizer_copies` is 1, but it does not count with `strategy.name` \"mirrored\"",
            ),
            (
                "name = \"hybrid\"\noptimizer_copies = 0",
                "job setting `strategy.optimizer_copies` is 0, but must be at least 1, or absent",
            ),
        ] {
            let error = job(settings).unwrap_err().to_string();
            assert!(error.starts_with(why), "{error}");
        }
    }

    #[test]
    fn steps_are_computed_ahead_where_servers_apply_gradients_as_they_come() {
        let job = |settings: &str| Job::from_toml(&format!("[strategy]\n{settings}"));
        for mode in ["bounded", "async"] {
            let job = job(&format!("mode = \"{mode}\"\npipeline = 1")).unwrap();
            assert_eq!(job.strategy.pipeline, 1);
            assert_eq!(Job::from_toml(&job.to_toml()).unwrap(), job);
        }
        assert_eq!(job("").unwrap().strategy.pipeline, 0);
        assert!(job("name = \"mirrored\"\npipeline = 0").is_ok());
        for (settings, expected) in [
            (
                "pipeline = 2",
                "job setting `strategy.pipeline` is 2, but must be 0 or 1",
            ),
            (
                "mode = \"sync\"\npipeline = 1",
                "job setting `strategy.pipeline` is 1, but it does not count with `strategy.mode` \"sync\"; leave it out, or set the mode to \"bounded\" or \"async\"",
            ),
            (
                "staleness = 0\npipeline = 1",
                "job setting `strategy.pipeline` is 1, but it does not count with `strategy.staleness` 0; leave it out, or allow a lead of at least one step",
            ),
        ] {
            let error = job(settings).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error}");
        }
        assert!(job("mode = \"async\"\nstaleness = 0\npipeline = 1").is_ok());
        for name in [
            "mirrored",
            "central-storage",
            "multi-worker-mirrored",
            "hybrid",
            "one-device",
            "model-parallel",
        ] {
            let error = job(&format!("name = \"{name}\"\npipeline = 1")).unwrap_err();
            let expected = format!(
                "job setting `strategy.pipeline` is 1, but it does not count with `strategy.name` \"{name}\"; leave it out, or use \"parameter-server\""
            );
            assert_eq!(error.to_string(), expected);
        }
    }

    #[test]
    fn settings_of_stages_count_with_model_parallel_alone() {
        let settings = "schedule = \"gpipe\"\nmicro_batches = 6\nstages = 3";
        let job = format!("[strategy]\nname = \"model-parallel\"\n{settings}");
        let job = Job::from_toml(&job).unwrap();
        let strategy = &job.strategy;
        assert_eq!(strategy.schedule, Some(PipelineSchedule::GPipe));
        assert_eq!(
            (strategy.micro_batches, strategy.stages),
            (Some(6), Some(3))
        );
        assert_eq!(Job::from_toml(&job.to_toml()).unwrap(), job);
        let name = job.strategy.name;
        assert!(name.has_ring() && !name.has_servers() && !name.has_one_worker());
        assert_eq!((name.usual_workers(), name.usual_mode()), (1, Mode::Sync));
        for (setting, expected) in [
            (
                "schedule = \"1f1b\"",
                "`strategy.schedule` is \"1f1b\", but it does not count with `strategy.name` \"mirrored\"",
            ),
            (
                "micro_batches = 6",
                "`strategy.micro_batches` is 6, but it does not count",
            ),
            (
                "stages = 3",
                "`strategy.stages` is 3, but it does not count",
            ),
        ] {
            let other = format!("[strategy]\nname = \"mirrored\"\n{setting}");
            let error = Job::from_toml(&other).unwrap_err().to_string();
            assert!(
                error.contains(expected) && error.contains("model-parallel"),
                "{error}"
            );
        }
        for (setting, expected) in [
            (
                "micro_batches = 0",
                "`strategy.micro_batches` is 0, but must be at least 1 and at most 4096, or absent",
            ),
            (
                "stages = 0",
                "`strategy.stages` is 0, but must be at least 1 and at most 1024, or absent",
            ),
            ("schedule = \"zero-bubble\"", "expected `1f1b` or `gpipe`"),
        ] {
            let wrong = format!("[strategy]\nname = \"model-parallel\"\n{setting}");
            let error = Job::from_toml(&wrong).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn names_are_read_back() {
        for name in [
            "parameter-server",
            "mirrored",
            "central-storage",
            "multi-worker-mirrored",
            "hybrid",
            "one-device",
            "model-parallel",
        ] {
            let job = format!("[strategy]\nname = \"{name}\"");
            assert_eq!(Job::from_toml(&job).unwrap().strategy.name.name(), name);
        }
        assert!(Job::from_toml("[strategy]\nname = \"mirror\"").is_err());
    }
}
