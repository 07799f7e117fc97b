//! The stages of a job's model, with their devices and variables.

use std::fmt;
use std::ops::Range;

use candle_core::backprop::GradStore;
use candle_core::{Device, Var};
use model::{Model, Stages};
use shared_proto::job::Strategy;
use variables::Variables;

use crate::device;
use crate::error::ReplicaError;

/// Consecutive blocks of a model on a device.
pub(super) struct Stage {
    number: usize,
    stages: usize,
    pub(super) blocks: Range<usize>,
    /// The index of the device among the devices of the stage group.
    pub(super) place: usize,
    pub(super) device: Device,
    /// The variables that are trained.
    pub(super) trained: Vec<Var>,
    /// The variables that the model changes while it computes.
    pub(super) measured: Vec<Var>,
    /// The trained variables of the other stages, with their names and stages.
    others: Vec<(String, usize, Var)>,
}

impl Stage {
    pub(super) fn is_last(&self) -> bool {
        self.number + 1 == self.stages
    }

    pub(super) fn number(&self) -> usize {
        self.number
    }

    /// Checks that a backward pass of this stage has reached no trained variable of another stage, because its gradient
    /// would be lost.
    ///
    /// # Errors
    /// If it has reached one. The error names the variable.
    pub(super) fn check_own(&self, store: &GradStore) -> candle_core::Result<()> {
        let mut others = self.others.iter();
        match others.find(|(_, _, var)| store.get(var).is_some()) {
            None => Ok(()),
            Some((name, stage, _)) => candle_core::bail!(
                "it uses the trained variable {name:?}, which stage {stage} holds; a block and the loss may use variables of their own stage alone, so set strategy.stages lower, or use another strategy"
            ),
        }
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (first, last) = (self.blocks.start, self.blocks.end.saturating_sub(1));
        let device = device::name(&self.device);
        write!(f, "stage {} of {} (", self.number, self.stages)?;
        match first == last {
            true => write!(f, "block {first}"),
            false => write!(f, "blocks {first} to {last}"),
        }?;
        write!(f, " on {device}, device {})", self.place)
    }
}

/// The places of stages on the devices of a stage group. The workers of the group hold the stages of one model
/// together.
#[derive(Clone, Debug)]
pub(crate) struct Places {
    stages: usize,
    /// The number of workers.
    workers: usize,
    /// The devices of this worker. The other workers have the same number of devices.
    devices: Vec<Device>,
    /// The index of this worker in its group; `None` while it has no place in a group.
    worker: Option<usize>,
    /// True if variables stay in the same memory when the worker's place changes: all devices are CPUs.
    in_one_memory: bool,
}

impl Places {
    /// Returns the places of a job's stages. Each device has consecutive stages. The devices' numbers of stages differ
    /// by at most one. A worker that holds the whole model has place 0; other workers get a place from
    /// [`Self::of_worker`].
    ///
    /// # Errors
    /// [`ReplicaError::Devices`] if devices would have no stage.
    pub(super) fn new(strategy: &Strategy, devices: &[Device]) -> Result<Self, ReplicaError> {
        let workers = strategy.stage_groups().workers as usize;
        let all = workers * devices.len();
        let stages = strategy.stages.map_or(all, |stages| stages as usize);
        if stages < all {
            let given = match workers {
                1 => format!("{all} devices are given"),
                _ => format!(
                    "{workers} workers with {} devices each hold the model",
                    devices.len()
                ),
            };
            return Err(ReplicaError::Devices(format!(
                "{given}, and `strategy.stages = {stages}` leaves some without a stage; give at most {} devices, or set strategy.stages to at least {all}",
                stages / workers
            )));
        }
        Ok(Self {
            stages,
            workers,
            devices: devices.to_vec(),
            worker: Some(0).filter(|_| workers == 1),
            in_one_memory: devices.iter().all(Device::is_cpu),
        })
    }

    /// Returns the same places for a worker with this place in the group. A worker with `None`, or with a place that
    /// does not exist, has no stages.
    #[must_use]
    pub(super) fn of_worker(&self, worker: Option<usize>) -> Self {
        Self {
            worker: worker.filter(|worker| *worker < self.workers),
            ..self.clone()
        }
    }

    /// Returns the index of this worker in its group; `None` while it has no place in a group.
    pub(super) fn worker(&self) -> Option<usize> {
        self.worker
    }

    /// Returns the devices of this worker.
    pub(super) fn devices(&self) -> &[Device] {
        &self.devices
    }

    /// Returns the number of devices of the group.
    pub(super) fn all_devices(&self) -> usize {
        self.workers * self.devices.len()
    }

