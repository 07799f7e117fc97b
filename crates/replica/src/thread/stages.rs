//! Training steps of a replica that has some stages of the model. Other workers of its stage group have the rest.

use std::sync::Arc;

use async_trait::async_trait;
use candle_core::{Tensor, Var};
use candle_nn::VarBuilder;
use model::{Batch, Model, Pass, Setup};
use nn::Replicas as _;
use shared_proto::job::Job;
use variables::{Trained, Variables};

use super::pass::Begun;
use super::{Command, ModelReplica, Thread};
use crate::build::{Built, Place, build};
use crate::error::ReplicaError;
use crate::mirror::StageSteps;
use crate::mirrored::Reply;
use crate::neighbours::Neighbours;
use crate::pipeline::{Neighbouring, Passed, Pipeline, Spent};
use crate::rounds::Others;
use crate::step::{Computed, Positions, Step};

/// A command of a replica that has some stages.
pub(super) enum StageCommand {
    TakePlace(Option<usize>, Reply<()>),
    Compute(Neighbours, Positions, Step, Reply<Computed>),
}

impl Thread {
    pub(super) fn serve_stages(&mut self, command: StageCommand) {
        // A caller that is gone does not need the answer.
        match command {
            StageCommand::TakePlace(place, reply) => drop(reply.send(self.take_place(place))),
            StageCommand::Compute(neighbours, positions, step, reply) => {
                drop(reply.send(self.compute_in_stages(neighbours, positions, step)));
            }
        }
    }

    /// Takes a place in a stage group. If variables move to other devices, the model is built anew, with the same
    /// values. After an error, the replica cannot be used any more.
    fn take_place(&mut self, place: Option<usize>) -> Result<(), ReplicaError> {
        let pipeline = self.pipeline.as_mut();
        let Some(places) = pipeline.and_then(|pipeline| pipeline.take_place(place)) else {
            return Ok(());
        };
        let values = self.variables.all_values()?;
        // A device may not have the memory for the old and the new stages.
        (self.evaluating, self.pipeline) = (None, None);
        self.model.replace(Arc::new(Moving));
        self.variables = Variables::none();
        // All values are there, and the file of the initial ones may be gone.
        let mut job = Job::clone(&self.job);
        job.model.init_from = None;
        let build = |stages| {
            let on = Place::in_stages(&self.device, stages);
            build(&job, &self.registry, &on, &self.signature, &self.objective)
        };
        let (built, pipeline) = Pipeline::build_on(&job, places, build)?;
        let Built {
            variables, model, ..
        } = built;
        for (variable, values) in values.into_iter().enumerate() {
            variables.write(variable, 0, &values)?;
        }
        self.model.replace(model.into());
        (self.variables, self.pipeline) = (variables, Some(pipeline));
        Ok(())
    }

    /// Computes the passes of this worker's stages. The loss and the norm are those of the whole stage group.
    fn compute_in_stages(
        &mut self,
        neighbours: Neighbours,
        positions: Positions,
        step: Step,
    ) -> Result<Computed, ReplicaError> {
        let Begun { batches, rows, .. } = self.begin(positions)?;
        let before = self.variables.measured()?;
        let Some(pipeline) = &self.pipeline else {
            return Err(not_cut().into());
        };
        let begun = neighbours.begin(pipeline.count_micro_batches(&batches));
        let (others, neighbouring) = (
            begun.others,
            Neighbouring {
                before: begun.before,
                next: begun.next,
            },
        );
        let (model, pass) = (self.model.get(), self.training_pass(step));
        let passed = pipeline.pass(&*model, &self.objective, &batches, &pass, neighbouring);
        let whole = passed.and_then(|passed| self.of_the_group(passed, pipeline, &others));
        match whole {
            Ok((loss, clipped)) => {
                let gradients = self.variables.finish_clipped(clipped, &rows, before)?;
                Ok(Computed::new(loss, gradients))
            }
            Err(error) => {
                // The step may be made again with others, and then counts from these values.
                self.variables.restore(before)?;
                Err(error)
            }
        }
    }

