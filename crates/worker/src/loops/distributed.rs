//! A model with its replicas, and their steps.

use std::any::Any;

use candle_core::Device;
use replica::panic_message;
use sha2::{Digest, Sha256};
use shared_proto::blocks::VariableSpec;
use shared_proto::job::{self, Job, matches_pattern};
use variables::{self, Variables, VariablesError};

use super::Strategy;
use super::averaged::Averaged;
use super::error::{HostError, LoopError};
use super::meeting::Meeting;
use super::optimizing::{OptimizerId, Optimizing};
use super::replica::Replica;

/// A model with a replica on each device of a [`Strategy`].
pub struct Distributed<M> {
    /// The replicas of this process.
    pub(super) replicas: Vec<State<M>>,
    pub(super) seed: u64,
    pub(super) strategy: Strategy,
}

/// A replica between two steps.
pub(super) struct State<M> {
    pub(super) model: M,
    pub(super) variables: Variables,
    pub(super) averaged: Averaged,
    pub(super) device: Device,
    pub(super) optimizing: Vec<Optimizing>,
    /// `None` after a step that has failed, because the replicas may differ.
    pub(super) meeting: Option<Meeting>,
}

impl<M> Distributed<M> {
    /// Adds an optimizer for the variables whose names match a pattern, in which `*` stands for any text. A model may
    /// have several optimizers, such as the two of a generative adversarial network. On several hosts each process must
    /// call this method, with the same settings.
    ///
    /// # Errors
    /// If no variable matches, a matching variable has an optimizer already, or another host has other settings.
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
            let matching = matching(&replica.variables, variables);
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
        if let Some(hosts) = &self.strategy.hosts {
            let settings = Sha256::digest(format!("{variables}\n{}", job.to_toml()));
            hosts.same(&settings)?;
        }
        for (replica, added) in self.replicas.iter_mut().zip(added) {
            replica.optimizing.push(added);
        }
        Ok(OptimizerId(id))
    }

    /// Runs a step on all replicas at the same time, each on a thread of its own; the only replica of a process runs on the caller's. Returns
    /// the results of this process's replicas, in the order of the replicas.
    ///
    /// All replicas must make the same calls of [`Replica::minimize`] and [`Replica::sum`], in the same order.
    ///
    /// # Errors
    /// The error that is closest to the cause, if the step of a replica fails. The steps of all replicas fail then. The
    /// model cannot be trained further, because the replicas may differ, except after [`LoopError::NonFinite`] or with
    /// a single replica.
    pub fn run<T: Send>(
        &mut self,
        step: impl Fn(&mut Replica<'_, M>) -> candle_core::Result<T> + Sync,
    ) -> Result<Vec<T>, LoopError>
    where
        M: Send + Sync,
    {
        if self
            .replicas
            .iter()
            .any(|replica| replica.meeting.is_none())
        {
            return Err(match self.strategy.hosts {
                Some(_) => HostError::Left.into(),
                None => LoopError::Failed,
            });
        }
        let step = &step;
        let count = self.replicas.len();
        let all = self.strategy.replicas();
        let before = self
            .strategy
            .hosts
            .as_ref()
            .map_or(0, |hosts| hosts.before());
        // A panic in the step drops this guard too.
        let leaving = LeaveUnlessDone::new(&self.strategy);
        let mut states = (before..).zip(self.replicas.iter_mut());
        let outcomes: Vec<_> = match count {
            1 => states
                .map(|(index, state)| Ok(state.run(index, all, step)))
                .collect(),
            _ => std::thread::scope(|scope| {
                let run = |(index, state): (usize, _)| {
                    let state: &mut State<M> = state;
                    scope.spawn(move || state.run(index, all, step))
                };
                let threads: Vec<_> = states.by_ref().map(run).collect();
                threads.into_iter().map(|thread| thread.join()).collect()
            }),
        };
        if self
            .replicas
            .iter()
            .all(|replica| replica.meeting.is_some())
        {
            leaving.done();
        }
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

    /// Returns the number of replicas, on all hosts.
    pub fn replicas(&self) -> usize {
        self.strategy.replicas()
    }

    /// Writes the variables to a safetensors file, under their own names. The file appears whole or not at all.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn save(&self, path: impl AsRef<std::path::Path>) -> Result<(), LoopError> {
        Ok(self.replicas[0].variables.save(path.as_ref())?)
    }

    /// Sets the variables of all replicas from a safetensors file. The state of optimizers stays. On several hosts each
    /// process must call this method, with a file of the same content.
    ///
    /// # Errors
    /// If the file cannot be read, or holds other variables, or other values than on another host.
    pub fn load(&mut self, path: impl AsRef<std::path::Path>) -> Result<(), LoopError> {
        let path = path.as_ref();
        // Read once, so that what fits the first replica fits all.
        let content = variables::read(path);
        let loaded = content.and_then(|content| {
            let mut replicas = self.replicas.iter();
            replicas.try_for_each(|replica| replica.variables.take(&content, path))
        });
        match loaded {
            Ok(()) => self.compare(),
            // Nothing has changed. The processes compare once for each call. If no process can read the file, the loop goes on.
            Err(error @ (VariablesError::File { .. } | VariablesError::Mismatch { .. })) => {
                if let Some(hosts) = &self.strategy.hosts {
                    hosts.same(b"the file is not read")?;
                }
                Err(error.into())
            }
            // A device has failed, and so the replicas may differ.
            Err(error) => {
                self.strategy.leave();
                for replica in &mut self.replicas {
                    replica.meeting = None;
                }
                Err(error.into())
            }
        }
    }

    /// Checks that the replicas of all processes have the same variables with the same values.
    pub(super) fn compare(&self) -> Result<(), LoopError> {
        let (Some(hosts), Some(replica)) = (&self.strategy.hosts, self.replicas.first()) else {
            return Ok(());
        };
        let values = replica.variables.joined();
        let values = values.inspect_err(|_| self.strategy.leave())?;
        let mut digest = Sha256::new();
        for spec in replica.variables.specs() {
            digest.update(format!("{spec:?}\n"));
        }
        digest.update(bytemuck::cast_slice::<f32, u8>(&values));
        hosts.same(&digest.finalize())
    }
}

/// Leaves the loop's other processes when it is dropped, unless `done` was called.
pub(super) struct LeaveUnlessDone(Option<Strategy>);

impl LeaveUnlessDone {
    pub(super) fn new(strategy: &Strategy) -> Self {
        Self(Some(strategy.clone()))
    }

    pub(super) fn done(mut self) {
        self.0 = None;
    }
}

impl Drop for LeaveUnlessDone {
    fn drop(&mut self) {
        if let Some(strategy) = &self.0 {
            strategy.leave();
        }
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
        self.averaged.begin()?;
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
        let non_finite = matches!(failed, Some(LoopError::NonFinite));
        if non_finite {
            self.averaged.restore()?;
        }
        // All replicas know of a gradient that is not finite, and a single replica cannot differ from another.
        let goes_on = replicas == 1 || non_finite;
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

pub(super) fn names(variables: &Variables) -> Vec<String> {
    variables
        .specs()
        .into_iter()
        .map(|spec| spec.name)
        .collect()
}

/// Returns the trained variables with names that match a pattern. They share their values with `variables`.
fn matching(variables: &Variables, pattern: &str) -> Variables {
    variables.select(|spec| spec.kind.is_optimized() && matches_pattern(pattern, &spec.name))
}
