//! A model in stages, each on a device. The micro-batches of a step pass through the stages one after the other.
//!
//! - `schedule`: the order of the passes, in which no stage waits forever
//! - `micro`: a step's batches, cut into micro-batches
//! - `averages`: running statistics over the micro-batches of a batch
//! - `stage`: the passes of a stage, and its state between them
//! - `ways`: the channels between stages, on devices of this worker or of others
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
mod ways;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::sync_channel;

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use model::{Batch, Model, Objective, Pass, Stages};
use parking_lot::Mutex;
use shared_proto::job::{Job, PipelineSchedule};

use self::bubble::BubbleGauges;
use self::lane::{Done, Failure, Lane};
use self::micro::micro_batches;
use self::place::Stage;
use self::schedule::{Timeline, held, timeline};
use self::stage::{Running, StepOf};
use self::ways::{Inlet, Outlet, Ways};
use super::build::{Built, precision};
use super::error::ReplicaError;
use super::neighbours::Neighbour;

pub(super) use bubble::{Bubble, Spent};
pub(super) use place::Places;

/// The stages of a model, and how they compute.
pub(super) struct Pipeline {
    schedule: PipelineSchedule,
    /// The largest number of micro-batches of a batch.
    micro_batches: usize,
    stages: Vec<Stage>,
    places: Places,
    precision: DType,
    gauges: BubbleGauges,
    /// The timelines that were needed so far, by the number of micro-batches. Most steps need the same one.
    timelines: Mutex<BTreeMap<usize, Arc<Timeline>>>,
}

/// The results of a step's passes.
pub(super) struct Passed {
    /// The mean loss over the step's samples; 0 if another worker has the last stage.
    pub(super) loss: f64,
    /// The gradients of the loss with respect to the variables of this worker's stages.
    pub(super) gradients: GradStore,
    /// The time of this worker's devices.
    pub(super) spent: Spent,
    /// The share of time in which devices wait if all stages take equally long.
    pub(super) ideal_bubble: f64,
}

/// The channels to and from the neighbours of a worker in its stage group.
#[derive(Default)]
pub(super) struct Neighbouring {
    pub(super) before: Option<Neighbour>,
    pub(super) next: Option<Neighbour>,
}

impl Pipeline {
    /// Builds a job's model, and cuts it into stages on these devices.
    ///
    /// # Errors
    /// Those of the model, [`ReplicaError::Devices`] if devices would have no stage, or [`ReplicaError::Chain`] if the
    /// model cannot be cut into the stages.
    pub(crate) fn build(
        job: &Job,
        devices: &[Device],
        build: impl FnOnce(Stages) -> Result<Built, ReplicaError>,
    ) -> Result<(Built, Self), ReplicaError> {
        Self::build_on(job, Places::new(&job.strategy, devices)?, build)
    }

    /// Builds a job's model, and cuts it into stages on the devices that `places` assigns.
    ///
    /// # Errors
    /// Those of [`Self::build`].
    pub(super) fn build_on(
        job: &Job,
        places: Places,
        build: impl FnOnce(Stages) -> Result<Built, ReplicaError>,
    ) -> Result<(Built, Self), ReplicaError> {
        let on = places.stages();
        let built = build(on.clone())?;
        if let Some(table) = built.tables.specs().first() {
            return Err(ReplicaError::Chain(format!(
                "the model has the table {:?}, whose rows no stage can hold; set `model.tables = false`, or use `strategy.name = \"hybrid\"`",
                table.name
            )));
        }
        let name = &job.model.name;
        let stages = place::stages(name, &places, &on, &built.variables, &*built.model)?;
        let strategy = &job.strategy;
        // With four micro-batches for each device these wait for less than a fifth of the time, which GPipe (section 2.3) found negligible;
        // more would make matrix products smaller. One device never waits.
        let usual = match places.all_devices() {
            1 => 1,
            devices => 4 * devices,
        };
        let pipeline = Self {
            schedule: strategy.schedule.unwrap_or_default(),
            micro_batches: strategy.micro_batches.map_or(usual, |count| count as usize),
            stages,
            places,
            precision: precision(job),
            gauges: BubbleGauges::new(),
            timelines: Mutex::default(),
        };
        Ok((built, pipeline))
    }

    /// Gives this worker a place in its stage group; with `None`, it has no place. If variables must move to other
    /// devices for this, changes nothing, and returns the places for which the caller must build the model anew.
    pub(super) fn take_place(&mut self, worker: Option<usize>) -> Option<Places> {
        let places = self.places.of_worker(worker);
        if places.worker() == self.places.worker() {
            return None;
        }
        if !places.are_in_one_memory() {
            return Some(places);
        }
        place::tell(&self.stages, &places.own());
        self.places = places;
        None
    }

    /// Treats the worker's devices as ones with memory of their own, as GPUs have.
    #[cfg(test)]
    pub(super) fn separate_devices(&mut self) {
        self.places.separate();
    }

