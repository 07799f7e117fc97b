//! A worker's replicas, each on its own device, behind the interface of one replica. They share out the samples of a
//! step. The gradient of the step is the mean of their gradients, weighted by samples. `share`: a replica's share of a
//! step; `gpus`: sums of gradients on the GPUs.

mod gpus;
mod share;

use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use candle_core::Device;
use futures_util::future::{join_all, try_join_all};
use model::registry::Registry;
use shared_proto::job::{Clip, Job, StrategyName};
use shared_proto::payload::Elements;
use shared_proto::step::{Gradients, Part, PartOf};
use variables::{BucketedGradients, mean_gradients};

use self::gpus::Adding;
use self::share::{Share, part};
use super::error::ReplicaError;
use super::filling::Filling;
use super::interface::{Computing, Description, Evaluation, EvaluationPart, Prepared, Replica};
use super::mirror::{DeviceSteps, FirstReplica, InBuckets, Mirror, MirrorState, StepsMade};
use super::rounds::{Others, meet, rounds};
use super::step::{Computed, Positions, Step};
use super::thread::ModelReplica;
use crate::device;
use crate::threads;

/// The replicas of a worker, at least one. All hold the same values.
pub struct DeviceReplicas {
    replicas: Vec<ModelReplica>,
    clip: Clip,
    /// True if only the first replica keeps the optimizer's state and makes updates, and the others copy its values.
    central: bool,
    adding: Adding,
}

impl DeviceReplicas {
    /// Reads the data and builds the model for each device.
    ///
    /// # Errors
    /// If either fails, or [`ReplicaError::Devices`] if the devices do not fit the job or the model.
    pub async fn start(
        job: &Arc<Job>,
        registry: &Registry,
        devices: &[Device],
    ) -> Result<Self, ReplicaError> {
        Self::start_on_threads(job, registry, devices, None).await
    }

    /// Starts replicas as [`Self::start`] does. Replicas on CPUs share `threads` threads, or [`threads::number`]
    /// threads if it is `None`. With `model-parallel`, the stages use the process's thread pool.
    ///
    /// # Errors
    /// See [`Self::start`].
    pub async fn start_on_threads(
        job: &Arc<Job>,
        registry: &Registry,
        devices: &[Device],
        threads: Option<usize>,
    ) -> Result<Self, ReplicaError> {
        let count = devices.len();
        let strategy = job.strategy.name;
        if count > 1 && strategy == StrategyName::OneDevice {
            return Err(ReplicaError::Devices(format!(
                "{count} devices are given, and `strategy.name = \"one-device\"` takes one; use \"mirrored\""
            )));
        }
        let clip = job.worker_clip();
        if strategy == StrategyName::ModelParallel {
            return Self::in_stages(job, registry, devices).await;
        }
        let mut of_part = job.clone();
        if count > 1 {
            let of_part = Arc::make_mut(&mut of_part);
            // The mean over all devices is clipped, not the gradient of each.
            (of_part.clip_value, of_part.clip_norm) = (None, None);
            // Each batch of a step is cut among the devices.
            of_part.batch_size = of_part.batch_size.div_ceil(count as u32);
        }
        let adding = gpus::adding(job, devices)?;
        let own_queues: Vec<Device>;
        let devices = match adding {
            Adding::Nowhere => devices,
            Adding::WithinWorker | Adding::AmongWorkers => {
                own_queues = gpus::with_one_queue_each(devices)?;
                &own_queues
            }
        };
        let replicas = start_each(&of_part, registry, devices, threads).await?;
        if adding == Adding::AmongWorkers && replicas.iter().any(|own| own.device_steps().is_none())
        {
            let problem = "the job clips gradients, and the model has tables";
            return Err(ReplicaError::no_nccl(problem));
        }
        let central =
            strategy == StrategyName::CentralStorage || job.strategy.optimizer_copies.is_some();
        if adding == Adding::WithinWorker {
            gpus::join(&replicas).await?;
        }
        tell(devices);
        Ok(Self {
            replicas,
            clip,
            central,
            adding,
        })
    }

    /// Builds one replica, with the model in stages on these devices.
    async fn in_stages(
        job: &Arc<Job>,
        registry: &Registry,
        devices: &[Device],
    ) -> Result<Self, ReplicaError> {
        let of_stages = gpus::with_one_queue_each(devices)?;
        let replica = ModelReplica::start_on(job.clone(), registry.clone(), of_stages, 0);
        let replicas = vec![replica.await?];
        tell(devices);
        Ok(Self {
            replicas,
            clip: job.worker_clip(),
            central: false,
            adding: Adding::Nowhere,
        })
    }

    fn first_replica(&self) -> &ModelReplica {
        &self.replicas[0]
    }

