//! Training loops that a program writes itself: the same step on several replicas of a model, which stay equal.
//!
//! - `replica`: what a step sees of its replica
//! - `meeting`: how replicas add up numbers
//! - `optimizing`: variables with an optimizer of their own; `averaged`: those that the model itself changes

mod averaged;
mod error;
mod meeting;
mod optimizing;
mod replica;
#[cfg(test)]
mod tests;

use std::any::Any;

use candle_core::{Device, Tensor};
use candle_nn::VarBuilder;
use shared_proto::blocks::{VariableKind, VariableSpec};
use shared_proto::job::{self, Job, matches_pattern};

use self::averaged::Averaged;
pub use self::error::LoopError;
use self::meeting::Meeting;
use self::optimizing::Optimizing;
pub use self::replica::Replica;
use crate::device::{Choices, with_one_queue};
use crate::replica::panic_message;
use crate::variables::Variables;

/// The devices among which a training loop is distributed.
///
/// Each device has a replica of the model with the same variables. A step runs on all replicas at the same time, each with samples of its
/// own, and adds up gradients, so all replicas keep the same bits. The samples of all replicas are the global batch. The learning rate is
/// used as it is given: with more replicas, and so a larger global batch, raise it yourself if you want that.
///
/// ```
/// # // The names that authors of models know, which come from a crate above this one.
/// # mod flambeau {
/// #     pub use {candle_core, candle_nn, flambeau_worker::loops::*};
/// #     pub mod settings { pub use shared_proto::job::*; }
/// # }
/// use flambeau::candle_core::{Device, Tensor};
/// use flambeau::candle_nn::{self, Module};
/// use flambeau::settings::{Optimizer, Sgd};
/// use flambeau::{LoopError, Reduce, Strategy};
///
/// # fn main() -> Result<(), LoopError> {
/// let strategy = Strategy::mirrored("cpu,cpu")?;
/// let mut model = strategy.scope(1, |vars| candle_nn::linear(1, 1, vars))?;
/// let sgd = model.optimizer("*", Optimizer::Sgd(Sgd { learning_rate: 0.3, ..Sgd::default() }))?;
/// for _ in 0..200 {
///     let losses = model.run(|replica| {
///         // Each replica has points of its own.
///         let x = Tensor::new(&[[0.1f32], [0.5 + 0.4 * replica.index() as f32]], replica.device())?;
///         let error = (replica.model().forward(&x)? - (&x * 3.0)?)?;
///         let loss = error.sqr()?.mean_all()?;
///         replica.minimize(sgd, &loss, 2)?;
///         loss.to_scalar::<f32>().map(f64::from)
///     })?;
///     let _mean = strategy.reduce(Reduce::Mean, &losses);
/// }
/// let outputs = model.run(|replica| replica.model().forward(&Tensor::new(&[[1.0f32]], &Device::Cpu)?))?;
/// let all = strategy.gather(&outputs)?;
/// assert!((all.to_vec2::<f32>()?[1][0] - 3.0).abs() < 0.01);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Strategy {
    devices: Vec<Device>,
}

impl Strategy {
    /// Trains on one device: `auto`, `cpu` or `cuda:N`.
    ///
    /// # Errors
    /// If there is no such device.
    pub fn one_device(device: &str) -> Result<Self, LoopError> {
        let devices = Self::mirrored(device)?;
        match devices.replicas() {
            1 => Ok(devices),
            several => Err(LoopError::Devices(several)),
        }
    }

    /// Trains on several devices, separated by commas, with a replica on each one: `cpu` or `cuda:N`; `cpu` may be named several times.
    ///
    /// # Errors
    /// If there is no such device.
    pub fn mirrored(devices: &str) -> Result<Self, LoopError> {
        let devices = devices.parse::<Choices>()?.open()?;
        let devices = devices.iter().map(with_one_queue);
        Ok(Self {
            devices: devices.collect::<Result<_, _>>()?,
        })
    }

    /// Returns the number of replicas.
    pub fn replicas(&self) -> usize {
        self.devices.len()
    }

    /// Returns one number for those of the replicas.
    pub fn reduce(&self, how: Reduce, of_replicas: &[f64]) -> f64 {
        let sum: f64 = of_replicas.iter().sum();
        match how {
            Reduce::Sum => sum,
            Reduce::Mean => sum / of_replicas.len() as f64,
        }
    }

