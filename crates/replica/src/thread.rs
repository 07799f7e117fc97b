//! A replica: a candle model on a thread of its own, so that candle does not block tokio. Another thread reads the
//! batches.
//!
//! - `handle`: sends commands to the thread
//! - `pass`: the passes of a training step; `buckets`: those with gradients that leave in buckets; `on_device`: those
//!   with gradients that stay on the device; `stages`: those of some stages of a model
//! - `mirror`: commands of strategies without servers
//! - `nccl`, or `without_nccl`: sums among GPUs; `memory`: explains that a device has too little memory

mod buckets;
mod handle;
mod memory;
mod mirror;
#[cfg(feature = "nccl")]
mod nccl;
mod on_device;
mod pass;
mod stages;
#[cfg(not(feature = "nccl"))]
mod without_nccl;

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use candle_core::Device;
use shared_proto::job::{Job, NonFinite, StrategyName};
use shared_proto::payload::Elements;
use shared_proto::step::{Part, PartOf};
use tokio::sync::{mpsc, oneshot};

use self::buckets::Bucketed;
pub(super) use self::gpus::NcclId;
pub use self::handle::ModelReplica;
#[cfg(feature = "nccl")]
use self::nccl as gpus;
pub(super) use self::on_device::PartOfStep;
use self::on_device::{DeviceCommand, OnDevice};
use self::stages::StageCommand;
#[cfg(not(feature = "nccl"))]
use self::without_nccl as gpus;
use super::build::{Built, Place, build};
use super::error::ReplicaError;
use super::evaluating::Evaluating;
use super::filling::Filling;
use super::interface::{Description, Evaluation, EvaluationPart};
use super::mirror::InBuckets;
use super::mirrored::{MirrorCommand, Mirrored, Reply};
use super::pipeline::Pipeline;
use super::reader::{self, Batches, Request, SharedModel};
use super::rounds::Others;
use super::step::{Computed, Positions, Step};
use model::input::{Dataset, Fitted, Purpose, Samples, Signature};
use model::registry::Registry;
use model::tables::ModelTables;
use model::{Objective, Pass};
use variables::Variables;

enum Command {
    /// With the channel on which the reader sends the step's batches.
    Prepare(Positions, oneshot::Receiver<Batches>),
    Load(Vec<Part>),
    /// With the other replicas, if they compute the step together with this one.
    Compute(Positions, Step, Option<Others>, Reply<Computed>),
    ComputeInBuckets(Positions, Step, Filling, Reply<InBuckets>),
    BucketedGradients(Reply<Vec<Elements>>),
    GradientOrder(Reply<Vec<usize>>),
    OnDevice(DeviceCommand),
    Stages(StageCommand),
    Evaluate(EvaluationPart, Reply<Evaluation>),
    InitialValues(Reply<Vec<Elements>>),
    Save(PathBuf, Reply<()>),
    Mirror(MirrorCommand),
}

/// The state that lives on the thread.
struct Thread {
    job: Arc<Job>,
    registry: Registry,
    description: Description,
    signature: Signature,
    evaluation: Box<dyn Samples>,
    transforms: Option<Fitted>,
    objective: Objective,
    model: SharedModel,
    variables: Variables,
    tables: ModelTables,
    /// The rows of each table that were pulled for the next batch.
    pulled: Vec<Vec<f32>>,
    /// The evaluation that is under way.
    evaluating: Option<Evaluating>,
    device: Device,
    /// The stages of the model, if it is cut into stages.
    pipeline: Option<Pipeline>,
    reader: Option<JoinHandle<()>>,
    /// The batches of steps that were prepared and not computed yet, the oldest first.
    prepared: VecDeque<(Positions, oneshot::Receiver<Batches>)>,
    bucketed: Bucketed,
    on_device: OnDevice,
    /// True if the variables no longer have their initial values.
    overwritten: bool,
    mirrored: Mirrored,
    /// The first error of loading values since the last computation.
    loaded: Result<(), ReplicaError>,
}

