//! A replica that is a candle model on a thread of its own, so that candle does not block tokio.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use async_trait::async_trait;
use candle_core::{DType, Device};
use nn::backward;
use parking_lot::Mutex;
use shared_proto::job::{Job, NonFinite, matches_pattern};
use shared_proto::payload::{Dtype, Elements};
use shared_proto::step::{EVERY_BATCH, Want};
use tokio::sync::{mpsc, oneshot};

use super::error::ReplicaError;
use super::interface::{Computed, Description, Positions, Prepared, Replica, Step};
use crate::input::{Dataset, Order, Purpose, Signature, read};
use crate::model::{Batch, Metrics, Model, Objective, Pass, Setup};
use crate::registry::Registry;
use crate::variables::{Part, Trained, Variables};

/// The number of samples that are evaluated together.
pub(crate) const EVALUATION_BATCH: u64 = 256;

/// The number of commands that may wait for the model's thread.
const COMMANDS: usize = 4;

type Reply<T> = oneshot::Sender<Result<T, ReplicaError>>;

enum Command {
    Prepare(Positions, oneshot::Sender<Vec<Want>>),
    TakeIn(Vec<Part>),
    Compute(Positions, Step, Reply<Computed>),
    Evaluate(Reply<Metrics>),
    InitialValues(Reply<Vec<Elements>>),
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

    async fn compute(&self, positions: Positions, step: Step) -> Result<Computed, ReplicaError> {
        self.ask(|reply| Command::Compute(positions, step, reply))
            .await
    }

    async fn evaluate(&self) -> Result<Metrics, ReplicaError> {
        self.ask(Command::Evaluate).await
    }

    async fn initial_values(&self) -> Result<Vec<Elements>, ReplicaError> {
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
    objective: Objective,
    model: Box<dyn Model>,
    variables: Variables,
    device: Device,
    /// The batches of steps that were prepared and not computed yet, the oldest first.
    prepared: VecDeque<(Positions, Result<Vec<Batch>, ReplicaError>)>,
    /// True if the variables no longer have their initial values.
    overwritten: bool,
    /// The error of weights taken in since the last answer.
    taken_in: Result<(), ReplicaError>,
}

impl Thread {
    fn new(job: Arc<Job>, registry: Registry, device: Device) -> Result<Self, ReplicaError> {
        let data = registry.open(&job.data, job.seed, Purpose::Training)?;
        let objective = Objective::of(&job.objective, &data.signature)?;
        let (variables, model) = build(&job, &registry, &device, &data.signature, &objective)?;
        Ok(Self {
            data,
            objective,
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
                    let batches = self.batches(positions);
                    let wants = batches.as_deref().map(|batches| self.wants(batches));
                    let _ = reply.send(wants.unwrap_or_default());
                    // Memberships that have ended may have left batches behind.
                    let ahead = self.job.data.prefetch as usize;
                    let surplus = self.prepared.len().saturating_sub(ahead);
                    self.prepared.drain(..surplus);
                    self.prepared.push_back((positions, batches));
                }
                Command::TakeIn(parts) => {
                    let taken_in = self.take_in(&parts);
                    self.taken_in = std::mem::replace(&mut self.taken_in, Ok(())).and(taken_in);
                }
                Command::Compute(positions, step, reply) => {
                    drop(reply.send(self.compute(positions, step)));
                }
                Command::Evaluate(reply) => drop(reply.send(self.evaluate())),
                Command::InitialValues(reply) => drop(reply.send(self.initial_values())),
                Command::Save(path, reply) => {
                    drop(reply.send(self.save(&path)));
                }
            }
        }
    }

    /// Reads the batches of a step.
    fn batches(&mut self, positions: Positions) -> Result<Vec<Batch>, ReplicaError> {
        let order = Order::Shuffled {
            seed: self.job.seed,
            epoch: positions.data_epoch,
        };
        let size = u64::from(self.job.batch_size);
        let (training, end) = (&mut *self.data.training, positions.end);
        let starts = (positions.start..end).step_by(size as usize);
        let batch = |start: u64| {
            let positions = start..end.min(start.saturating_add(size));
            Ok(read(training, order, positions, &self.device)?)
        };
        starts.map(batch).collect()
    }

    /// Returns the values that the batches of a step want together.
    fn wants(&self, batches: &[Batch]) -> Vec<Want> {
        // A pull also waits for slower workers, so each step has one.
        let mut wants = EVERY_BATCH.to_vec();
        for want in batches.iter().flat_map(|batch| self.model.wants(batch)) {
            if !wants.contains(&want) {
                wants.push(want);
            }
        }
        wants
    }

