//! The optimizer of a worker that keeps all values itself. It applies the rules of parameter servers to the worker's
//! variables.
//!
//! In a job that shares out the optimizer's state, a worker has the slots of only some elements. An update then has two
//! halves. First the worker prepares the update: it computes the new values of its own elements. Once the new values of
//! all other elements have arrived, it makes the update. In between nothing changes. So a worker can drop a prepared
//! update, and can give other workers the slots as they are after that update. `on_device` makes updates in a device's
//! memory.

mod on_device;

use std::cell::RefCell;
use std::ops::Range;

use candle_core::{Tensor, Var};
use optimizer::{Part, VariableRule};
use shared_proto::blocks::VariableSpec;
use shared_proto::job::Job;
use shared_proto::payload::{self, LeF32};

use self::on_device::OnDevice;
use super::buckets::BucketedGradients;
use super::error::VariablesError;
use super::memory::{elements, overwrite};
use super::set::Variables;
use super::slots::{Places, SlotPart};
use super::update::Apply;

/// The rules and slots of a worker's variables. Vectors of values or gradients have the elements of all variables that
/// are not frozen, in order.
pub struct LocalOptimizer {
    rules: Vec<VariableRule>,
    places: Places,
    /// True if the job shares out the rules' slots among its workers.
    shares_slots: bool,
    /// The slots that this worker has. A job that shares them out begins with none.
    held: HeldSlots,
    /// The moving averages of each variable; empty if the job keeps none.
    averages: Vec<Vec<f32>>,
    /// The slots and averages in the device's memory, if the newest update was made there.
    on_device: Option<OnDevice>,
    /// The number of updates made.
    updates: u64,
    /// The factor of the learning rate in updates that are made from now on.
    lowered_to: f64,
}

/// The slots of some elements, and the prepared update of these elements, if there is one.
#[derive(Default)]
pub struct HeldSlots {
    parts: Vec<SlotPart>,
    prepared: Option<Prepared>,
}

/// An update that is prepared.
struct Prepared {
    /// The number of updates before it.
    after: u64,
    /// The factor of the learning rate in it.
    lowered_to: f64,
    /// The gradient of each held part.
    gradients: Vec<Vec<f32>>,
    /// A copy of each held part's weights before the update, made before the variables are overwritten; `None` until
    /// then.
    weights: Option<Vec<Vec<f32>>>,
}

impl LocalOptimizer {
    /// Creates the optimizer of a job with `samples` training samples. The variables must have their initial values.
    ///
    /// # Errors
    /// candle's.
    pub fn new(job: &Job, variables: &Variables, samples: u64) -> Result<Self, VariablesError> {
        let computing = job.strategy.stage_groups().computing(job.workers().into());
        let total = job.total_steps_together(samples, computing);
        let rule = |(spec, _): &(VariableSpec, Var)| VariableRule::new(job, spec, total);
        let rules: Vec<VariableRule> = variables.0.iter().map(rule).collect();
        let places = Places::of(job, variables.0.iter().map(|(spec, _)| spec));
        let averages = variables.0.iter().zip(&rules);
        let averages = averages.map(|((_, var), rule)| match rule.has_averages() {
            true => elements(var),
            false => Ok(Vec::new()),
        });
        let shares_slots = job.strategy.optimizer_copies.is_some();
        Ok(Self {
            averages: averages.collect::<Result<_, _>>()?,
            shares_slots,
            on_device: None,
            held: HeldSlots {
                parts: match shares_slots {
                    true => Vec::new(),
                    false => places.whole(),
                },
                prepared: None,
            },
            rules,
            places,
            updates: 0,
            lowered_to: 1.0,
        })
    }

    /// Returns the number of updates made.
    pub fn updates(&self) -> u64 {
        self.updates
    }

    /// Multiplies the learning rate of later updates by `factor`. A prepared update keeps its own factor.
    pub fn scale_learning_rate(&mut self, factor: f64) {
        self.lowered_to = factor;
    }

    /// Returns the size in bytes of the slots that this worker has, without the moving averages.
    pub fn slot_bytes(&self) -> usize {
        let parts = self.held.parts.iter();
        parts.map(|part| size_of_val(&part.slots[..])).sum()
    }

