//! A replica that is a candle model on a thread of its own, so that candle does not block tokio.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;

use async_trait::async_trait;
use bytes::Bytes;
use candle_core::Device;
use parking_lot::Mutex;
use shared_proto::job::{Job, NonFinite};
use tokio::sync::{mpsc, oneshot};

use super::error::ReplicaError;
use super::interface::{Computed, Description, EVERY_BATCH, Positions, Prepared, Replica, Want};
use crate::input::{Dataset, Pass, read};
use crate::model::{Batch, Metrics, Model, ModelError, Setup};
use crate::models::layers::backward;
use crate::registry::Registry;
use crate::variables::{Part, Variables};

/// The number of samples that are evaluated together.
const EVALUATION_BATCH: u64 = 256;

/// The number of commands that may wait for the model's thread.
const COMMANDS: usize = 4;

type Reply<T> = oneshot::Sender<Result<T, ReplicaError>>;

enum Command {
    Prepare(Positions, oneshot::Sender<Vec<Want>>),
    TakeIn(Vec<Part>),
    Compute(Positions, Reply<Computed>),
    Evaluate(Reply<Metrics>),
    InitialValues(Reply<Vec<Bytes>>),
    Save(PathBuf, Reply<()>),
}

/// A candle model on a thread of its own, which ends when this is dropped.
pub struct ModelReplica {
    commands: mpsc::Sender<Command>,
    thread: Mutex<Option<JoinHandle<()>>>,
    description: Description,
}

impl ModelReplica {
    /// Reads the data and builds the model, on the thread where they stay.
    ///
    /// # Errors
    /// If either fails.
    pub async fn start(
        job: Arc<Job>,
        registry: Registry,
        device: Device,
    ) -> Result<Self, ReplicaError> {
        let (commands, queue) = mpsc::channel(COMMANDS);
        let (tell, told) = oneshot::channel();
        let thread = std::thread::Builder::new()
            .name("replica".to_owned())
            .spawn(move || match Thread::new(job, registry, device) {
                Ok(mut thread) => {
                    let _ = tell.send(Ok(thread.description()));
                    thread.serve(queue);
                }
                Err(error) => {
                    let _ = tell.send(Err(error));
                }
            })
            .map_err(ReplicaError::Thread)?;
        let thread = Mutex::new(Some(thread));
        match told.await {
            Ok(description) => Ok(Self {
                description: description?,
                commands,
                thread,
            }),
            Err(_) => Err(panicked(&thread).await),
        }
    }

    async fn ask<T>(&self, command: impl FnOnce(Reply<T>) -> Command) -> Result<T, ReplicaError> {
        let (reply, answer) = oneshot::channel();
        let _ = self.commands.send(command(reply)).await;
        match answer.await {
            Ok(answer) => answer,
            Err(_) => Err(panicked(&self.thread).await),
        }
    }
}

#[async_trait(?Send)]
impl Replica for ModelReplica {
    fn description(&self) -> &Description {
        &self.description
    }

    async fn prepare(&self, positions: Positions) -> Prepared {
        let (reply, wants) = oneshot::channel();
        // If the thread has ended, the next command that waits for an answer reports it.
        let _ = self.commands.send(Command::Prepare(positions, reply)).await;
        Prepared::assembling(positions, wants)
    }

    async fn take_in(&self, parts: Vec<Part>) {
        // If the thread has ended, the next command that waits for an answer reports it.
        let _ = self.commands.send(Command::TakeIn(parts)).await;
    }

    async fn compute(&self, positions: Positions) -> Result<Computed, ReplicaError> {
        self.ask(|reply| Command::Compute(positions, reply)).await
    }

    async fn evaluate(&self) -> Result<Metrics, ReplicaError> {
        self.ask(Command::Evaluate).await
    }

    async fn initial_values(&self) -> Result<Vec<Bytes>, ReplicaError> {
        self.ask(Command::InitialValues).await
    }

    async fn save(&self, path: PathBuf) -> Result<(), ReplicaError> {
        self.ask(|reply| Command::Save(path, reply)).await
    }
}

/// Returns the error of a thread that has panicked.
async fn panicked(thread: &Mutex<Option<JoinHandle<()>>>) -> ReplicaError {
    let thread = thread.lock().take();
    let join = tokio::task::spawn_blocking(|| thread.map(JoinHandle::join));
    let message = match join.await {
        Ok(Some(Err(panic))) => {
            match (panic.downcast_ref::<&str>(), panic.downcast_ref::<String>()) {
                (Some(text), _) => (*text).to_owned(),
                (_, Some(text)) => text.clone(),
                _ => "without a message".to_owned(),
            }
        }
        _ => "see above".to_owned(),
    };
    ReplicaError::Panicked(message)
}

/// The state that lives on the thread.
struct Thread {
    job: Arc<Job>,
    registry: Registry,
    data: Dataset,
    model: Box<dyn Model>,
    variables: Variables,
    device: Device,
    /// The batches that were prepared and not computed yet, the oldest first.
    prepared: VecDeque<(Positions, Result<Batch, ReplicaError>)>,
    /// True if the variables no longer have their initial values.
    overwritten: bool,
    /// The error of weights taken in since the last answer.
    taken_in: Result<(), ReplicaError>,
}