    /// Returns the indices of this worker's devices in the group; empty if it has no place in the group.
    pub(super) fn own(&self) -> Range<usize> {
        let first = self.worker.unwrap_or(0) * self.devices.len();
        match self.worker {
            Some(_) => first..first + self.devices.len(),
            None => 0..0,
        }
    }

    /// Returns whether variables stay in the same memory when the worker's place changes.
    pub(super) fn are_in_one_memory(&self) -> bool {
        self.in_one_memory
    }

    /// Treats the worker's devices as ones with memory of their own, as GPUs have.
    #[cfg(test)]
    pub(super) fn separate(&mut self) {
        self.in_one_memory = false;
    }

    /// Returns the index of a stage's device among those of the group.
    fn of_stage(&self, stage: usize) -> usize {
        stage * self.all_devices() / self.stages
    }

    /// Returns the device of each stage's variables. The variables of other workers' stages are in the host's memory.
    pub(super) fn stages(&self) -> Stages {
        let own = self.own();
        let device = |stage| {
            let number = self.of_stage(stage);
            match own.contains(&number) {
                true => self.devices[number - own.start].clone(),
                false => Device::Cpu,
            }
        };
        Stages::on((0..self.stages).map(device).collect())
    }
}

/// Returns the stages of a model whose variables were created for the stages `on`.
///
/// # Errors
/// [`ReplicaError::Chain`] if the model cannot be cut into them.
pub(super) fn stages(
    name: &str,
    places: &Places,
    on: &Stages,
    variables: &Variables,
    model: &dyn Model,
) -> Result<Vec<Stage>, ReplicaError> {
    let (count, blocks) = (on.count(), model.blocks());
    let (asked, stage_of) = on.asked();
    check(name, (count, blocks), asked)?;
    let mut stages = Vec::new();
    for (number, device) in on.devices().iter().enumerate() {
        stages.push(Stage {
            number,
            stages: count,
            blocks: on.blocks_of(number, blocks),
            place: places.of_stage(number),
            device: device.clone(),
            trained: Vec::new(),
            measured: Vec::new(),
            others: Vec::new(),
        });
    }
    for (spec, var, is_measured) in variables.each() {
        let stage = match stage_of.get(&spec.name) {
            Some(stage) => *stage,
            None if count == 1 => 0,
            None => {
                return Err(ReplicaError::Chain(format!(
                    "variable {:?} of the model {name:?} belongs to no block, so no stage could hold it; let `Model::new` ask for it with the variables that `Setup::block` returns",
                    spec.name
                )));
            }
        };
        if is_measured {
            stages[stage].measured.push(var.clone());
        }
        if spec.kind.is_optimized() {
            stages[stage].trained.push(var.clone());
            let others = stages.iter_mut().filter(|other| other.number != stage);
            others.for_each(|other| other.others.push((spec.name.clone(), stage, var.clone())));
        }
    }
    tell(&stages, &places.own());
    Ok(stages)
}

/// Refuses a model that cannot be cut into this number of stages. `asked` is the number of blocks with which the model
/// asked for variables, if it did.
fn check(
    name: &str,
    (stages, blocks): (usize, usize),
    asked: Option<usize>,
) -> Result<(), ReplicaError> {
    let refused = |why: String| Err(ReplicaError::Chain(why));
    match asked {
        _ if stages == 1 => Ok(()),
        _ if blocks <= 1 => refused(format!(
            "the model {name:?} is no chain of blocks, so it cannot be cut into {stages} stages; use a model that is one (mlp, cnn, a resnet, mobilenetv2, transformer, or one of your own with `Model::blocks`), or `strategy.name = \"mirrored\"`"
        )),
        Some(asked) if asked != blocks => refused(format!(
            "the model {name:?} says that it has {blocks} blocks, but asks for variables of a block of {asked}; `Model::blocks` and `Setup::block` must have the same number"
        )),
        _ if stages > blocks => refused(format!(
            "the model {name:?} is a chain of {blocks} blocks, too few for {stages} stages; set strategy.stages to at most {blocks}, or make the model deeper"
        )),
        _ => Ok(()),
    }
}

/// Logs the stages on these devices.
pub(super) fn tell(stages: &[Stage], devices: &Range<usize>) {
    for stage in stages.iter().filter(|stage| devices.contains(&stage.place)) {
        let numbers: usize = stage.trained.iter().map(|var| var.elem_count()).sum();
        tracing::info!(%stage, trained_numbers = numbers, "a stage of the model is in place");
    }
}