    /// Returns each replica's share of a step, without the shares that have no samples.
    fn shares(&self, all: Positions) -> impl Iterator<Item = Share<'_>> {
        let shares = self.replicas.iter().enumerate();
        let shares = shares.map(move |(number, replica)| self.share(all, number, replica));
        shares.filter(|share| !share.positions.is_empty())
    }

    /// Returns the share of a replica, which may have no samples.
    fn share<'a>(&self, all: Positions, number: usize, replica: &'a ModelReplica) -> Share<'a> {
        let devices = self.replicas.len();
        let positions = part(all, number, devices);
        Share {
            replica,
            positions,
            number: number as u32,
            devices: devices as u32,
            part: positions.samples() as f64 / all.samples() as f64,
        }
    }

    /// Returns the mean of the losses, and the clipped mean of the gradients. Each result has a weight: the replica's
    /// part of the samples.
    fn mean(&self, computed: Vec<(f64, Computed)>) -> Computed {
        let loss = computed.iter().map(|(part, computed)| part * computed.loss);
        let loss = loss.sum();
        let gradients = computed.into_iter();
        let gradients = gradients.map(|(part, computed)| (part as f32, computed.gradients));
        let gradients: Vec<(f32, Gradients)> = gradients.collect();
        let variables = &self.description().variables;
        Computed::new(loss, mean_gradients(&gradients, variables, self.clip))
    }

    /// Returns the replicas that make updates.
    fn keepers(&self) -> &[ModelReplica] {
        match self.central {
            true => &self.replicas[..1],
            false => &self.replicas,
        }
    }

    /// Copies the first replica's values to the replicas that make no updates.
    async fn copy_values(&self) -> Result<(), ReplicaError> {
        let others = &self.replicas[self.keepers().len()..];
        if others.is_empty() {
            return Ok(());
        }
        let values = self.first_replica().values().await?;
        let part = |(variable, values): (usize, &Elements)| {
            Part::whole(PartOf::Variable(variable), values.clone())
        };
        let parts: Vec<Part> = values.iter().enumerate().map(part).collect();
        join_all(others.iter().map(|replica| replica.load(parts.clone()))).await;
        Ok(())
    }
}

/// Starts a replica on each device. Replicas on CPUs share `threads` threads, or [`threads::number`] threads if it is
/// `None`.
async fn start_each(
    job: &Arc<Job>,
    registry: &Registry,
    devices: &[Device],
    threads: Option<usize>,
) -> Result<Vec<ModelReplica>, ReplicaError> {
    let count = devices.len();
    let cpus = devices.iter().filter(|device| device.is_cpu()).count();
    let threads = threads.unwrap_or_else(threads::number) / cpus.max(1);
    let mut replicas = Vec::new();
    for device in devices {
        let device = vec![device.clone()];
        let replica = ModelReplica::start_on(job.clone(), registry.clone(), device, threads);
        let replica = replica.await?;
        if count > 1
            && let Some(table) = replica.description().tables.first()
        {
            return Err(ReplicaError::Devices(format!(
                "{count} devices are given, and a model with tables (here {:?}) takes one in each worker; start more workers",
                table.name
            )));
        }
        replicas.push(replica);
    }
    Ok(replicas)
}

/// Logs the devices.
fn tell(devices: &[Device]) {
    let names: Vec<String> = devices.iter().map(device::name).collect();
    tracing::info!(devices = names.join(","), "computing");
}

#[async_trait(?Send)]
impl Replica for DeviceReplicas {
    fn description(&self) -> &Description {
        self.first_replica().description()
    }

    async fn prepare(&self, positions: Positions) -> Prepared {
        let mut parts = Vec::new();
        for share in self.shares(positions) {
            parts.push(share.replica.prepare(share.positions).await);
        }
        Prepared::of_parts(positions, parts)
    }

    async fn load(&self, parts: Vec<Part>) {
        join_all(
            self.replicas
                .iter()
                .map(|replica| replica.load(parts.clone())),
        )
        .await;
    }

    async fn compute(&self, positions: Positions, step: Step) -> Result<Computed, ReplicaError> {
        if let [one] = &self.replicas[..] {
            return one.compute(positions, step).await;
        }
        let compute = async |share: Share<'_>| {
            let computed = share.replica.compute(share.positions, share.of(step));
            Ok::<_, ReplicaError>((share.part, computed.await?))
        };
        let computed = try_join_all(self.shares(positions).map(compute)).await?;
        Ok(self.mean(computed))
    }

    async fn begin(&self, positions: Positions, step: Step) -> Option<Computing> {
        match &self.replicas[..] {
            [one] => one.begin(positions, step).await,
            _ => None,
        }
    }

    async fn evaluate(&self, part: EvaluationPart) -> Result<Evaluation, ReplicaError> {
        self.first_replica().evaluate(part).await
    }

    async fn initial_values(&self) -> Result<Vec<Elements>, ReplicaError> {
        self.first_replica().initial_values().await
    }

    fn mirror(&self) -> Option<&dyn Mirror> {
        Some(self)
    }

    async fn save(&self, path: PathBuf) -> Result<(), ReplicaError> {
        self.first_replica().save(path).await
    }
}

#[async_trait(?Send)]
impl Mirror for DeviceReplicas {
    fn first(&self) -> &dyn FirstReplica {
        self.first_replica()
    }