    /// Returns the tensors of all replicas as one, behind each other in the first dimension, on the CPU.
    ///
    /// # Errors
    /// candle's, if they have different shapes in the other dimensions.
    pub fn gather(&self, of_replicas: &[Tensor]) -> candle_core::Result<Tensor> {
        let here = of_replicas.iter();
        let here = here.map(|tensor| tensor.to_device(&Device::Cpu));
        Tensor::cat(&here.collect::<candle_core::Result<Vec<_>>>()?, 0)
    }

    /// Builds the model on each device. The seed and a variable's name decide its initial values, so they are the same on all.
    ///
    /// # Errors
    /// Those of `build`, or if the replicas have different variables.
    pub fn scope<M>(
        &self,
        seed: u64,
        build: impl Fn(VarBuilder) -> candle_core::Result<M>,
    ) -> Result<Distributed<M>, LoopError> {
        let mut replicas = Vec::new();
        for (meeting, device) in Meeting::among(self.replicas())
            .into_iter()
            .zip(&self.devices)
        {
            let kind_of = VariableKind::by_name;
            let (variables, model) =
                Variables::build::<_, candle_core::Error>(seed, kind_of, device, &build)?;
            replicas.push(State {
                model,
                averaged: Averaged::of(&variables),
                variables,
                device: device.clone(),
                optimizing: Vec::new(),
                meeting: Some(meeting),
            });
        }
        let mut specs = replicas.iter().map(|replica| replica.variables.specs());
        let first = specs.next().unwrap_or_default();
        match specs.all(|other| other == first) {
            true => Ok(Distributed { replicas, seed }),
            false => Err(LoopError::Different),
        }
    }
}

/// How the numbers of replicas become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduce {
    /// Their sum.
    Sum,
    /// Their mean, in which all replicas count alike.
    Mean,
}

/// A model with a replica on each device of a [`Strategy`].
pub struct Distributed<M> {
    replicas: Vec<State<M>>,
    seed: u64,
}

/// A replica between two steps.
struct State<M> {
    model: M,
    variables: Variables,
    averaged: Averaged,
    device: Device,
    optimizing: Vec<Optimizing>,
    /// None after a step in which a replica has failed: the others no longer know what it has done.
    meeting: Option<Meeting>,
}

/// An optimizer of a [`Distributed`] model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptimizerId(usize);

impl<M> Distributed<M> {
    /// Adds an optimizer for the variables whose names match a pattern, in which `*` stands for any text. A model may have several, as
    /// the two of a generative adversarial network.
    ///
    /// # Errors
    /// If no variable matches, or one has an optimizer already.
    pub fn optimizer(
        &mut self,
        variables: &str,
        optimizer: job::Optimizer,
    ) -> Result<OptimizerId, LoopError> {
        let job = Job {
            optimizer,
            ..Job::default()
        };
        self.optimizer_of(variables, &job)
    }

    /// Adds an optimizer with the settings of a job that concern updates: `optimizer`, `schedule`, `groups`, `clip_norm`, `clip_value`. A
    /// cosine schedule needs its `total_steps`.
    ///
    /// # Errors
    /// As [`optimizer`](Self::optimizer), or if a setting makes no sense.
    pub fn optimizer_of(&mut self, variables: &str, job: &Job) -> Result<OptimizerId, LoopError> {
        let job = Job {
            seed: self.seed,
            ..job.clone()
        };
        job.validate()?;
        let id = self
            .replicas
            .first()
            .map_or(0, |replica| replica.optimizing.len());
        let mut added = Vec::new();
        for replica in &self.replicas {
            let matching = replica.variables.matching(variables);
            let specs = matching.specs();
            if specs.is_empty() {
                return Err(LoopError::NoVariable {
                    pattern: variables.to_owned(),
                    variables: names(&replica.variables),
                });
            }
            let taken = |spec: &VariableSpec| replica.optimizing.iter().any(|o| o.has(&spec.name));
            if let Some(spec) = specs.iter().find(|spec| taken(spec)) {
                return Err(LoopError::TwoOptimizers(spec.name.clone()));
            }
            added.push(Optimizing::new(&job, matching)?);
        }
        for (replica, added) in self.replicas.iter_mut().zip(added) {
            replica.optimizing.push(added);
        }
        Ok(OptimizerId(id))
    }

