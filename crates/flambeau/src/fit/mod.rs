//! Training from a program: `fit`, `evaluate`, `predict`.
//!
//! - `joined`: a training on a cluster that runs already
//! - `history`: the measurements of a training
//! - `trained`: the weights of a finished training
//! - `callback`: functions that are called during a training

mod callback;
mod history;
mod joined;
mod trained;

use std::any::type_name;
use std::collections::BTreeMap;
use std::path::PathBuf;

use coordinator::Summary;
use model::Model;
use model::input::{Column, DataSetup, Dataset, InMemory, InputError, Source};
use model::registry::Registry;
use ps_server::RowSettings;
use replica::device::{self, Choices};
use shared_proto::job::{Job, run_dir};
use tempfile::TempDir;
use worker::alone::finder::{LearningRateCurve, RateRange};

use self::callback::Callbacks;
pub use self::callback::{Callback, Control, on_evaluation};
pub use self::history::{Epoch, History, LearningRate, Progress};
pub use self::joined::RunningCluster;
use self::joined::Submission;
pub use self::trained::TrainedModel;
use crate::cluster::{Plan, Roles, Transport};
use crate::command::Weights;
use crate::error::CommandError;
use crate::find_learning_rate::search;
use crate::metrics;
use crate::train::{self, Watch};

/// The kind of data that a program provides itself.
const OWN_DATA: &str = "own-data";

/// Trains a job on a cluster within this process, evaluates the model and predicts with it.
///
/// The coordinator, the parameter servers and the workers are threads of this process, and communicate over sockets as
/// processes do. So any strategy and mode can be tried with any number of servers and workers, also in a test. To train
/// on many machines, add the same model and data to an [`App`](crate::App), a program of all roles.
///
/// ```
/// use flambeau::candle_core::{Result, Tensor};
/// use flambeau::candle_nn::{self, Linear, Module, VarBuilder};
/// use flambeau::settings::EarlyStopping;
/// use flambeau::{Batch, Column, Error, InMemory, Job, Model, Pass, Setup, Trainer};
///
/// struct Straight(Linear);
///
/// impl Model for Straight {
///     fn new(setup: &Setup, vars: VarBuilder) -> Result<Self> {
///         let (features, outputs) = (setup.features()?, setup.outputs());
///         Ok(Self(candle_nn::linear(features, outputs, vars.pp("line"))?))
///     }
///
///     fn forward(&self, batch: &Batch, _: &Pass) -> Result<Tensor> {
///         self.0.forward(&batch.input()?.flatten_from(1)?)
///     }
/// }
///
/// # fn main() -> std::result::Result<(), Error> {
/// let points = |count: usize| (0..count).map(|i| i as f32 / count as f32).collect::<Vec<_>>();
/// let samples = |points: Vec<f32>| {
///     let doubled = points.iter().map(|x| 2.0 * x).collect();
///     InMemory::new(
///         vec![Column::numbers("x", vec![1], points)],
///         vec![Column::numbers("y", vec![1], doubled)],
///     )
/// };
/// let job = Job::from_toml("epochs = 200\noptimizer = { name = \"sgd\", learning_rate = 0.5 }")?;
/// let mut trainer = Trainer::new(job)
///     .model::<Straight>()
///     .in_memory(samples(points(64))?, samples(points(16))?)
///     .callback(EarlyStopping { metric: "rmse".to_owned(), ..EarlyStopping::default() });
/// let history = trainer.fit()?;
/// assert!(history.last("rmse").unwrap() < 0.01);
///
/// let predicted = trainer.predict(vec![Column::numbers("x", vec![1], vec![0.25])])?;
/// assert!((predicted[0][0] - 0.5).abs() < 0.02);
/// # Ok(())
/// # }
/// ```
pub struct Trainer {
    job: Job,
    registry: Registry,
    callbacks: Vec<Box<dyn Callback>>,
    devices: String,
    restore: Option<String>,
    shows_progress: bool,
    /// The running cluster to train on; none to start a cluster within this process.
    cluster: Option<RunningCluster>,
    /// The run directory of the last training whose job names none; `None` before.
    temporary: Option<TempDir>,
}