    /// Updates the variables with a gradient. The contents of the gradient are undefined afterwards.
    ///
    /// # Errors
    /// [`VariablesError::Range`] if the gradient is not as long as the variables, or slots are missing; or candle's.
    pub fn update(
        &mut self,
        variables: &Variables,
        gradient: &mut BucketedGradients,
    ) -> Result<(), VariablesError> {
        check_length(gradient.elements(), self.places.all())?;
        self.check_whole()?;
        self.leave_device()?;
        let parts = self.held.parts.iter();
        let places: Vec<_> = parts
            .map(|part| gradient.place(part.variable, &part.place))
            .collect();
        let vectors = gradient.vectors_mut().iter_mut();
        let vectors: Vec<&[LeF32]> = vectors.map(|vector| payload::in_place(vector)).collect();
        for (part, (vector, place)) in self.held.parts.iter_mut().zip(places) {
            let (_, var) = &variables.0[part.variable];
            let rule = &self.rules[part.variable];
            let mut slots = rule.rule_slots().split(&mut part.slots);
            if rule.has_averages() {
                slots[rule.rule_slots().count] = &mut self.averages[part.variable];
            }
            var.inplace_op1(&Apply {
                rule,
                update: rule.update_after(self.updates, self.lowered_to),
                gradient: &vectors[vector][place],
                slots: RefCell::new(slots),
            })?;
        }
        self.updates += 1;
        Ok(())
    }

    /// Prepares an update of the held elements. In `gradient`, replaces their gradients with their new values; the
    /// other elements are undefined afterwards. Nothing else changes.
    ///
    /// # Errors
    /// [`VariablesError::Range`] if the gradient is not as long as the variables, or candle's.
    pub fn prepare(
        &mut self,
        variables: &Variables,
        gradient: &mut [f32],
    ) -> Result<(), VariablesError> {
        check_length(gradient.len(), self.places.all())?;
        let mut gradients = Vec::new();
        for part in &self.held.parts {
            let values = &mut gradient[part.place.clone()];
            let mut weights = weights_of(variables, part)?;
            gradients.push(values.to_vec());
            let mut slots = part.slots.clone();
            let next = (self.updates, self.lowered_to);
            self.apply(part, next, values, &mut weights, &mut slots);
            values.copy_from_slice(&weights);
        }
        self.held.prepared = Some(Prepared {
            after: self.updates,
            lowered_to: self.lowered_to,
            gradients,
            weights: None,
        });
        Ok(())
    }

    /// Makes the prepared update: the variables get the new values of all elements.
    ///
    /// # Errors
    /// [`VariablesError::Range`] if no update is prepared, or `values` has the wrong length; or candle's.
    pub fn make_prepared(
        &mut self,
        variables: &Variables,
        values: &[f32],
    ) -> Result<(), VariablesError> {
        check_length(values.len(), self.places.all())?;
        let none = || VariablesError::Range("no update is prepared".to_owned());
        let prepared = self.held.prepared.take().ok_or_else(none)?;
        let mut held = std::mem::take(&mut self.held);
        for (part, mut gradient) in held.parts.iter_mut().zip(prepared.gradients) {
            let mut weights = weights_of(variables, part)?;
            let mut slots = std::mem::take(&mut part.slots);
            self.apply(
                part,
                (prepared.after, prepared.lowered_to),
                &mut gradient,
                &mut weights,
                &mut slots,
            );
            part.slots = slots;
        }
        self.held = held;
        for (number, (spec, var)) in variables.0.iter().enumerate() {
            if changes(spec) {
                let values = &values[self.places.of_variable(number)];
                let rule = &self.rules[number];
                let update = rule.update_after(self.updates, prepared.lowered_to);
                rule.move_averages(update, values, &mut self.averages[number]);
                overwrite(var, values.to_vec())?;
            }
        }
        self.updates += 1;
        Ok(())
    }

