//! Training loops that a program writes itself: the same step on several replicas of a model, which stay equal.
//!
//! - `distributed`: a model with its replicas, and their steps; `replica`: what a step sees of its replica
//! - `meeting`: how replicas add up numbers; `hosts`: the processes of the replicas; `act`: the collective calls
//! - `optimizing`: variables with an optimizer of their own; `averaged`: variables that the model itself changes

mod act;
mod averaged;
mod distributed;
mod error;
mod hosts;
mod meeting;
mod optimizing;
mod replica;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use candle_core::{Device, Tensor};
use candle_nn::VarBuilder;
use shared_proto::blocks::VariableKind;
use variables::Variables;

use self::act::Act;
use self::averaged::Averaged;
pub use self::distributed::Distributed;
use self::distributed::{LeaveUnlessDone, State};
pub use self::error::{HostError, LoopError};
use self::hosts::HostGroup;
pub use self::hosts::Hosts;
use self::meeting::Meeting;
pub use self::optimizing::OptimizerId;
pub use self::replica::Replica;
use ::replica::device::{Choices, with_one_queue};

/// The devices among which a training loop is distributed, on one host or several.
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
///     let _mean = strategy.reduce(Reduce::Mean, &losses)?;
/// }
/// let outputs = model.run(|replica| replica.model().forward(&Tensor::new(&[[1.0f32]], &Device::Cpu)?))?;
/// let all = strategy.gather(&outputs)?;
/// assert!((all.to_vec2::<f32>()?[1][0] - 3.0).abs() < 0.01);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Strategy {
    /// The devices of this process.
    devices: Vec<Device>,
    /// The processes of the loop; `None` if this is the only one.
    hosts: Option<Arc<HostGroup>>,
}