    fn compute(&mut self, positions: Positions, step: Step) -> Result<Computed, ReplicaError> {
        std::mem::replace(&mut self.taken_in, Ok(()))?;
        let mut prepared = std::iter::from_fn(|| self.prepared.pop_front());
        // A membership that has ended may have left batches behind.
        let batches = prepared.find(|(of, _)| *of == positions);
        let nothing = || candle_core::Error::msg("the batch was not prepared");
        let batches = batches.ok_or_else(nothing)?.1?;
        let samples: usize = batches.iter().map(Batch::samples).sum();
        let before = self.variables.measured()?;
        let (clock, rank) = (step.clock.0, step.rank);
        let pass = Pass::training(&self.objective, self.job.seed, clock, rank);
        let (mut mean, mut sum) = (0.0, None::<Trained>);
        for batch in &batches {
            let outputs = self.model.forward(batch, &pass)?;
            let loss = self.model.loss(&outputs, batch, &pass)?;
            let share = batch.samples() as f64 / samples as f64;
            mean += share * f64::from(loss.to_scalar::<f32>()?);
            let gradients = self.variables.trained_gradients(&backward(&loss)?)?;
            match &mut sum {
                None if batches.len() == 1 => sum = Some(gradients),
                None => sum = Some(gradients.times(share as f32)),
                Some(sum) => sum.add(gradients, share as f32),
            }
        }
        let sum = sum.ok_or_else(nothing)?;
        let clip = self.job.clip();
        Ok(Computed {
            loss: mean,
            gradients: self.variables.finish_gradients(sum, before, clip)?,
        })
    }

    fn evaluate(&mut self) -> Result<Metrics, ReplicaError> {
        std::mem::replace(&mut self.taken_in, Ok(()))?;
        if self.job.non_finite == NonFinite::Fail {
            self.variables.check_finite()?;
        }
        evaluate(&*self.model, &self.objective, &mut self.data, &self.device)
    }

    fn take_in(&mut self, parts: &[Part]) -> Result<(), ReplicaError> {
        self.overwritten = true;
        for part in parts {
            let (variable, start) = (part.variable, part.start);
            self.variables.write(variable, start, &part.values)?;
        }
        Ok(())
    }

    fn save(&self, path: &Path) -> Result<(), ReplicaError> {
        self.data.save_transforms(path)?;
        Ok(self.variables.save(path)?)
    }

    fn initial_values(&self) -> Result<Vec<Elements>, ReplicaError> {
        let again;
        let variables = if self.overwritten {
            let (signature, objective) = (&self.data.signature, &self.objective);
            (again, _) = build(
                &self.job,
                &self.registry,
                &self.device,
                signature,
                objective,
            )?;
            &again
        } else {
            &self.variables
        };
        let count = variables.specs().len();
        let values = (0..count).map(|v| Ok(Elements::of(variables.values(v)?, Dtype::F32)));
        values.collect()
    }
}

/// Builds a job's model for its data, with initial values, those of `model.init_from` first.
///
/// # Errors
/// The model's, those of the file with initial values, or [`ReplicaError::Pattern`].
pub(crate) fn build(
    job: &Job,
    registry: &Registry,
    device: &Device,
    data: &Signature,
    objective: &Objective,
) -> Result<(Variables, Box<dyn Model>), ReplicaError> {
    let setup = Setup {
        settings: &job.model,
        data,
        objective,
    };
    let groups = job.clone();
    let kind_of = move |name: &str| groups.kind_of(name);
    let (variables, model) = Variables::build(job.seed, kind_of, device, |vars| {
        registry.build(&job.model.name, &setup, vars)
    })?;
    check_patterns(job, &variables)?;
    if let Some(path) = &job.model.init_from {
        let wanted = |name: &str| job.model.is_initial_from_file(name);
        variables.load_known(path, wanted, |foreign| model.name_of(foreign))?;
    }
    Ok((variables, model))
}

/// Refuses a pattern that matches no variable, of a group or of `model.init_except`: it would have no effect.
fn check_patterns(job: &Job, variables: &Variables) -> Result<(), ReplicaError> {
    let names: Vec<String> = variables.specs().into_iter().map(|s| s.name).collect();
    let groups = job.groups.iter().map(|group| &group.variables);
    let mut patterns = groups.chain(&job.model.init_except);
    let without = |pattern: &&String| !names.iter().any(|name| matches_pattern(pattern, name));
    match patterns.find(without) {
        None => Ok(()),
        Some(pattern) => Err(ReplicaError::Pattern {
            pattern: pattern.clone(),
            variables: names,
        }),
    }
}

/// Returns the loss and the metrics of a model over all held-out samples.
///
/// # Errors
/// The data's or the model's.
pub fn evaluate(
    model: &dyn Model,
    objective: &Objective,
    data: &mut Dataset,
    device: &Device,
) -> Result<Metrics, ReplicaError> {
    let samples = data.evaluation.count();
    let pass = Pass::evaluation(objective);
    let mut metrics = objective.accumulators();
    metrics.extend(model.metrics());
    let (mut loss, mut start) = (0.0, 0);
    while start < samples {
        let end = samples.min(start + EVALUATION_BATCH);
        let batch = read(&mut *data.evaluation, Order::Stored, start..end, device)?;
        let outputs = model.forward(&batch, &pass)?;
        let mean = model.loss(&outputs, &batch, &pass)?.to_dtype(DType::F64)?;
        loss += mean.to_scalar::<f64>()? * (end - start) as f64;
        for (_, metric) in &mut metrics {
            metric.add(&outputs, &batch)?;
        }
        start = end;
    }
    let values = metrics
        .into_iter()
        .map(|(name, mut metric)| (name, metric.value()));
    let loss = ("loss".to_owned(), loss / samples as f64);
    Ok(values.chain([loss]).collect())
}