impl Thread {
    fn new(
        job: Arc<Job>,
        registry: Registry,
        devices: &[Device],
    ) -> Result<(Self, mpsc::Sender<Request>), ReplicaError> {
        let device = devices.first().ok_or_else(without_device)?.clone();
        let data = registry.open(&job.data, job.seed, Purpose::Training)?;
        let objective = Objective::new(&job.objective, &data.signature)?;
        let (built, pipeline) = built(&job, &registry, devices, &data.signature, &objective)?;
        let Built {
            variables,
            tables,
            model,
        } = built;
        let model = SharedModel::new(model.into());
        let description = Description {
            variables: variables.specs(),
            tables: tables.specs(),
            training_samples: data.training.count(),
            evaluation_samples: data.evaluation.count(),
            data_digest: data.digest(),
        };
        let Dataset {
            training,
            evaluation,
            signature,
            transforms,
        } = data;
        let read = reader::start(job.clone(), training, model.clone(), tables.clone());
        let (requests, reader) = read?;
        let thread = Self {
            job,
            registry,
            description,
            signature,
            evaluation,
            transforms,
            objective,
            model,
            variables,
            pulled: vec![Vec::new(); tables.specs().len()],
            tables,
            evaluating: None,
            device,
            pipeline,
            reader: Some(reader),
            prepared: VecDeque::new(),
            bucketed: Bucketed::default(),
            on_device: OnDevice::default(),
            overwritten: false,
            mirrored: Mirrored::default(),
            loaded: Ok(()),
        };
        Ok((thread, requests))
    }

    fn serve(&mut self, mut queue: mpsc::Receiver<Command>) {
        while let Some(command) = queue.blocking_recv() {
            // A caller that is gone does not need the answer.
            match command {
                Command::Prepare(positions, batches) => {
                    // Memberships that have ended may have left batches behind.
                    let ahead = self.job.data.prefetch as usize;
                    let surplus = self.prepared.len().saturating_sub(ahead);
                    self.prepared.drain(..surplus);
                    self.prepared.push_back((positions, batches));
                }
                Command::Load(parts) => {
                    let loaded = self.load(&parts);
                    self.loaded = std::mem::replace(&mut self.loaded, Ok(())).and(loaded);
                }
                // The membership that has begun it has ended, and with it the weights that it loaded.
                Command::Compute(_, _, None, reply) if reply.is_closed() => {
                    self.loaded = Ok(());
                }
                Command::Compute(positions, step, others, reply) => {
                    drop(reply.send(self.compute(positions, step, others)));
                }
                Command::ComputeInBuckets(positions, step, filling, reply) => {
                    drop(reply.send(self.compute_in_buckets(positions, step, filling)));
                }
                Command::BucketedGradients(reply) => {
                    drop(reply.send(self.bucketed_gradients()));
                }
                Command::GradientOrder(reply) => drop(reply.send(Ok(self.gradient_order()))),
                Command::OnDevice(command) => self.serve_on_device(command),
                Command::Stages(command) => self.serve_stages(command),
                Command::Evaluate(part, reply) => drop(reply.send(self.evaluate(part))),
                Command::InitialValues(reply) => drop(reply.send(self.initial_values())),
                Command::Save(path, reply) => {
                    drop(reply.send(self.save(&path)));
                }
                Command::Mirror(command) => {
                    self.bucketed.forget();
                    self.on_device.forget();
                    self.overwritten |= self.mirrored.serve(
                        command,
                        &self.job,
                        &self.variables,
                        self.description.training_samples,
                    );
                }
            }
        }
    }