impl Trainer {
    /// Returns the trainer of a job, with the models and data sources that come with Flambeau.
    pub fn new(job: Job) -> Self {
        Self::with(job, Registry::builtin())
    }

    pub(crate) fn with(job: Job, registry: Registry) -> Self {
        Self {
            job,
            registry,
            callbacks: Vec::new(),
            devices: "auto".to_owned(),
            restore: None,
            shows_progress: false,
            cluster: None,
            temporary: None,
        }
    }

    /// Trains the model `M` instead of the model that the job names. The job's model then has the name of the type.
    #[must_use]
    pub fn model<M: Model>(mut self) -> Self {
        let name = type_name::<M>();
        let name = name.split('<').next().unwrap_or(name);
        let name = name.rsplit("::").next().unwrap_or(name);
        self.registry = self.registry.model::<M>(name);
        self.job.model.name = name.to_owned();
        self
    }

    /// Trains on the data that `open` returns, instead of the data that the job names. Each worker calls `open` for
    /// itself.
    #[must_use]
    pub fn data(
        mut self,
        open: impl Fn(&DataSetup) -> Result<Dataset, InputError> + Send + Sync + 'static,
    ) -> Self {
        self.registry = self.registry.open_by(OWN_DATA, open);
        self.job.data.kind = OWN_DATA.to_owned();
        self
    }

    /// Trains on the data of the source `S`, instead of the data that the job names.
    #[must_use]
    pub fn source<S: Source>(mut self) -> Self {
        self.registry = self.registry.data::<S>(OWN_DATA);
        self.job.data.kind = OWN_DATA.to_owned();
        self
    }

    /// Trains on the samples in `training`, and evaluates on those in `held_out`.
    #[must_use]
    pub fn in_memory(self, training: InMemory, held_out: InMemory) -> Self {
        self.data(move |_| Dataset::in_memory(training.clone(), held_out.clone()))
    }

    /// Adds functions that are called while the training runs. [`EarlyStopping`](crate::settings::EarlyStopping),
    /// [`Plateau`](crate::settings::Plateau) and [`Best`](crate::settings::Best) are callbacks, too.
    #[must_use]
    pub fn callback(mut self, callback: impl Callback + 'static) -> Self {
        self.callbacks.push(Box::new(callback));
        self
    }

    /// Computes on these devices, separated by commas: `auto` (the default), `cpu` or `cuda:N`. Each worker computes on all of them.
    #[must_use]
    pub fn devices(mut self, devices: impl Into<String>) -> Self {
        self.devices = devices.into();
        self
    }

    /// Begins with a checkpoint: a run directory (its newest one), a checkpoint's folder, or the URL of either. The new
    /// training has a run directory of its own.
    #[must_use]
    pub fn restore(mut self, from: impl Into<String>) -> Self {
        self.restore = Some(from.into());
        self
    }

    /// Trains on a cluster that runs already, instead of one within this process: submits the job, and waits for its
    /// end. The model, the records and the job are in the run directory on this machine. Checkpoints are where the
    /// cluster writes them. If `fit` fails or panics, the job is cancelled.
    #[must_use]
    pub fn on_cluster(mut self, cluster: RunningCluster) -> Self {
        self.cluster = Some(cluster);
        self
    }

    /// Shows progress bars on stderr during training, or a line for each evaluation if stderr is no terminal.
    #[must_use]
    pub fn show_progress(mut self) -> Self {
        self.shows_progress = true;
        self
    }

    /// Returns the job.
    pub fn job(&self) -> &Job {
        &self.job
    }

