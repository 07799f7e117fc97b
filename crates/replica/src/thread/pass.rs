//! The passes of a training step.

use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
use model::tables::StepRows;
use model::{Batch, Pass};
use nn::{backward, synchronised};
use shared_proto::step::WantedRows;
use variables::Trained;

use super::handle::ended;
use super::memory::OutOfMemory;
use super::{Thread, nothing};
use crate::error::ReplicaError;
use crate::pipeline::Neighbouring;
use crate::reader::Assembled;
use crate::rounds::Others;
use crate::step::{Computed, Positions, Step};

/// A step before its passes.
pub(super) struct Begun {
    pub(super) batches: Vec<Batch>,
    /// The rows of each table that the batches want.
    pub(super) rows: Vec<Arc<WantedRows>>,
    pub(super) step_rows: StepRows,
}

impl Thread {
    /// Computes the loss and the gradients of a step, together with `others` if several replicas compute the step
    /// together.
    pub(super) fn compute(
        &mut self,
        positions: Positions,
        step: Step,
        others: Option<Others>,
    ) -> Result<Computed, ReplicaError> {
        let Begun {
            batches,
            rows,
            step_rows,
        } = self.begin(positions)?;
        let before = self.variables.measured()?;
        let others = others.map(Arc::new);
        let passed = {
            let _leaving = others.as_ref().map(|others| others.leaving());
            self.pass(&batches, step, step_rows.vars(), others.as_ref())
        };
        let (loss, sum) = match passed {
            Ok(passed) => passed,
            Err(error) => {
                // The step may be made again with others, and then counts from these values.
                self.variables.restore(before)?;
                return Err(error);
            }
        };
        if others.is_some_and(|others| others.rounds() == 0) {
            let model = self.job.model.name.clone();
            return Err(ReplicaError::Unsynchronised(model));
        }
        let clip = self.job.worker_clip();
        let gradients = self.variables.finish_gradients(sum, &rows, before, clip)?;
        Ok(Computed::new(loss, gradients))
    }

    /// Takes the batches of a prepared step, and gives the model the rows that they want.
    pub(super) fn begin(&mut self, positions: Positions) -> Result<Begun, ReplicaError> {
        std::mem::replace(&mut self.loaded, Ok(()))?;
        let Assembled { batches, rows } = self.batches(positions)?;
        let step_rows = self.tables.rows(&rows, &mut self.pulled, &self.device)?;
        self.tables.set(&step_rows);
        Ok(Begun {
            batches,
            rows,
            step_rows,
        })
    }

    /// Returns the [`Pass`] of a step, which the model gets.
    pub(super) fn training_pass(&self, step: Step) -> Pass<'_> {
        Pass::training(&self.objective, self.job.seed, step.clock.0, step.rank)
    }

    /// Makes the forward and the backward pass of a batch. Returns the loss and the gradients, which a GPU may still be
    /// computing.
    pub(super) fn both_passes(
        &self,
        batch: &Batch,
        pass: &Pass,
        backward: impl FnOnce(&Tensor) -> candle_core::Result<GradStore>,
    ) -> candle_core::Result<(Tensor, GradStore)> {
        let mut tensors = OutOfMemory {
            variables: &self.variables,
            batch: Some(batch),
            loss: None,
        };
        let model = self.model.get();
        let forward = model.forward(batch, pass);
        let loss = forward.and_then(|outputs| model.loss(&outputs, batch, pass));
        let loss = loss.map_err(|error| tensors.explain(error, &self.device, pass.step))?;
        tensors.loss = Some(&loss);
        match backward(&loss) {
            Ok(gradients) => Ok((loss, gradients)),
            Err(error) => Err(tensors.explain(error, &self.device, pass.step)),
        }
    }

    /// Makes the forward and the backward passes of a step's batches. Returns the mean loss, and the mean gradients of
    /// trained variables and of the rows of tables.
    fn pass(
        &self,
        batches: &[Batch],
        step: Step,
        rows: &[Var],
        others: Option<&Arc<Others>>,
    ) -> Result<(f64, Trained), ReplicaError> {
        let samples: usize = batches.iter().map(Batch::samples).sum();
        let pass = self.training_pass(step);
        if let Some(pipeline) = &self.pipeline {
            let (model, alone) = (self.model.get(), Neighbouring::default());
            let passed = pipeline.pass(&*model, &self.objective, batches, &pass, alone)?;
            pipeline.show(passed.spent, passed.ideal_bubble);
            let gradients = self.variables.trained_gradients(&passed.gradients, rows)?;
            return Ok((passed.loss, gradients));
        }
        let (mut mean, mut sum) = (0.0, None::<Trained>);
        for batch in batches {
            let work = || {
                let (loss, gradients) = self.both_passes(batch, &pass, backward)?;
                Ok::<_, candle_core::Error>((loss_value(&loss)?, gradients))
            };
            let (loss, store) = match others {
                Some(others) => synchronised(others.clone(), batch.samples(), work),
                None => work(),
            }?;
            let share = batch.samples() as f64 / samples as f64;
            mean += share * loss;
            let gradients = self.variables.trained_gradients(&store, rows)?;
            match &mut sum {
                None if batches.len() == 1 => sum = Some(gradients),
                None => sum = Some(gradients.times(share as f32)),
                Some(sum) => sum.add(gradients, share as f32),
            }
        }
        Ok((mean, sum.ok_or_else(nothing)?))
    }

    /// Returns the batches of a prepared step, in the device's memory; in the host's memory if the model is in stages.
    fn batches(&mut self, positions: Positions) -> Result<Assembled, ReplicaError> {
        let mut prepared = std::iter::from_fn(|| self.prepared.pop_front());
        // A membership that has ended may have left batches behind.
        let batches = prepared.find(|(of, _)| *of == positions);
        let (_, batches) = batches.ok_or_else(nothing)?;
        let Ok(batches) = batches.blocking_recv() else {
            return Err(ended(self.reader.take()));
        };
        let Assembled { batches, rows } = batches?;
        let there = |batch: Batch| match self.pipeline {
            // Each stage copies it to its own device.
            Some(_) => Ok(batch),
            None => Ok(batch.to_device(&self.device)?),
        };
        let batches = batches.into_iter().map(there);
        let batches = batches.collect::<Result<_, ReplicaError>>()?;
        Ok(Assembled { batches, rows })
    }
}

/// Returns a loss as a number. On a GPU, this waits for all earlier operations.
pub(super) fn loss_value(loss: &Tensor) -> candle_core::Result<f64> {
    loss.to_scalar::<f32>().map(f64::from)
}