    /// Evaluates the part that was read last, and reads the next one. The rows of the first must be loaded.
    fn evaluate(&mut self, part: EvaluationPart) -> Result<Evaluation, ReplicaError> {
        std::mem::replace(&mut self.loaded, Ok(()))?;
        let mut evaluating = match (part, self.evaluating.take()) {
            (EvaluationPart::Next, Some(evaluating)) => evaluating,
            _ => {
                if self.job.non_finite == NonFinite::Fail {
                    self.variables.check_finite()?;
                }
                Evaluating::begin(&*self.model.get(), &self.objective)
            }
        };
        if let Some((batch, rows)) = evaluating.read.take() {
            let rows = self.tables.rows(&rows, &mut self.pulled, &self.device)?;
            self.tables.set(&rows);
            let pass = Pass::evaluation(&self.objective);
            let model = self.model.get();
            let outputs = match &self.pipeline {
                Some(pipeline) => pipeline.forward(&*model, &batch, &pass),
                None => model.forward(&batch, &pass),
            }?;
            evaluating.add(&*model, &outputs, &batch, &pass)?;
        }
        let samples = &mut *self.evaluation;
        match evaluating.next(samples, &self.tables, &self.device)? {
            Some(wants) => {
                self.evaluating = Some(evaluating);
                Ok(Evaluation::Wants(wants))
            }
            None => Ok(Evaluation::Done(evaluating.metrics())),
        }
    }

    fn load(&mut self, parts: &[Part]) -> Result<(), ReplicaError> {
        for part in parts {
            let start = part.start;
            match part.of {
                PartOf::Variable(variable) => {
                    self.overwritten = true;
                    // The optimizer's state is that of other values.
                    self.mirrored = Mirrored::default();
                    self.variables.write(variable, start, &part.values)?;
                }
                PartOf::Table(table) => self.load_rows(table, start, &part.values)?,
            }
        }
        Ok(())
    }

    /// Keeps rows of a table for the next batch.
    fn load_rows(
        &mut self,
        table: usize,
        start: usize,
        values: &Elements,
    ) -> Result<(), ReplicaError> {
        let missing = || candle_core::Error::msg(format!("there is no table number {table}"));
        let pulled = self.pulled.get_mut(table).ok_or_else(missing)?;
        let end = start + values.len();
        if pulled.len() < end {
            pulled.resize(end, 0.0);
        }
        values.copy_to(&mut pulled[start..end]);
        Ok(())
    }

    fn save(&self, path: &Path) -> Result<(), ReplicaError> {
        data::save_transforms(self.transforms.as_ref(), path)?;
        Ok(self.variables.save(path)?)
    }

    fn initial_values(&self) -> Result<Vec<Elements>, ReplicaError> {
        let again;
        let variables = if self.overwritten {
            let (signature, objective) = (&self.signature, &self.objective);
            // One device may not have the memory for the whole model.
            let place = match self.pipeline {
                Some(_) => Place::on(&Device::Cpu),
                None => Place::on(&self.device),
            };
            let built = build(&self.job, &self.registry, &place, signature, objective)?;
            again = built.variables;
            &again
        } else {
            &self.variables
        };
        Ok(variables.all_values()?)
    }
}

/// Builds a job's model: in stages on these devices if the strategy is `model-parallel`, otherwise on the first device.
fn built(
    job: &Job,
    registry: &Registry,
    devices: &[Device],
    data: &Signature,
    objective: &Objective,
) -> Result<(Built, Option<Pipeline>), ReplicaError> {
    let first = devices.first().ok_or_else(without_device)?;
    if job.strategy.name != StrategyName::ModelParallel {
        return Ok((
            build(job, registry, &Place::on(first), data, objective)?,
            None,
        ));
    }
    let build = |stages| {
        let place = Place::in_stages(first, stages);
        build(job, registry, &place, data, objective)
    };
    let (built, pipeline) = Pipeline::build(job, devices, build)?;
    Ok((built, Some(pipeline)))
}

fn without_device() -> ReplicaError {
    ReplicaError::Devices("no device is given; give at least one, as in --device cpu".to_owned())
}

fn nothing() -> candle_core::Error {
    candle_core::Error::msg("the batch was not prepared")
}