    /// Trains to the end, and returns the measurements. If the job has no `run_dir`, the model and the records are in a
    /// temporary folder. It is deleted when the trainer is dropped, or trains again.
    ///
    /// # Errors
    /// If the job makes no sense, its data or its model cannot be used, or the training fails.
    pub fn fit(&mut self) -> Result<History, CommandError> {
        outside_of_runtimes(|| self.train())
    }

    fn train(&mut self) -> Result<History, CommandError> {
        let mut job = self.job.clone();
        for callback in &mut self.callbacks {
            callback.prepare(&mut job);
        }
        job.validate()?;
        let devices: Choices = self.devices.parse()?;
        devices.open()?;
        let dir = self.run_dir(&job)?;
        if let Some(cluster) = self.cluster.clone() {
            return self.train_on(&cluster, &job, dir);
        }
        job.run_dir = Some(dir.clone());
        let plan = Plan {
            roles: Roles::Threads(self.registry.clone()),
            workers: 0,
            device: &self.devices,
            transport: Transport::Unix,
            restore: self.restore.as_deref(),
            secure: false,
            row_settings: &RowSettings::default(),
            lookups: false,
            http: None,
        };
        let mut callbacks = Callbacks::new(&mut self.callbacks, &dir);
        let watch = Watch {
            quiet: !self.shows_progress,
            obeys_signals: false,
            observer: Some(&mut callbacks),
        };
        let outcome = train::train(job, plan, watch);
        let seen = callbacks.catch_up();
        callbacks.resume_panic();
        let outcome = outcome?;
        seen?;
        let stopped = callbacks.stopped();
        self.ended(&outcome.summary, outcome.run_dir, stopped)
    }

    /// Trains a job on a cluster that runs already.
    fn train_on(
        &mut self,
        cluster: &RunningCluster,
        job: &Job,
        dir: PathBuf,
    ) -> Result<History, CommandError> {
        std::fs::create_dir_all(&dir).map_err(CommandError::file(&dir))?;
        // It belongs to an earlier training.
        for file in [
            run_dir::MODEL,
            run_dir::BEST,
            run_dir::BEST_RECORD,
            run_dir::TRANSFORMS,
            run_dir::SUMMARY,
        ] {
            let _ = std::fs::remove_file(dir.join(file));
        }
        let mut callbacks = Callbacks::new(&mut self.callbacks, &dir);
        let submission = Submission {
            cluster,
            job,
            registry: &self.registry,
            devices: &self.devices,
            restore: self.restore.as_deref(),
            dir: &dir,
            shows_progress: self.shows_progress,
        };
        let summary = joined::train(&submission, &mut callbacks);
        let seen = callbacks.catch_up();
        callbacks.resume_panic();
        let summary = summary?;
        seen?;
        let stopped = callbacks.stopped();
        self.ended(&summary, dir, stopped)
    }

    /// Returns the history of a training that has ended, after callbacks have seen it.
    fn ended(
        &mut self,
        summary: &Summary,
        dir: PathBuf,
        stopped: Option<String>,
    ) -> Result<History, CommandError> {
        let mut history = History::new(metrics::read(&dir)?, summary, dir);
        if summary.stopped {
            history.stopped = stopped.or(history.stopped);
        }
        for callback in &mut self.callbacks {
            callback.ended(&history);
        }
        Ok(history)
    }

    /// Tries rising learning rates on the job in this process, each for one step. The steps begin with the initial
    /// values, and their weights are discarded. The curve suggests the rate at which the smoothed loss falls fastest.
    ///
    /// ```
    /// use flambeau::{Error, Job, RateRange, Trainer};
    ///
    /// # fn main() -> Result<(), Error> {
    /// let mut job = Job::from_toml("epochs = 3\noptimizer = { name = \"sgd\" }")?;
    /// let curve = Trainer::new(job.clone()).find_learning_rate(RateRange::default())?;
    /// if let Some(rate) = curve.suggestion {
    ///     *job.optimizer.learning_rate_mut() = rate;
    /// }
    /// assert!(Trainer::new(job).fit()?.last("accuracy").unwrap() > 0.7);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// If the range or the job makes no sense, or its data or its model cannot be used.
    pub fn find_learning_rate(
        &mut self,
        range: RateRange,
    ) -> Result<LearningRateCurve, CommandError> {
        let mut job = self.job.clone();
        for callback in &mut self.callbacks {
            callback.prepare(&mut job);
        }
        let (registry, devices) = (&self.registry, &self.devices);
        outside_of_runtimes(|| search(&job, registry, devices, range))
    }

