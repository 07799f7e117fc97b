//! The passes of a stage, and its state between them.

use std::collections::VecDeque;

use candle_core::backprop::GradStore;
use candle_core::{Result, Tensor, Var, bail};
use model::{Batch, Model, Objective, Pass};
use nn::{backward, backward_from};

use super::averages::Averages;
use super::micro::MicroBatch;
use super::place::Stage;
use super::ways::{Activations, Gradient, Parcel, Ways};

/// The parts of a step that all stages share.
pub(super) struct StepOf<'a> {
    pub(super) model: &'a dyn Model,
    pub(super) objective: &'a Objective,
    pub(super) batches: &'a [Batch],
    pub(super) micro_batches: &'a [MicroBatch],
    pub(super) seed: u64,
    pub(super) clock: u64,
    pub(super) rank: u32,
}

impl StepOf<'_> {
    /// Returns a [`Pass`] of the step, for one thread.
    pub(super) fn pass(&self) -> Pass<'_> {
        Pass::training(self.objective, self.seed, self.clock, self.rank)
    }
}

/// A stage within a step.
pub(super) struct Running<'a> {
    pub(super) stage: &'a Stage,
    pub(super) ways: Ways,
    /// The micro-batches that have not had their backward pass yet, the oldest first.
    held: VecDeque<Held>,
    averages: Option<Averages<'a>>,
    result: StageResult,
}

/// The tensors of a micro-batch that a stage holds from its forward to its backward pass.
struct Held {
    micro_batch: usize,
    /// The inputs, if their gradient is needed.
    inputs: Option<Var>,
    /// The outputs; in the last stage, the loss times the micro-batch's share of the step's samples.
    outputs: Tensor,
}

/// The result of a stage.
#[derive(Default)]
pub(super) struct StageResult {
    /// The step's loss, from the last stage; 0 from the other stages.
    pub(super) loss: f64,
    /// The gradients of the stage's variables, summed in the order of the micro-batches.
    pub(super) gradients: Vec<(Var, Tensor)>,
}

impl<'a> Running<'a> {
    pub(super) fn new(stage: &'a Stage, ways: Ways) -> Self {
        Self {
            stage,
            ways,
            held: VecDeque::new(),
            averages: None,
            result: StageResult::default(),
        }
    }

    pub(super) fn result(self) -> StageResult {
        self.result
    }

    /// Makes the forward pass of a micro-batch. Returns the outputs, if there is a next stage.
    pub(super) fn forward(
        &mut self,
        inputs: Option<Parcel<Activations>>,
        (number, batch): (usize, &Batch),
        step: &StepOf,
    ) -> Result<Option<Parcel<Activations>>> {
        let micro_batch = &step.micro_batches[number];
        let (pass, number_in_step) = (step.pass(), number as u32);
        if self.averages.is_none() {
            self.averages = Some(Averages::new(&self.stage.measured)?);
        }
        let inputs = inputs.map(|inputs| inputs.open(&self.stage.device));
        let inputs = inputs.transpose()?;
        let (mut x, inputs) = inputs.map_or(Ok((None, None)), Activations::taken)?;
        for block in self.stage.blocks.clone() {
            let pass = pass.of_block(block, number_in_step);
            x = Some(step.model.forward_block(block, x.as_ref(), batch, &pass)?);
        }
        let Some(mut outputs) = x else {
            bail!("a stage without blocks has no outputs");
        };
        if let Some(averages) = &mut self.averages {
            averages.add(micro_batch)?;
        }
        let mut handed_on = None;
        if self.stage.is_last() {
            let loss = step
                .model
                .loss(&outputs, batch, &pass.of_batch(number_in_step))?;
            self.result.loss += micro_batch.share * f64::from(loss.to_scalar::<f32>()?);
            // The gradients of all stages are then those of the mean over the step's samples.
            outputs = (loss * micro_batch.share)?;
        } else if let Some(next) = &self.ways.to_next {
            handed_on = Some(next.pack(Activations {
                values: outputs.detach(),
                is_trained: outputs.track_op(),
            })?);
        }
        self.held.push_back(Held {
            micro_batch: number,
            inputs,
            outputs,
        });
        Ok(handed_on)
    }

    /// Makes the backward pass of a micro-batch, given the gradient of its outputs. Returns the gradient of its inputs,
    /// if there is a stage before.
    pub(super) fn backward(
        &mut self,
        gradient: Option<Parcel<Gradient>>,
        number: usize,
    ) -> Result<Option<Parcel<Gradient>>> {
        let held = self.held.pop_front();
        let Some(held) = held.filter(|held| held.micro_batch == number) else {
            bail!("micro-batch {number} has a backward pass before its forward pass");
        };
        let gradient = gradient.map(|gradient| gradient.open(&self.stage.device));
        let gradient = gradient.transpose()?.flatten();
        let mut store = match gradient {
            _ if !held.outputs.track_op() => GradStore::default(),
            _ if self.stage.is_last() => backward(&held.outputs)?,
            Some(gradient) => backward_from(&held.outputs, &gradient)?,
            None => GradStore::default(),
        };
        drop(held.outputs);
        self.stage.check_own(&store)?;
        self.add(&mut store)?;
        let of_inputs = held.inputs.and_then(|inputs| store.remove(&inputs));
        let of_inputs = of_inputs.map(|gradient| gradient.detach());
        let before = self.ways.to_before.as_ref();
        before.map(|before| before.pack(of_inputs)).transpose()
    }

    /// Adds the gradients of a micro-batch to the sums over the micro-batches before it.
    fn add(&mut self, store: &mut GradStore) -> Result<()> {
        let sums = std::mem::take(&mut self.result.gradients);
        let mut sums = sums.into_iter().peekable();
        for var in &self.stage.trained {
            let before = sums.next_if(|(of, _)| of.id() == var.id());
            let before = before.map(|(_, sum)| sum);
            let sum = match (before, store.remove(var)) {
                (Some(sum), Some(gradient)) => Some((sum + gradient.detach())?),
                (Some(sum), None) => Some(sum),
                (None, gradient) => gradient.map(|gradient| gradient.detach()),
            };
            let sums = &mut self.result.gradients;
            sums.extend(sum.map(|sum| (var.clone(), sum)));
        }
        Ok(())
    }
}
