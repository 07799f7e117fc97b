//! A model in stages, each on a device: micro-batches of a step follow each other through them.
//!
//! - `schedule`: the order of the passes, by which nothing waits for ever
//! - `micro`: a step's batches, cut into micro-batches
//! - `averages`: running statistics over the micro-batches of a batch
//! - `stage`: the passes of a stage, and what it holds between them
//! - `lane`: the thread of a device, which makes the passes of its stages
//! - `place`: the stages of a job's model, with their devices and variables
//! - `bubble`: the share of time in which devices wait

mod averages;
mod bubble;
mod lane;
mod micro;
mod place;
mod schedule;
mod stage;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::sync_channel;

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor};
use parking_lot::Mutex;
use shared_proto::job::{Job, PipelineSchedule};

use self::bubble::{Bubble, BubbleGauges};
use self::lane::{Done, Failure, Lane};
use self::micro::micro_batches;
use self::place::Stage;
use self::schedule::{Timeline, held, timeline};
use self::stage::{Links, Running, StepOf};
use super::build::{Built, precision};
use super::error::ReplicaError;
use crate::model::{Batch, Model, Objective, Pass, Stages};

pub(super) use place::devices_of_stages;

/// The stages of a model, and how they compute.
pub(super) struct Pipeline {
    schedule: PipelineSchedule,
    /// The most micro-batches of a batch.
    micro_batches: usize,
    stages: Vec<Stage>,
    devices: Vec<Device>,
    precision: DType,
    gauges: BubbleGauges,
    /// The orders that were needed so far, by the number of micro-batches. Few steps differ from the usual one.
    timelines: Mutex<BTreeMap<usize, Arc<Timeline>>>,
}

/// The results of a step's passes.
pub(super) struct Passed {
    /// The mean loss over the step's samples.
    pub(super) loss: f64,
    /// Its gradients.
    pub(super) gradients: GradStore,
    /// The share of time in which devices have waited.
    pub(super) bubble: Bubble,
}

impl Pipeline {
    /// Returns the pipeline of a model that was built on `stages`.
    ///
    /// # Errors
    /// [`ReplicaError::Chain`] if the model cannot be cut into these stages.
    pub(super) fn new(
        job: &Job,
        devices: &[Device],
        stages: &Stages,
        built: &Built,
    ) -> Result<Self, ReplicaError> {
        let strategy = &job.strategy;
        if let Some(table) = built.tables.specs().first() {
            return Err(ReplicaError::Chain(format!(
                "the model has the table {:?}, whose rows no stage can hold; set `model.tables = false`, or use `strategy.name = \"hybrid\"`",
                table.name
            )));
        }
        let name = &job.model.name;
        let stages = place::stages(name, devices, stages, &built.variables, &*built.model)?;
        // With four micro-batches for each device these wait for less than a fifth of the time, which GPipe (section 2.3) found negligible;
        // more would make matrix products smaller. One device never waits.
        let usual = if devices.len() > 1 {
            4 * devices.len()
        } else {
            1
        };
        Ok(Self {
            schedule: strategy.schedule.unwrap_or_default(),
            micro_batches: strategy.micro_batches.map_or(usual, |count| count as usize),
            stages,
            devices: devices.to_vec(),
            precision: precision(job),
            gauges: BubbleGauges::new(),
            timelines: Mutex::default(),
        })
    }

    /// Makes the forward and the backward pass of a step's batches, which are in the host's memory.
    ///
    /// # Errors
    /// [`ReplicaError::Stage`] or [`ReplicaError::Panicked`] names the stage that has failed; the others have ended their passes.
    pub(super) fn pass(
        &self,
        model: &dyn Model,
        objective: &Objective,
        batches: &[Batch],
        pass: &Pass,
    ) -> Result<Passed, ReplicaError> {
        let micro_batches = micro_batches(batches, self.micro_batches);
        let timeline = self.timeline(micro_batches.len());
        let failed = AtomicBool::new(false);
        let step = StepOf {
            model,
            objective,
            batches,
            micro_batches: &micro_batches,
            seed: pass.seed(),
            clock: pass.step,
            rank: pass.rank,
        };
        let mut lanes = self.lanes(&step, &failed);
        let ended: Vec<Result<Done, Failure>> = std::thread::scope(|scope| {
            let start = |(lane, operations)| {
                let lane: Lane = lane;
                let operations: &Vec<schedule::Operation> = operations;
                std::thread::Builder::new()
                    .name("stage".to_owned())
                    .spawn_scoped(scope, move || {
                        nn::autocast(self.precision, || lane.run(operations))
                    })
            };
            let threads: Vec<_> = lanes.drain(..).zip(&timeline.devices).map(start).collect();
            threads.into_iter().map(lane::end).collect()
        });
        let done = self.all(ended)?;
        let bubble = Bubble::of(&done, timeline.ideal_bubble);
        self.joined(done, bubble)
    }