    /// Returns the folder of the next training.
    fn run_dir(&mut self, job: &Job) -> Result<PathBuf, CommandError> {
        if let Some(dir) = &job.run_dir {
            return Ok(dir.clone());
        }
        let created = tempfile::Builder::new().prefix("flambeau-run-").tempdir();
        let created = created.map_err(CommandError::file("a folder for the run"))?;
        let dir = created.path().to_owned();
        self.temporary = Some(created);
        Ok(dir)
    }

    /// Returns the final weights of the last training. If the job names a run directory, they are those in that
    /// directory.
    ///
    /// # Errors
    /// If nothing was trained yet.
    pub fn last(&self) -> Result<TrainedModel<'_>, CommandError> {
        self.trained(Weights::Last)
    }

    /// Returns the weights of the best evaluation, if the job or the callback [`Best`](crate::settings::Best) has kept them.
    ///
    /// # Errors
    /// If nothing was trained yet, or the best weights were not kept.
    pub fn best(&self) -> Result<TrainedModel<'_>, CommandError> {
        self.trained(Weights::Best)
    }

    fn trained(&self, which: Weights) -> Result<TrainedModel<'_>, CommandError> {
        let temporary = self.temporary.as_ref().map(TempDir::path);
        let dir = self.job.run_dir.as_deref().or(temporary);
        let Some(dir) = dir.filter(|dir| dir.join(run_dir::MODEL).exists()) else {
            return Err(CommandError::Untrained);
        };
        TrainedModel::read(dir, which, &self.registry, self.device()?)
    }

    /// Evaluates the final weights on the held-out samples, and returns the loss and the other metrics. To evaluate the
    /// weights of the best evaluation, call `trainer.best()?.evaluate()`.
    ///
    /// # Errors
    /// If nothing was trained yet, or the data or the model cannot be used.
    pub fn evaluate(&self) -> Result<BTreeMap<String, f64>, CommandError> {
        self.last()?.evaluate()
    }

    /// Returns the trained model's outputs for each sample: the probability of each class for classes, the probability
    /// of 1 for a binary target, otherwise numbers. `inputs` are the model's inputs, as `forward` receives them.
    ///
    /// # Errors
    /// If nothing was trained yet, or the columns are not those of the training.
    pub fn predict(&self, inputs: Vec<Column>) -> Result<Vec<Vec<f32>>, CommandError> {
        self.last()?.predict(inputs)
    }

    /// Returns the trained model's outputs for each held-out sample, as [`predict`](Self::predict) does.
    ///
    /// # Errors
    /// If nothing was trained yet, or the data cannot be used.
    pub fn predict_held_out(&self) -> Result<Vec<Vec<f32>>, CommandError> {
        self.last()?.predict_held_out()
    }

    /// Returns the first device.
    fn device(&self) -> Result<candle_core::Device, CommandError> {
        let devices: Choices = self.devices.parse()?;
        Ok(device::open(devices.first())?)
    }

    /// Returns the path of the final weights, which is a safetensors file.
    ///
    /// # Errors
    /// If nothing was trained yet.
    pub fn weights(&self) -> Result<PathBuf, CommandError> {
        Ok(self.last()?.weights())
    }
}

/// Calls a function on another thread. The caller may be in an asynchronous runtime, where no second one can be
/// started.
fn outside_of_runtimes<T: Send>(act: impl FnOnce() -> T + Send) -> T {
    let done = std::thread::scope(|scope| scope.spawn(act).join());
    done.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}