    /// Runs a step on all replicas at the same time, each on a thread of its own. Returns what it returns, in the order of the replicas.
    ///
    /// All replicas must make the same calls of [`Replica::minimize`] and [`Replica::sum`], in the same order.
    ///
    /// # Errors
    /// That of the first replica whose step has failed. The others then fail too, and the model cannot be trained further, because the
    /// replicas may differ.
    pub fn run<T: Send>(
        &mut self,
        step: impl Fn(&mut Replica<'_, M>) -> candle_core::Result<T> + Sync,
    ) -> Result<Vec<T>, LoopError>
    where
        M: Send + Sync,
    {
        let count = self.replicas.len();
        if self
            .replicas
            .iter()
            .any(|replica| replica.meeting.is_none())
        {
            return Err(LoopError::Failed);
        }
        let step = &step;
        let mut states = self.replicas.iter_mut().enumerate();
        let outcomes: Vec<_> = match count {
            1 => states
                .map(|(index, state)| Ok(state.run(index, count, step)))
                .collect(),
            _ => std::thread::scope(|scope| {
                let run = |(index, state): (usize, _)| {
                    let state: &mut State<M> = state;
                    scope.spawn(move || state.run(index, count, step))
                };
                let threads: Vec<_> = states.by_ref().map(run).collect();
                threads.into_iter().map(|thread| thread.join()).collect()
            }),
        };
        let mut values = Vec::with_capacity(count);
        let mut failed: Option<LoopError> = None;
        for outcome in outcomes {
            let panicked =
                |panic: Box<dyn Any + Send>| Err(LoopError::Panicked(panic_message(&*panic)));
            match outcome.unwrap_or_else(panicked) {
                Ok(value) => values.push(value),
                Err(error)
                    if failed
                        .as_ref()
                        .is_none_or(|first| error.distance() < first.distance()) =>
                {
                    failed = Some(error);
                }
                Err(_) => {}
            }
        }
        failed.map_or(Ok(values), Err)
    }

    /// Returns the model of the first replica.
    pub fn model(&self) -> &M {
        &self.replicas[0].model
    }

    /// Returns the number of replicas.
    pub fn replicas(&self) -> usize {
        self.replicas.len()
    }

    /// Writes the variables to a safetensors file, under their own names. The file appears whole or not at all.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn save(&self, path: impl AsRef<std::path::Path>) -> Result<(), LoopError> {
        Ok(self.replicas[0].variables.save(path.as_ref())?)
    }

    /// Sets the variables of all replicas from a safetensors file. The state of optimizers stays.
    ///
    /// # Errors
    /// If the file cannot be read, or holds other variables.
    pub fn load(&mut self, path: impl AsRef<std::path::Path>) -> Result<(), LoopError> {
        for replica in &self.replicas {
            replica.variables.load(path.as_ref())?;
        }
        Ok(())
    }
}

impl<M> State<M> {
    fn run<T>(
        &mut self,
        index: usize,
        replicas: usize,
        step: impl Fn(&mut Replica<'_, M>) -> candle_core::Result<T>,
    ) -> Result<T, LoopError> {
        // If the step fails or panics, the meeting is dropped, and the others do not wait for this replica.
        let meeting = self.meeting.take().ok_or(LoopError::Failed)?;
        self.averaged.begin(&meeting)?;
        let mut replica = Replica {
            index,
            replicas,
            model: &self.model,
            device: &self.device,
            optimizing: &mut self.optimizing,
            meeting: &meeting,
            samples: 0,
            failed: None,
        };
        let done = step(&mut replica);
        let (failed, samples) = (replica.failed.take(), replica.samples);
        // All replicas know of a gradient that is not finite, and a lone one has nobody to differ from.
        let goes_on = replicas == 1 || matches!(failed, Some(LoopError::NonFinite));
        let done = match (failed, done) {
            (Some(error), _) => Err(error),
            (None, Err(error)) => Err(error.into()),
            (None, Ok(value)) => meeting
                .end()
                .and_then(|()| self.averaged.end(&meeting, samples as f64))
                .map(|()| value),
        };
        if goes_on || done.is_ok() {
            self.meeting = Some(meeting);
        }
        done
    }
}

fn names(variables: &Variables) -> Vec<String> {
    variables
        .specs()
        .into_iter()
        .map(|spec| spec.name)
        .collect()
}

impl Variables {
    /// Returns the trained variables whose names match a pattern. They share their values with these.
    fn matching(&self, pattern: &str) -> Self {
        self.select(|spec| spec.kind.is_optimized() && matches_pattern(pattern, &spec.name))
    }
}