    /// Applies a part's gradient to its weights and slots, without the moving averages. `after` is the number of
    /// updates before this one, and `lowered_to` the factor of its learning rate.
    fn apply(
        &self,
        part: &SlotPart,
        (after, lowered_to): (u64, f64),
        gradient: &mut [f32],
        weights: &mut [f32],
        slots: &mut [f32],
    ) {
        let rule = &self.rules[part.variable];
        let slots = rule.rule_slots().split(slots);
        rule.apply_rule(
            rule.update_after(after, lowered_to),
            Part {
                weights,
                gradient: payload::in_place(gradient),
                slots,
                ahead: None,
            },
        );
    }

    /// Returns the slots of a range of elements, taken from `before`, or else from the slots that are held now. If
    /// `prepared`, returns the slots as they are after the prepared update. The slots of an element follow each other.
    /// Elements that are not held have slots of 0.
    ///
    /// # Errors
    /// candle's.
    pub fn slots(
        &self,
        variables: &Variables,
        before: Option<&HeldSlots>,
        range: &Range<usize>,
        prepared: bool,
    ) -> Result<Vec<f32>, VariablesError> {
        let held = before.unwrap_or(&self.held);
        let update = held.prepared.as_ref().filter(|_| prepared);
        let Some(update) = update else {
            return Ok(self.places.slots(&held.parts, range));
        };
        let mut parts = Vec::new();
        let all = held.parts.iter().enumerate();
        for (number, part) in all.filter(|(_, part)| part.has_some_of(range)) {
            let mut part = part.clone();
            let mut weights = match &update.weights {
                Some(weights) => weights[number].clone(),
                None => weights_of(variables, &part)?,
            };
            let mut gradient = update.gradients[number].clone();
            let mut slots = std::mem::take(&mut part.slots);
            let of = (update.after, update.lowered_to);
            self.apply(&part, of, &mut gradient, &mut weights, &mut slots);
            part.slots = slots;
            parts.push(part);
        }
        Ok(self.places.slots(&parts, range))
    }

    /// Holds the elements of these ranges from now on. `slots` has the slots of each range; without it, the slots are
    /// initial. Returns the slots that were held before, with their prepared update.
    ///
    /// # Errors
    /// [`VariablesError::Range`] if slots are missing, or candle's.
    pub fn hold(
        &mut self,
        variables: &Variables,
        ranges: &[Range<usize>],
        slots: Option<&[Vec<f32>]>,
    ) -> Result<HeldSlots, VariablesError> {
        let mut parts = self.places.parts(ranges);
        for (range, slots) in ranges.iter().zip(slots.into_iter().flatten()) {
            check_length(slots.len(), self.places.slots_in(range))?;
            self.places.take(&mut parts, range, slots);
        }
        // The weights may be overwritten as long as the slots before are wanted.
        self.keep_weights(variables)?;
        let held = HeldSlots {
            parts,
            prepared: None,
        };
        Ok(std::mem::replace(&mut self.held, held))
    }

    /// Forgets the slots and the number of updates.
    pub fn forget(&mut self) {
        (self.held, self.updates) = (HeldSlots::default(), 0);
        self.on_device = None;
    }

    /// Returns the state that all replicas have in common: the values of all variables, frozen ones too; then, variable
    /// by variable, the slots, unless the job shares them out, and the moving averages.
    ///
    /// # Errors
    /// candle's.
    pub fn state(&mut self, variables: &Variables) -> Result<Vec<f32>, VariablesError> {
        self.copy_from_device()?;
        match self.shares_slots {
            true => self.state_of(variables, &[]),
            false => self.state_of(variables, &self.held.parts),
        }
    }

    /// Returns the values of all variables, `slots` as the slots of all elements, and the moving averages, in the same
    /// order as [`Self::state`] does in a job that does not share out the slots.
    ///
    /// # Errors
    /// [`VariablesError::Range`] if `slots` has the wrong length, or candle's.
    pub fn state_with(
        &self,
        variables: &Variables,
        slots: Vec<f32>,
    ) -> Result<Vec<f32>, VariablesError> {
        let all = 0..self.places.all();
        check_length(slots.len(), self.places.slots_in(&all))?;
        let mut whole = self.places.whole();
        self.places.take(&mut whole, &all, &slots);
        drop(slots);
        self.state_of(variables, &whole)
    }