impl Thread {
    fn new(job: Arc<Job>, registry: Registry, device: Device) -> Result<Self, ReplicaError> {
        let data = registry.open(&job.data, job.seed)?;
        let (variables, model) = build(&job, &registry, &device, &data)?;
        Ok(Self {
            data,
            model,
            variables,
            device,
            job,
            registry,
            overwritten: false,
            prepared: VecDeque::new(),
            taken_in: Ok(()),
        })
    }

    fn description(&self) -> Description {
        Description {
            variables: self.variables.specs(),
            training_samples: self.data.training.count(),
            evaluation_samples: self.data.evaluation.count(),
            data_digest: self.data.digest(),
        }
    }

    fn serve(&mut self, mut queue: mpsc::Receiver<Command>) {
        while let Some(command) = queue.blocking_recv() {
            // A caller that is gone does not need the answer.
            match command {
                Command::Prepare(positions, reply) => {
                    let batch = self.batch(positions);
                    let wants = batch.as_ref().map_or(&[][..], |_| EVERY_BATCH);
                    let _ = reply.send(wants.to_vec());
                    // Memberships that have ended may have left batches behind.
                    let ahead = self.job.data.prefetch as usize;
                    let surplus = self.prepared.len().saturating_sub(ahead);
                    self.prepared.drain(..surplus);
                    self.prepared.push_back((positions, batch));
                }
                Command::TakeIn(parts) => {
                    let taken_in = self.take_in(&parts);
                    self.taken_in = std::mem::replace(&mut self.taken_in, Ok(())).and(taken_in);
                }
                Command::Compute(positions, reply) => {
                    drop(reply.send(self.compute(positions)));
                }
                Command::Evaluate(reply) => drop(reply.send(self.evaluate())),
                Command::InitialValues(reply) => drop(reply.send(self.initial_values())),
                Command::Save(path, reply) => {
                    drop(reply.send(self.variables.save(&path).map_err(Into::into)));
                }
            }
        }
    }

    fn batch(&mut self, positions: Positions) -> Result<Batch, ReplicaError> {
        let pass = Pass::Shuffled {
            seed: self.job.seed,
            epoch: positions.epoch,
        };
        let positions = positions.start..positions.end;
        Ok(read(
            &mut *self.data.training,
            pass,
            positions,
            &self.device,
        )?)
    }

    fn compute(&mut self, positions: Positions) -> Result<Computed, ReplicaError> {
        std::mem::replace(&mut self.taken_in, Ok(()))?;
        let mut prepared = std::iter::from_fn(|| self.prepared.pop_front());
        // A membership that has ended may have left batches behind.
        let batch = prepared.find(|(of, _)| *of == positions);
        let nothing = || candle_core::Error::msg("the batch was not prepared");
        let batch = batch.ok_or_else(nothing)?.1?;
        let loss = self.model.loss(&batch)?;
        let gradients = self
            .variables
            .gradients(&backward(&loss)?, self.job.clip_norm)?;
        Ok(Computed {
            loss: f64::from(loss.to_scalar::<f32>()?),
            gradients,
        })
    }

    fn evaluate(&mut self) -> Result<Metrics, ReplicaError> {
        std::mem::replace(&mut self.taken_in, Ok(()))?;
        if self.job.non_finite == NonFinite::Fail {
            self.variables.check_finite()?;
        }
        evaluate(&*self.model, &mut self.data, &self.device)
    }

    fn take_in(&mut self, parts: &[Part]) -> Result<(), ReplicaError> {
        self.overwritten = true;
        for part in parts {
            let (variable, start) = (part.variable, part.start);
            self.variables.write(variable, start, &part.values)?;
        }
        Ok(())
    }

    fn initial_values(&self) -> Result<Vec<Bytes>, ReplicaError> {
        let again;
        let variables = if self.overwritten {
            (again, _) = build(&self.job, &self.registry, &self.device, &self.data)?;
            &again
        } else {
            &self.variables
        };
        let count = variables.specs().len();
        let values = (0..count).map(|variable| Ok(variables.values(variable)?));
        values.collect()
    }
}

/// Builds a job's model for its data, with initial values.
pub(crate) fn build(
    job: &Job,
    registry: &Registry,
    device: &Device,
    data: &Dataset,
) -> Result<(Variables, Box<dyn Model>), ModelError> {
    let setup = Setup {
        settings: &job.model,
        sample_shape: &data.sample_shape,
        classes: data.classes,
    };
    Variables::build(job.seed, device, |vars| {
        registry.build(&job.model.name, &setup, vars)
    })
}

/// Returns the means of a model's metrics over the held-out samples.
///
/// # Errors
/// The data's or the model's.
pub fn evaluate(
    model: &dyn Model,
    data: &mut Dataset,
    device: &Device,
) -> Result<Metrics, ReplicaError> {
    let samples = data.evaluation.count();
    let mut sums = Metrics::new();
    let mut start = 0;
    while start < samples {
        let end = samples.min(start + EVALUATION_BATCH);
        let batch = read(&mut *data.evaluation, Pass::Stored, start..end, device)?;
        for (name, mean) in model.metrics(&batch)? {
            *sums.entry(name).or_default() += mean * (end - start) as f64;
        }
        start = end;
    }
    sums.values_mut().for_each(|sum| *sum /= samples as f64);
    Ok(sums)
}