impl std::fmt::Debug for Strategy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Strategy")
            .field("devices", &self.devices)
            .field("host", &self.host())
            .field("replicas", &self.replicas())
            .finish()
    }
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
        let devices = devices.parse::<Choices>()?.open_to_train()?;
        let devices = devices.iter().map(with_one_queue);
        Ok(Self {
            devices: devices.collect::<Result<_, _>>()?,
            hosts: None,
        })
    }

    /// Trains on several hosts. The environment variable `TF_CONFIG`, which launchers for TensorFlow set, lists the
    /// processes: the chief and the workers. Each process uses `devices`. Without `TF_CONFIG`, trains in this process
    /// alone.
    ///
    /// # Errors
    /// As [`on_hosts`](Self::on_hosts), or if `TF_CONFIG` makes no sense.
    pub fn multi_worker(devices: &str) -> Result<Self, LoopError> {
        match Hosts::of_tf_config()? {
            Some(hosts) => Self::on_hosts(&hosts, devices),
            None => Self::mirrored(devices),
        }
    }

    /// Trains with the other processes of a list. `devices` are those of this process; other processes may have others. Each process runs
    /// the same loop. Returns once all processes have met.
    ///
    /// # Errors
    /// If there is no such device, the list makes no sense, or a process does not connect in time.
    pub fn on_hosts(hosts: &Hosts, devices: &str) -> Result<Self, LoopError> {
        let here = Self::mirrored(devices)?;
        let together = HostGroup::meet(hosts, here.devices.len())?;
        Ok(Self {
            hosts: Some(Arc::new(together)),
            ..here
        })
    }

    /// Returns the number of replicas, on all hosts.
    pub fn replicas(&self) -> usize {
        let here = self.devices.len();
        self.hosts.as_ref().map_or(here, |hosts| hosts.replicas())
    }

    /// Returns the index of this process, from 0. Let process 0 do what is done once, such as saving the model.
    pub fn host(&self) -> usize {
        self.hosts.as_ref().map_or(0, |hosts| hosts.index())
    }

    /// Returns the sum or the mean of one number from each replica. Each process passes the numbers of its own replicas, as
    /// [`run`](Distributed::run) returned them.
    ///
    /// # Errors
    /// If another process is lost, or makes another call.
    pub fn reduce(&self, how: Reduce, of_replicas: &[f64]) -> Result<f64, LoopError> {
        let sum: f64 = of_replicas.iter().sum();
        let own = vec![sum, of_replicas.len() as f64];
        let all = match &self.hosts {
            Some(hosts) => hosts.agree(Act::Reduce, &own)?,
            None => own,
        };
        match (how, &all[..]) {
            (Reduce::Sum, [sum, _]) => Ok(*sum),
            (Reduce::Mean, [sum, count]) => Ok(sum / count),
            _ => Err(LoopError::HostsOutOfStep),
        }
    }

    /// Concatenates the tensors of all replicas along the first dimension, on the CPU. Each process passes the tensors of its own replicas.
    ///
    /// # Errors
    /// If they have different shapes in the other dimensions, another process is lost, or it makes another call.
    pub fn gather(&self, of_replicas: &[Tensor]) -> Result<Tensor, LoopError> {
        let here = of_replicas.iter();
        let here = here.map(|tensor| tensor.to_device(&Device::Cpu));
        let here = here
            .collect::<candle_core::Result<Vec<_>>>()
            .and_then(|here| Tensor::cat(&here, 0));
        let Some(hosts) = &self.hosts else {
            return here.map_err(LoopError::Gather);
        };
        let packed = here.and_then(|here| {
            let tensors = [(GATHERED, here)];
            Ok(safetensors::serialize(tensors, None)?)
        });
        let packed = packed.map_err(|error| {
            // The other processes must not wait for this one.
            hosts.leave();
            LoopError::Gather(error)
        })?;
        hosts.agree(Act::Gather, &[])?;
        let all = hosts.gather(packed.into())?;
        let unpack = |bytes: &bytes::Bytes| {
            let mut tensors = candle_core::safetensors::load_buffer(bytes, &Device::Cpu)?;
            let missing = || candle_core::Error::msg("a process has sent no tensor");
            tensors.remove(GATHERED).ok_or_else(missing)
        };
        let all: candle_core::Result<Vec<_>> = all.iter().map(unpack).collect();
        all.and_then(|all| Tensor::cat(&all, 0))
            .map_err(LoopError::Gather)
    }

    /// Builds the model on each device. The seed and a variable's name decide its initial values, so they are the same
    /// everywhere.
    ///
    /// # Errors
    /// Those of `build`, or if the replicas have different variables, another host has other values, or a process is lost.
    pub fn scope<M>(
        &self,
        seed: u64,
        build: impl Fn(VarBuilder) -> candle_core::Result<M>,
    ) -> Result<Distributed<M>, LoopError> {
        let leaving = LeaveUnlessDone::new(self);
        let mut replicas = Vec::new();
        let places = Meeting::among(self.devices.len(), self.hosts.as_ref());
        for (meeting, device) in places.into_iter().zip(&self.devices) {
            let kind_of = VariableKind::by_name;
            let built = Variables::build::<_, candle_core::Error>(seed, kind_of, device, &build);
            let (variables, model) = built?;
            replicas.push(State {
                model,
                averaged: Averaged::new(&variables),
                variables,
                device: device.clone(),
                optimizing: Vec::new(),
                meeting: Some(meeting),
            });
        }
        let mut specs = replicas.iter().map(|replica| replica.variables.specs());
        let first = specs.next().unwrap_or_default();
        if !specs.all(|other| other == first) {
            return Err(LoopError::Different);
        }
        let built = Distributed {
            replicas,
            seed,
            strategy: self.clone(),
        };
        built.compare()?;
        leaving.done();
        Ok(built)
    }

    /// Leaves the other processes after a failure, so that they do not wait for this one.
    fn leave(&self) {
        if let Some(hosts) = &self.hosts {
            hosts.leave();
        }
    }
}

/// The name of the tensor in the message that [`Strategy::gather`] sends.
const GATHERED: &str = "gathered";

/// How the numbers of the replicas are combined into one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduce {
    /// Their sum.
    Sum,
    /// Their mean, in which all replicas have the same weight.
    Mean,
}