    fn state_of(
        &self,
        variables: &Variables,
        held: &[SlotPart],
    ) -> Result<Vec<f32>, VariablesError> {
        let mut state = Vec::new();
        for (_, var) in &variables.0 {
            state.extend(elements(var)?);
        }
        for (number, averages) in self.averages.iter().enumerate() {
            let parts = held.iter().filter(|part| part.variable == number);
            parts.for_each(|part| state.extend_from_slice(&part.slots));
            state.extend_from_slice(averages);
        }
        Ok(state)
    }

    /// Takes over the state of another replica after `updates` updates. In a job that shares out the slots, `state` has
    /// either all slots, which are held from now on, or none, and the held slots stay. Returns whether `state` has
    /// slots.
    ///
    /// # Errors
    /// [`VariablesError::Range`] if `state` has the wrong length, or candle's.
    pub fn set_state(
        &mut self,
        variables: &Variables,
        state: &[f32],
        updates: u64,
    ) -> Result<bool, VariablesError> {
        let values: usize = variables.0.iter().map(|(spec, _)| spec.elements()).sum();
        let averages: usize = self.averages.iter().map(Vec::len).sum();
        let slots = self.places.slots_in(&(0..self.places.all()));
        let has_slots = state.len() != values + averages || slots == 0;
        if has_slots {
            check_length(state.len(), values + slots + averages)?;
        }
        let mut whole = match has_slots {
            true => self.places.whole(),
            false => Vec::new(),
        };
        self.keep_weights(variables)?;
        self.leave_device()?;
        let mut rest = state;
        let mut fill = |numbers: &mut [f32]| {
            let (taken, left) = rest.split_at(numbers.len());
            rest = left;
            numbers.copy_from_slice(taken);
        };
        for (spec, var) in &variables.0 {
            let mut values = vec![0.0; spec.elements()];
            fill(&mut values);
            overwrite(var, values)?;
        }
        for (number, averages) in self.averages.iter_mut().enumerate() {
            let parts = whole.iter_mut();
            for part in parts.filter(|part| part.variable == number) {
                fill(&mut part.slots);
            }
            fill(averages);
        }
        if has_slots {
            self.held = HeldSlots {
                parts: whole,
                prepared: None,
            };
        }
        self.updates = updates;
        Ok(has_slots)
    }

    /// Copies the weights on which the prepared update depends, before the variables are overwritten.
    fn keep_weights(&mut self, variables: &Variables) -> Result<(), VariablesError> {
        if let Some(prepared) = &mut self.held.prepared
            && prepared.weights.is_none()
        {
            let parts = self.held.parts.iter();
            let weights = parts.map(|part| weights_of(variables, part));
            prepared.weights = Some(weights.collect::<Result<_, _>>()?);
        }
        Ok(())
    }

    /// Exchanges the weights and their moving averages, if the job keeps averages.
    ///
    /// # Errors
    /// candle's.
    pub fn swap_averages(&mut self, variables: &Variables) -> Result<(), VariablesError> {
        self.leave_device()?;
        for ((_, var), averages) in variables.0.iter().zip(&mut self.averages) {
            if !averages.is_empty() {
                let weights = elements(var)?;
                overwrite(var, std::mem::replace(averages, weights))?;
            }
        }
        Ok(())
    }
}

/// Returns whether updates change a variable.
fn changes(spec: &VariableSpec) -> bool {
    spec.kind.takes_updates()
}

/// Returns the weights of a part.
fn weights_of(variables: &Variables, part: &SlotPart) -> candle_core::Result<Vec<f32>> {
    let (_, var) = &variables.0[part.variable];
    let weights: Tensor = var.flatten_all()?;
    elements(&weights.narrow(0, part.within.start, part.within.len())?)
}

fn check_length(found: usize, expected: usize) -> Result<(), VariablesError> {
    match found == expected {
        true => Ok(()),
        false => Err(VariablesError::Range(format!(
            "there are {found} numbers where the model has {expected}"
        ))),
    }
}