    /// Returns the order of a step with so many micro-batches.
    fn timeline(&self, micro_batches: usize) -> Arc<Timeline> {
        let mut timelines = self.timelines.lock();
        let new = || {
            let device_of: Vec<usize> = self.stages.iter().map(|stage| stage.place).collect();
            Arc::new(timeline(self.schedule, &device_of, micro_batches))
        };
        Arc::clone(timelines.entry(micro_batches).or_insert_with(new))
    }

    /// Returns the lane of each device, with the links between its stages and others.
    fn lanes<'a>(&'a self, step: &'a StepOf<'a>, failed: &'a AtomicBool) -> Vec<Lane<'a>> {
        let mut lanes: Vec<Lane> = self
            .devices
            .iter()
            .map(|device| Lane::new(step, device, failed))
            .collect();
        let mut links = Links::default();
        for (number, stage) in self.stages.iter().enumerate() {
            let mut next = Links::default();
            if let Some(after) = self.stages.get(number + 1) {
                // As many as the stage holds, so that no sender ever waits.
                let capacity = held(
                    self.schedule,
                    number,
                    self.stages.len(),
                    step.micro_batches.len(),
                );
                let (activations, arrive) = sync_channel(capacity);
                let (gradients, come_back) = sync_channel(capacity);
                links.to_next = Some((activations, after.device.clone()));
                links.from_next = Some(come_back);
                next.from_before = Some(arrive);
                next.to_before = Some((gradients, stage.device.clone()));
            }
            let links = std::mem::replace(&mut links, next);
            lanes[stage.place].add(Running::new(stage, links));
        }
        lanes
    }

    /// Returns what all lanes have done, or the error of the first stage that has failed by itself.
    fn all(&self, ended: Vec<Result<Done, Failure>>) -> Result<Vec<Done>, ReplicaError> {
        let mut first: Option<Failure> = None;
        let mut done = Vec::new();
        for lane in ended {
            match (lane, &first) {
                (Ok(lane), _) => done.push(lane),
                (Err(failure), None | Some(Failure::Gone)) => first = Some(failure),
                (Err(_), _) => {}
            }
        }
        let place = |stage: usize| self.stages[stage].to_string();
        match first {
            None => Ok(done),
            Some(Failure::Computing { stage, source }) => Err(ReplicaError::Stage {
                stage: place(stage),
                source: Box::new(source),
            }),
            Some(Failure::Panicked { stage, said }) => {
                Err(ReplicaError::Panicked(format!("{}: {said}", place(stage))))
            }
            Some(Failure::Thread(error)) => Err(ReplicaError::Thread(error)),
            Some(Failure::Gone) => {
                Err(candle_core::Error::msg("the stages have lost each other").into())
            }
        }
    }

    /// Joins the results of the stages, in the order of the stages.
    fn joined(&self, done: Vec<Done>, bubble: Bubble) -> Result<Passed, ReplicaError> {
        let mut passed = Passed {
            loss: 0.0,
            gradients: GradStore::default(),
            bubble,
        };
        // Lanes have consecutive stages.
        for stage in done.into_iter().flat_map(|lane| lane.stages) {
            passed.loss += stage.loss;
            for (var, gradient) in stage.gradients {
                passed.gradients.insert(&var, gradient);
            }
        }
        Ok(passed)
    }

    /// Shows a step's bubble in the metrics.
    pub(super) fn show(&self, bubble: Bubble) {
        self.gauges.show(bubble);
    }

    /// Returns the model's outputs for a batch on the device of the first stage: on the same device.
    ///
    /// # Errors
    /// candle's.
    pub(super) fn forward(
        &self,
        model: &dyn Model,
        batch: &Batch,
        pass: &Pass,
    ) -> candle_core::Result<Tensor> {
        let number = pass.next_batch();
        let mut x: Option<Tensor> = None;
        for stage in &self.stages {
            let batch = batch.to_device(&stage.device)?;
            x = x.map(|x| x.to_device(&stage.device)).transpose()?;
            for block in stage.blocks.clone() {
                let pass = pass.of_block(block, number);
                x = Some(model.forward_block(block, x.as_ref(), &batch, &pass)?);
            }
        }
        let outputs = x.ok_or_else(|| candle_core::Error::msg("the model has no blocks"))?;
        outputs.to_device(&self.stages[0].device)
    }
}
