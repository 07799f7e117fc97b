//! The stages of a job's model, with their devices and variables.

use std::fmt;
use std::ops::Range;

use candle_core::backprop::GradStore;
use candle_core::{Device, Var};

use crate::device;
use crate::model::{Model, Stages};
use crate::replica::error::ReplicaError;
use crate::variables::Variables;

/// Consecutive blocks of a model on a device.
pub(super) struct Stage {
    number: usize,
    stages: usize,
    pub(super) blocks: Range<usize>,
    /// The number of the device.
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

    /// Checks that a backward pass of this stage has reached no variable of another one: that gradient would be lost.
    ///
    /// # Errors
    /// Names the variable.
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

/// Returns the device of each stage: as many consecutive stages on each device as on the others, or one more.
///
/// # Errors
/// [`ReplicaError::Devices`] if devices would have no stage.
pub(in crate::replica) fn devices_of_stages(
    stages: Option<u32>,
    devices: &[Device],
) -> Result<Vec<Device>, ReplicaError> {
    let stages = stages.map_or(devices.len(), |stages| stages as usize);
    if stages < devices.len() {
        return Err(ReplicaError::Devices(format!(
            "{} devices are given, and `strategy.stages = {stages}` leaves some without a stage; give at most {stages} devices, or set strategy.stages to at least {}",
            devices.len(),
            devices.len()
        )));
    }
    let place = |stage| devices[place(stage, stages, devices.len())].clone();
    Ok((0..stages).map(place).collect())
}

/// Returns the number of a stage's device.
fn place(stage: usize, stages: usize, devices: usize) -> usize {
    stage * devices / stages
}

/// Returns the stages of a model that was built on `on`.
///
/// # Errors
/// [`ReplicaError::Chain`] if the model cannot be cut into them.
pub(super) fn stages(
    name: &str,
    devices: &[Device],
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
            place: place(number, count, devices.len()),
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
    tell(&stages);
    Ok(stages)
}

/// Refuses a model that cannot be cut into so many stages.
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

/// Logs where the stages are.
fn tell(stages: &[Stage]) {
    for stage in stages {
        let numbers: usize = stage.trained.iter().map(|var| var.elem_count()).sum();
        tracing::info!(%stage, trained_numbers = numbers, "a stage of the model is in place");
    }
}