    async fn update(
        &self,
        gradient: BucketedGradients,
        made: StepsMade,
    ) -> Result<BucketedGradients, ReplicaError> {
        let (first, others) = (self.first_replica(), &self.keepers()[1..]);
        let others = others
            .iter()
            .map(|replica| replica.update(gradient.clone(), made));
        let others = try_join_all(others.collect::<Vec<_>>());
        let (memory, updated) = tokio::join!(first.update(gradient, made), others);
        updated?;
        let memory = memory?;
        self.copy_values().await?;
        Ok(memory)
    }

    /// Only the first replica makes the update. The others copy its values.
    async fn make_update(
        &self,
        values: Vec<f32>,
        made: StepsMade,
    ) -> Result<Vec<f32>, ReplicaError> {
        let memory = self.first_replica().make_update(values, made).await?;
        self.copy_values().await?;
        Ok(memory)
    }

    async fn scale_learning_rate(&self, factor: f64) -> Result<(), ReplicaError> {
        let keepers = self.keepers().iter();
        let lowered = keepers.map(|replica| replica.scale_learning_rate(factor));
        try_join_all(lowered).await.map(drop)
    }

    async fn compute_with(
        &self,
        others: Others,
        positions: Positions,
        step: Step,
    ) -> Result<Computed, ReplicaError> {
        if let [one] = &self.replicas[..] {
            return one.compute_with(others, positions, step).await;
        }
        let (mut ends, mut computing) = (Vec::new(), Vec::new());
        for share in self.shares(positions) {
            let (others, end) = rounds();
            ends.push(end);
            computing.push(async move {
                let step = share.of(step);
                let computed = share.replica.compute_with(others, share.positions, step);
                Ok::<_, ReplicaError>((share.part, computed.await?))
            });
        }
        // If one fails, the others end their passes without it.
        let (met, computed) = tokio::join!(meet(ends, &others), try_join_all(computing));
        met?;
        Ok(self.mean(computed?))
    }

    /// Returns false for several replicas, because a worker adds up their gradients before it sends any.
    fn fills_buckets(&self) -> bool {
        matches!(&self.replicas[..], [one] if one.fills_buckets())
    }

    async fn compute_in_buckets(
        &self,
        filling: Filling,
        positions: Positions,
        step: Step,
    ) -> Result<InBuckets, ReplicaError> {
        let computed = self
            .first_replica()
            .compute_in_buckets(filling, positions, step);
        computed.await
    }

    async fn note_made(&self, made: StepsMade) -> Result<(), ReplicaError> {
        let noted = self.keepers().iter().map(|replica| replica.note_made(made));
        try_join_all(noted).await?;
        // An update that was given up halfway may not have reached the other devices.
        self.copy_values().await
    }

    async fn state(&self) -> Result<MirrorState, ReplicaError> {
        self.first_replica().state().await
    }

    async fn set_state(&self, state: MirrorState, made: StepsMade) -> Result<(), ReplicaError> {
        let keepers = self.keepers().iter();
        let set = keepers.map(|replica| replica.set_state(state.clone(), made));
        try_join_all(set).await?;
        self.copy_values().await
    }

    async fn made(&self) -> Result<Option<StepsMade>, ReplicaError> {
        let made = try_join_all(self.keepers().iter().map(ModelReplica::made)).await?;
        let all_equal = made.windows(2).all(|pair| pair[0] == pair[1]);
        Ok(made.first().copied().flatten().filter(|_| all_equal))
    }

    fn device_steps(&self) -> Option<&dyn DeviceSteps> {
        match &self.replicas[..] {
            _ if self.adding == Adding::WithinWorker => Some(self),
            [one] => one.device_steps(),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shared_proto::job::{Adam, Optimizer};

    /// Makes some steps. Returns the values of each device.
    async fn values_after_steps(strategy: StrategyName) -> Vec<Vec<Elements>> {
        let mut job = Job::default();
        job.strategy.name = strategy;
        job.optimizer = Optimizer::Adam(Adam::default());
        let devices = vec![Device::Cpu; 3];
        let (job, registry) = (Arc::new(job), Registry::builtin());
        let replicas = DeviceReplicas::start(&job, &registry, &devices);
        let replicas = replicas.await.unwrap();
        for step in 0..5 {
            let positions = Positions {
                data_epoch: 0,
                start: step * 16,
                end: step * 16 + 16,
            };
            replicas.prepare(positions).await;
            let computed = replicas.compute(positions, Step::default()).await.unwrap();
            let mut gradient = Vec::new();
            for values in &computed.gradients.values {
                let start = gradient.len();
                gradient.resize(start + values.len(), 0.0);
                values.copy_to(&mut gradient[start..]);
            }
            let made = StepsMade::default();
            replicas.update(gradient.into(), made).await.unwrap();
            assert_eq!(replicas.made().await.unwrap(), Some(made));
        }
        let values = replicas.replicas.iter().map(ModelReplica::values);
        try_join_all(values).await.unwrap()
    }

    #[tokio::test]
    async fn all_devices_hold_the_same_bits() {
        let mirrored = values_after_steps(StrategyName::Mirrored).await;
        let central = values_after_steps(StrategyName::CentralStorage).await;
        for device in mirrored.iter().chain(&central) {
            assert_eq!(*device, mirrored[0]);
        }
    }
}