    /// Returns the loss of the stage group, and the gradients of this worker's stages, clipped by the norm over all
    /// stages. For this, the workers of the group add up their losses and the squares of their gradients.
    fn of_the_group(
        &self,
        passed: Passed,
        pipeline: &Pipeline,
        others: &Others,
    ) -> Result<(f64, (Trained, f64)), ReplicaError> {
        let Spent { busy, span } = passed.spent;
        let own = |var: &Var| pipeline.trains(var);
        let trained = self.variables.gradients_of(&passed.gradients, &[], own)?;
        // The first worker begins and ends the passes of a step.
        let span = if pipeline.is_first() { span } else { 0.0 };
        let (mut added, mut sums) = (vec![passed.loss, busy, span], None);
        let mut whole = |squares: f64| {
            let mut numbers = vec![squares];
            numbers.append(&mut added);
            others.add_up(&mut numbers)?;
            let squares = numbers[0];
            sums.get_or_insert(numbers);
            Ok::<_, candle_core::Error>(squares)
        };
        let clipped = trained.clipped_among(self.job.clip(), &mut whole)?;
        let Some(&[_, loss, busy, span]) = sums.as_deref() else {
            return Err(not_cut().into());
        };
        pipeline.show(Spent { busy, span }, passed.ideal_bubble);
        Ok((loss, clipped))
    }
}

/// Takes the place of a model while its variables move to other devices.
struct Moving;

impl Model for Moving {
    fn new(_: &Setup, _: VarBuilder) -> candle_core::Result<Self> {
        Ok(Self)
    }

    fn forward(&self, _: &Batch, _: &Pass) -> candle_core::Result<Tensor> {
        Err(not_cut())
    }
}

fn not_cut() -> candle_core::Error {
    candle_core::Error::msg(
        "the model has no stages; this is a fault of the program, please report it",
    )
}

#[async_trait(?Send)]
impl StageSteps for ModelReplica {
    fn devices(&self) -> usize {
        self.stage_devices
    }

    async fn take_place(&self, place: Option<usize>) -> Result<(), ReplicaError> {
        self.ask(|reply| Command::Stages(StageCommand::TakePlace(place, reply)))
            .await
    }

    async fn compute_in_stages(
        &self,
        neighbours: Neighbours,
        positions: Positions,
        step: Step,
    ) -> Result<Computed, ReplicaError> {
        self.ask(|reply| Command::Stages(StageCommand::Compute(neighbours, positions, step, reply)))
            .await
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;
    use shared_proto::payload::Elements;

    use super::*;
    use crate::interface::{Evaluation, EvaluationPart};
    use model::registry::Registry;

    /// A CPU has one memory, so this only shows that values stay and that the new model computes with them.
    #[test]
    fn a_model_that_moves_to_other_devices_keeps_its_values() {
        let job = "[model]\nname = \"mlp\"\n[strategy]\nname = \"model-parallel\"\nstages = 2\nstage_workers = 2\n";
        let job = Arc::new(Job::from_toml(job).unwrap());
        let (mut thread, _requests) =
            Thread::new(job, Registry::builtin(), &[Device::Cpu]).unwrap();
        let evaluate = |thread: &mut Thread| {
            let mut part = EvaluationPart::First;
            loop {
                match thread.evaluate(part).unwrap() {
                    Evaluation::Done(metrics) => break metrics,
                    Evaluation::Wants(_) => part = EvaluationPart::Next,
                }
            }
        };
        let before = evaluate(&mut thread);
        for variable in 0..thread.description.variables.len() {
            let elements = thread.description.variables[variable].elements();
            let values = vec![0.01 * (1 + variable) as f32; elements];
            let values = Elements::from(values);
            thread.variables.write(variable, 0, &values).unwrap();
        }
        let (values, measured) = (
            thread.variables.all_values().unwrap(),
            evaluate(&mut thread),
        );
        assert_ne!(measured, before);
        for place in [Some(1), Some(0), None, Some(1)] {
            let id = |thread: &Thread| thread.variables.each().next().map(|(_, var, _)| var.id());
            let old = id(&thread);
            thread.pipeline.as_mut().unwrap().separate_devices();
            thread.take_place(place).unwrap();
            assert_ne!(id(&thread), old, "it is built anew");
            assert_eq!(thread.variables.all_values().unwrap(), values);
            assert_eq!(evaluate(&mut thread), measured);
            let again = id(&thread);
            thread.take_place(place).unwrap();
            assert_eq!(id(&thread), again, "it has this place already");
        }
    }
}