    /// Returns whether a variable is trained by a stage of this worker.
    pub(super) fn trains(&self, var: &Var) -> bool {
        let own = self.places.own();
        let mut stages = self
            .stages
            .iter()
            .filter(|stage| own.contains(&stage.place));
        stages.any(|stage| stage.trained.iter().any(|own| own.id() == var.id()))
    }

    /// Returns whether this worker has the first place in its stage group. Its passes begin first and end last.
    pub(super) fn is_first(&self) -> bool {
        self.places.worker() == Some(0)
    }

    /// Makes the forward and the backward pass of a step's batches, which are in the host's memory.
    ///
    /// # Errors
    /// [`ReplicaError::Stage`] or [`ReplicaError::Panicked`] names the stage that has failed. The threads of all other
    /// stages have ended by then.
    pub(super) fn pass(
        &self,
        model: &dyn Model,
        objective: &Objective,
        batches: &[Batch],
        pass: &Pass,
        neighbours: Neighbouring,
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
        let mut lanes = self.lanes(&step, &failed, neighbours);
        let orders = &timeline.devices[self.places.own()];
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
            let threads: Vec<_> = lanes.drain(..).zip(orders).map(start).collect();
            threads.into_iter().map(lane::end).collect()
        });
        let done = self.all(ended)?;
        self.joined(done, timeline.ideal_bubble)
    }

    /// Returns the number of micro-batches of a step with these batches.
    pub(super) fn count_micro_batches(&self, batches: &[Batch]) -> usize {
        micro_batches(batches, self.micro_batches).len()
    }

    /// Returns the timeline of a step with this number of micro-batches.
    fn timeline(&self, micro_batches: usize) -> Arc<Timeline> {
        let mut timelines = self.timelines.lock();
        let new = || {
            let device_of: Vec<usize> = self.stages.iter().map(|stage| stage.place).collect();
            Arc::new(timeline(self.schedule, &device_of, micro_batches))
        };
        Arc::clone(timelines.entry(micro_batches).or_insert_with(new))
    }

    /// Returns a lane for each device of this worker, with the channels between its stages and their neighbours.
    fn lanes<'a>(
        &'a self,
        step: &'a StepOf<'a>,
        failed: &'a AtomicBool,
        neighbours: Neighbouring,
    ) -> Vec<Lane<'a>> {
        let devices = self.places.devices().iter();
        let mut lanes: Vec<Lane> = devices
            .map(|device| Lane::new(step, device, failed))
            .collect();
        let own = self.places.own();
        let is_own = |stage: &&Stage| own.contains(&stage.place);
        let mut ways = Ways::default();
        if let Some(Neighbour { to, from, waits }) = neighbours.before {
            ways.from_before = Some(Inlet::Worker(from, waits));
            ways.to_before = Some(Outlet::Worker(to));
        }
        let mut stages = self.stages.iter().filter(is_own).peekable();
        let mut behind = neighbours.next;
        while let Some(stage) = stages.next() {
            let mut next = Ways::default();
            if let Some(after) = stages.peek() {
                // As many as the stage holds, so that no sender ever waits.
                let capacity = held(
                    self.schedule,
                    stage.number(),
                    self.stages.len(),
                    step.micro_batches.len(),
                );
                let (activations, arrive) = sync_channel(capacity);
                let (gradients, come_back) = sync_channel(capacity);
                ways.to_next = Some(Outlet::Stage(activations, after.device.clone()));
                ways.from_next = Some(Inlet::Stage(come_back));
                next.from_before = Some(Inlet::Stage(arrive));
                next.to_before = Some(Outlet::Stage(gradients, stage.device.clone()));
            } else if let Some(Neighbour { to, from, waits }) = behind.take() {
                ways.to_next = Some(Outlet::Worker(to));
                ways.from_next = Some(Inlet::Worker(from, waits));
            }
            let ways = std::mem::replace(&mut ways, next);
            lanes[stage.place - own.start].add(Running::new(stage, ways));
        }
        lanes
    }

    /// Returns the results of all lanes. If lanes have failed, returns the error of the first one that did not just
    /// lose a neighbour.
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
    fn joined(&self, done: Vec<Done>, ideal_bubble: f64) -> Result<Passed, ReplicaError> {
        let mut passed = Passed {
            loss: 0.0,
            gradients: GradStore::default(),
            spent: Spent::new(&done),
            ideal_bubble,
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

    /// Shows a step's bubble in the metrics, and returns it. `spent` is the time of all devices that hold the model.
    pub(super) fn show(&self, spent: Spent, ideal_bubble: f64) -> Bubble {
        let bubble = Bubble::new(spent, self.places.all_devices(), ideal_bubble);
        self.gauges.show(bubble);
        bubble
    }

    /// Returns the model's outputs for a batch, on this worker's first device. Each stage runs on the device of its
    /// variables; stages of other workers run on the CPU.
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
        outputs.to_device(&self.places.devices()[0])
    }
}
