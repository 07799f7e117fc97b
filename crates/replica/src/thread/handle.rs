//! A handle to the model's thread: it sends commands and awaits answers.

use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;

use async_trait::async_trait;
use candle_core::Device;
use parking_lot::Mutex;
use shared_proto::job::{Clip, Job, StrategyName};
use shared_proto::payload::Elements;
use tokio::sync::{mpsc, oneshot};

use super::{Command, Thread, gpus};
use crate::build::precision;
use crate::error::{ReplicaError, panic_message};
use crate::interface::{Computing, Description, Evaluation, EvaluationPart, Prepared, Replica};
use crate::mirror::Mirror;
use crate::mirrored::Reply;
use crate::reader::Request;
use crate::step::{Computed, Positions, Step};
use crate::threads;
use model::registry::Registry;
use shared_proto::step::Part;
/// The number of commands that may wait for the model's thread.
const COMMANDS: usize = 64;

/// A candle model on a thread of its own, which ends when this is dropped.
pub struct ModelReplica {
    commands: mpsc::Sender<Command>,
    requests: mpsc::Sender<Request>,
    thread: Arc<Mutex<Option<JoinHandle<()>>>>,
    description: Description,
    pub(super) fills_buckets: bool,
    /// True if gradients can stay on the device.
    pub(super) steps_on_device: bool,
    pub(super) on_gpu: bool,
    /// The name of the device, which no other device has, if it can be in a group with devices of other workers.
    pub(super) unique_name: Option<String>,
    /// The number of devices that have stages of a model; 0 if the model is not cut.
    pub(super) stage_devices: usize,
}

impl ModelReplica {
    /// Starts a thread, which reads the data, builds the model and keeps both.
    ///
    /// # Errors
    /// If either fails.
    pub async fn start(
        job: Arc<Job>,
        registry: Registry,
        device: Device,
    ) -> Result<Self, ReplicaError> {
        Self::start_on(job, registry, vec![device], threads::number()).await
    }

    /// Starts the thread of [`Self::start`]. The model is in stages on these devices if the strategy is
    /// `model-parallel`, otherwise on the first device. On a CPU, a model that is not in stages computes on `threads`
    /// threads.
    ///
    /// # Errors
    /// If either fails.
    pub(crate) async fn start_on(
        job: Arc<Job>,
        registry: Registry,
        devices: Vec<Device>,
        threads: usize,
    ) -> Result<Self, ReplicaError> {
        let (commands, queue) = mpsc::channel(COMMANDS);
        let (tell, told) = oneshot::channel();
        let precision = precision(&job);
        // Gradients are clipped, and those of several batches added up, before any of them leaves.
        let is_whole = job.strategy.name != StrategyName::ModelParallel;
        let (clips, accumulate) = (job.worker_clip() != Clip::default(), job.accumulate);
        let fills_buckets = !clips && accumulate == 1 && is_whole;
        let stage_devices = if is_whole { 0 } else { devices.len() };
        let on_gpu = devices.first().is_some_and(|device| !device.is_cpu());
        let unique_name = devices.first().and_then(gpus::unique_name);
        let threads = (is_whole && !on_gpu).then_some(threads);
        let serve = move || match Thread::new(job, registry, &devices) {
            Ok((mut thread, requests)) => {
                let _ = tell.send(Ok((thread.description.clone(), requests)));
                nn::autocast(precision, || thread.serve(queue));
            }
            Err(error) => {
                let _ = tell.send(Err(error));
            }
        };
        let thread = std::thread::Builder::new()
            .name("replica".to_owned())
            .spawn(move || threads::in_pool(threads, serve))
            .map_err(ReplicaError::Thread)?;
        let thread = Arc::new(Mutex::new(Some(thread)));
        match told.await {
            Ok(started) => {
                let (description, requests) = started?;
                let steps_on_device =
                    is_whole && accumulate == 1 && (description.tables.is_empty() || !clips);
                Ok(Self {
                    commands,
                    requests,
                    thread,
                    description,
                    fills_buckets,
                    steps_on_device,
                    on_gpu,
                    unique_name,
                    stage_devices,
                })
            }
            Err(_) => Err(panicked(&thread).await),
        }
    }

    pub(super) async fn ask<T>(
        &self,
        command: impl FnOnce(Reply<T>) -> Command,
    ) -> Result<T, ReplicaError> {
        let (reply, answer) = oneshot::channel();
        let _ = self.commands.send(command(reply)).await;
        answered(answer, Arc::clone(&self.thread)).await
    }
}

#[async_trait(?Send)]
impl Replica for ModelReplica {
    fn description(&self) -> &Description {
        &self.description
    }

    async fn prepare(&self, positions: Positions) -> Prepared {
        let (wants, wanted) = oneshot::channel();
        let (batches, read) = oneshot::channel();
        // If a thread has ended, the next command that waits for an answer reports it.
        let request = Request {
            positions,
            wants,
            batches,
        };
        let _ = self.requests.send(request).await;
        let _ = self.commands.send(Command::Prepare(positions, read)).await;
        Prepared::assembling(positions, wanted)
    }

    async fn load(&self, parts: Vec<Part>) {
        // If the thread has ended, the next command that waits for an answer reports it.
        let _ = self.commands.send(Command::Load(parts)).await;
    }

    async fn compute(&self, positions: Positions, step: Step) -> Result<Computed, ReplicaError> {
        self.ask(|reply| Command::Compute(positions, step, None, reply))
            .await
    }

    async fn begin(&self, positions: Positions, step: Step) -> Option<Computing> {
        let (reply, answer) = oneshot::channel();
        let command = Command::Compute(positions, step, None, reply);
        let _ = self.commands.send(command).await;
        let computed = answered(answer, Arc::clone(&self.thread));
        Some(Computing::new(positions, step, computed))
    }

    async fn evaluate(&self, part: EvaluationPart) -> Result<Evaluation, ReplicaError> {
        self.ask(|reply| Command::Evaluate(part, reply)).await
    }

    async fn initial_values(&self) -> Result<Vec<Elements>, ReplicaError> {
        self.ask(Command::InitialValues).await
    }

    async fn save(&self, path: PathBuf) -> Result<(), ReplicaError> {
        self.ask(|reply| Command::Save(path, reply)).await
    }

    fn mirror(&self) -> Option<&dyn Mirror> {
        Some(self)
    }
}

/// Waits for the answer of a thread, or returns the error of a thread that has panicked.
async fn answered<T>(
    answer: oneshot::Receiver<Result<T, ReplicaError>>,
    thread: Arc<Mutex<Option<JoinHandle<()>>>>,
) -> Result<T, ReplicaError> {
    match answer.await {
        Ok(answer) => answer,
        Err(_) => Err(panicked(&thread).await),
    }
}

/// Returns the error of a thread that has panicked.
async fn panicked(thread: &Mutex<Option<JoinHandle<()>>>) -> ReplicaError {
    let thread = thread.lock().take();
    let ended = tokio::task::spawn_blocking(|| ended(thread)).await;
    ended.unwrap_or_else(|error| ReplicaError::Panicked(error.to_string()))
}

/// Waits for the end of a thread that has panicked, and returns its error.
pub(super) fn ended(thread: Option<JoinHandle<()>>) -> ReplicaError {
    let message = match thread.map(JoinHandle::join) {
        Some(Err(panic)) => panic_message(&*panic),
        _ => "see above".to_owned(),
    };
    ReplicaError::Panicked(message)
}
