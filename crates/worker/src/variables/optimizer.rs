//! The optimizer of a worker that keeps all values itself: the rules of servers, on the worker's variables.

use std::cell::RefCell;
use std::ops::Range;

use candle_core::{CpuStorage, InplaceOp1, Layout, Var};
use optimizer::{Part, Update, VariableRule};
use shared_proto::blocks::VariableSpec;
use shared_proto::job::Job;
use shared_proto::payload::{self, Elements, LeF32};

use super::error::VariablesError;
use super::memory::{Overwrite, elements, numbers};
use super::set::Variables;

/// The rules and slots of a worker's variables. Vectors of values have those of all variables that are not frozen, in the
/// order of their numbers.
pub struct LocalOptimizer {
    rules: Vec<VariableRule>,
    /// The slots of each variable.
    slots: Vec<Vec<f32>>,
    /// The number of updates made.
    updates: u64,
}

impl LocalOptimizer {
    /// The optimizer of a job with so many training samples, for variables with their initial values.
    ///
    /// # Errors
    /// candle's.
    pub fn new(job: &Job, variables: &Variables, samples: u64) -> Result<Self, VariablesError> {
        let total = job.total_steps_together(samples, job.workers().into());
        let (mut rules, mut slots) = (Vec::new(), Vec::new());
        for (spec, var) in &variables.0 {
            let rule = VariableRule::of(job, spec, total);
            slots.push(match changes(spec) {
                true => rule.initial_slots(&elements(var)?),
                false => Vec::new(),
            });
            rules.push(rule);
        }
        Ok(Self {
            rules,
            slots,
            updates: 0,
        })
    }

    /// Returns the number of updates made.
    pub fn updates(&self) -> u64 {
        self.updates
    }

    /// Updates the variables by a gradient. Afterwards the gradient must not be used as numbers.
    ///
    /// # Errors
    /// [`VariablesError::Range`] if the gradient is not as long as the variables, or candle's.
    pub fn update(
        &mut self,
        variables: &Variables,
        gradient: &mut [f32],
    ) -> Result<(), VariablesError> {
        check_length(gradient.len(), places(variables).1)?;
        let gradient = payload::in_place(gradient);
        for (number, place) in places(variables).0 {
            let (_, var) = &variables.0[number];
            let rule = &self.rules[number];
            let update = rule.update_after(self.updates);
            let (gradient, slots) = (&gradient[place], RefCell::new(&mut *self.slots[number]));
            var.inplace_op1(&Apply {
                rule,
                update,
                gradient,
                slots,
            })?;
        }
        self.updates += 1;
        Ok(())
    }

    /// Returns the values of all variables, frozen ones too, and then their slots.
    ///
    /// # Errors
    /// candle's.
    pub fn state(&self, variables: &Variables) -> Result<Vec<f32>, VariablesError> {
        let mut state = Vec::new();
        for (_, var) in &variables.0 {
            state.extend(elements(var)?);
        }
        for slots in &self.slots {
            state.extend_from_slice(slots);
        }
        Ok(state)
    }

    /// Takes the values and slots of another replica, after `updates` updates.
    ///
    /// # Errors
    /// [`VariablesError::Range`] if there are not as many, or candle's.
    pub fn set_state(
        &mut self,
        variables: &Variables,
        state: &[f32],
        updates: u64,
    ) -> Result<(), VariablesError> {
        let values = variables.0.iter().map(|(spec, _)| spec.elements());
        let slots = self.slots.iter().map(Vec::len);
        check_length(state.len(), values.chain(slots).sum())?;
        let mut rest = state;
        let mut take = |count: usize| {
            let (taken, left) = rest.split_at(count);
            rest = left;
            taken
        };
        for (spec, var) in &variables.0 {
            overwrite(var, take(spec.elements()).to_vec())?;
        }
        for slots in &mut self.slots {
            let taken = take(slots.len());
            slots.copy_from_slice(taken);
        }
        self.updates = updates;
        Ok(())
    }

    /// Exchanges the weights and their moving averages, if the job keeps averages.
    ///
    /// # Errors
    /// candle's.
    pub fn swap_averages(&mut self, variables: &Variables) -> Result<(), VariablesError> {
        for ((spec, var), (rule, slots)) in variables
            .0
            .iter()
            .zip(self.rules.iter().zip(&mut self.slots))
        {
            let Some(place) = rule.averages(spec.elements()).filter(|_| !slots.is_empty()) else {
                continue;
            };
            let weights = elements(var)?;
            overwrite(var, slots[place.clone()].to_vec())?;
            slots[place].copy_from_slice(&weights);
        }
        Ok(())
    }
}

/// Returns whether updates change a variable.
fn changes(spec: &VariableSpec) -> bool {
    spec.kind.takes_updates()
}

/// Returns the number of each variable that is not frozen, with its place in a vector of values, and the vector's length.
fn places(variables: &Variables) -> (Vec<(usize, Range<usize>)>, usize) {
    let mut end = 0;
    let changing = variables.0.iter().enumerate();
    let changing = changing.filter(|(_, (spec, _))| changes(spec));
    let place = |(number, (spec, _)): (usize, &(VariableSpec, Var))| {
        let start = end;
        end += spec.elements();
        (number, start..end)
    };
    (changing.map(place).collect(), end)
}

fn check_length(found: usize, expected: usize) -> Result<(), VariablesError> {
    match found == expected {
        true => Ok(()),
        false => Err(VariablesError::Range(format!(
            "there are {found} numbers where the model has {expected}"
        ))),
    }
}

fn overwrite(var: &Var, values: Vec<f32>) -> candle_core::Result<()> {
    let values = &Elements::from(values);
    var.inplace_op1(&Overwrite { start: 0, values })
}

/// An update of a variable in its own memory.
struct Apply<'a> {
    rule: &'a VariableRule,
    update: Update,
    gradient: &'a [LeF32],
    slots: RefCell<&'a mut [f32]>,
}

impl Apply<'_> {
    fn apply(&self, weights: &mut [f32]) {
        let slots = &mut **self.slots.borrow_mut();
        let part = Part {
            weights,
            gradient: self.gradient,
            slots: self.rule.slots().split(slots),
        };
        self.rule.apply(self.update, part);
    }
}

impl InplaceOp1 for Apply<'_> {
    fn name(&self) -> &'static str {
        "update"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        let start = layout.start_offset();
        self.apply(&mut numbers(storage)?[start..start + self.gradient.len()]);
        Ok(())
    }

    /// The rules compute on the host: the weights are copied there and back.
    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        storage: &mut candle_core::CudaStorage,
        layout: &Layout,
    ) -> candle_core::Result<()> {
        let start = layout.start_offset();
        let device = storage.device().clone();
        let memory = storage.as_cuda_slice_mut::<f32>()?;
        let mut part = memory.slice_mut(start..start + self.gradient.len());
        let mut weights = device.clone_dtoh(&part)?;
        self.apply(&mut weights);
        device.memcpy_htod(&weights, &mut part)
    }
}
