//! Gradients and updates that stay in the memory of a device. Variables with the same rule are updated together, as one vector: a GPU takes
//! nearly as long for a small operation as for a large one.

use std::collections::BTreeMap;
use std::ops::Range;

use candle_core::backprop::GradStore;
use candle_core::{DType, Result, Tensor, Var, bail};
use optimizer::{Update, VariableRule};
use shared_proto::blocks::{VariableKind, VariableSpec};
use shared_proto::job::{Clip, Ftrl, Job, Optimizer};
use shared_proto::payload::Elements;

use super::error::VariablesError;
use super::memory::elements;
use super::set::Variables;

/// The number of elements from which on a group takes no more variables. An update needs memory for several vectors of a group.
const ELEMENTS: usize = 1 << 24;

/// The number of elements that are added up together.
const PER_SUM: usize = 1024;

/// The groups in which variables are updated. Frozen variables are in none.
#[derive(Debug)]
pub struct DeviceGroups(Vec<Group>);

/// Variables that are updated together.
#[derive(Debug)]
struct Group {
    /// Their numbers, in ascending order.
    variables: Vec<usize>,
    /// The elements of each in the group's vectors.
    places: Vec<Range<usize>>,
    kind: VariableKind,
}

impl DeviceGroups {
    /// Returns the groups of a job's variables.
    pub fn of(job: &Job, variables: &Variables) -> Self {
        Self::of_size(job, variables, ELEMENTS)
    }

    /// Returns groups that take no more variables once they have `most` elements.
    pub fn of_size(job: &Job, variables: &Variables, most: usize) -> Self {
        let mut groups: Vec<(VariableRule, Group)> = Vec::new();
        for (number, (spec, _)) in variables.0.iter().enumerate() {
            if !spec.kind.takes_updates() {
                continue;
            }
            let rule = VariableRule::of(job, spec, 0);
            let fits = |(other, joined): &(VariableRule, Group)| {
                rule.is_like(other) && joined.elements() < most
            };
            let place = match groups.iter().position(fits) {
                Some(place) => place,
                None => {
                    let (variables, places) = (Vec::new(), Vec::new());
                    let group = Group {
                        variables,
                        places,
                        kind: spec.kind,
                    };
                    groups.push((rule, group));
                    groups.len() - 1
                }
            };
            let (_, group) = &mut groups[place];
            let start = group.elements();
            group.variables.push(number);
            group.places.push(start..start + spec.elements());
        }
        Self(groups.into_iter().map(|(_, group)| group).collect())
    }
}

impl Group {
    fn elements(&self) -> usize {
        self.places.last().map_or(0, |last| last.end)
    }

    /// Returns the variables' tensors as one vector, without the operations that made them: slots that knew these would keep the tensors of
    /// all steps before.
    fn join(&self, tensor: impl Fn(usize) -> Result<Tensor>) -> Result<Tensor> {
        let flat = |number: &usize| tensor(*number)?.detach().flatten_all();
        let flat: Vec<Tensor> = self.variables.iter().map(flat).collect::<Result<_>>()?;
        Tensor::cat(&flat, 0)
    }

    /// Returns the elements of each variable in one of the group's vectors.
    fn split<'a>(
        &'a self,
        vector: &'a Tensor,
    ) -> impl Iterator<Item = (usize, Result<Tensor>)> + 'a {
        let places = self.variables.iter().zip(&self.places);
        places.map(|(number, place)| (*number, vector.narrow(0, place.start, place.len())))
    }
}

/// The values, before a step, of the variables that a model changes while it computes, in the device's memory.
#[derive(Debug)]
pub(crate) struct MeasuredOnDevice(Vec<Option<Tensor>>);

impl Variables {
    /// Returns copies of the variables that a model changes while it computes.
    ///
    /// # Errors
    /// candle's.
    pub(crate) fn measured_on_device(&self) -> Result<MeasuredOnDevice> {
        let copy = |(_, var, measured): (&VariableSpec, &Var, bool)| match measured {
            true => var.as_detached_tensor().copy().map(Some),
            false => Ok(None),
        };
        self.each()
            .map(copy)
            .collect::<Result<_>>()
            .map(MeasuredOnDevice)
    }

    /// Gives the variables that the model has changed their values of before. Returns the changes of averaged ones, before minus after.
    ///
    /// # Errors
    /// candle's.
    pub(crate) fn restore_on_device(
        &self,
        before: &MeasuredOnDevice,
    ) -> Result<BTreeMap<usize, Tensor>> {
        let mut changes = BTreeMap::new();
        for (number, ((spec, var, _), before)) in self.each().zip(&before.0).enumerate() {
            if spec.kind == VariableKind::Averaged {
                let change = match before {
                    Some(before) => (before - var.as_detached_tensor())?,
                    None => var.zeros_like()?,
                };
                changes.insert(number, change);
            }
            if let Some(before) = before {
                var.set(before)?;
            }
        }
        Ok(changes)
    }
}

/// The gradients of a step in a device's memory, a vector for each group. Those of averaged variables are their changes.
#[derive(Clone, Debug)]
pub struct DeviceGradients(Vec<Tensor>);

impl DeviceGradients {
    /// Takes the gradients of trained variables out of `store`. `changes` has those of averaged variables.
    ///
    /// # Errors
    /// [`VariablesError::NoGradient`] names a trained variable that has none, or candle's.
    pub(crate) fn of(
        groups: &DeviceGroups,
        variables: &Variables,
        store: &GradStore,
        changes: &BTreeMap<usize, Tensor>,
    ) -> std::result::Result<Self, VariablesError> {
        let each = groups.0.iter().flat_map(|group| &group.variables);
        for number in each {
            let (spec, var) = &variables.0[*number];
            if spec.kind.is_optimized() && store.get(var).is_none() {
                return Err(VariablesError::NoGradient {
                    variable: spec.clone(),
                });
            }
        }
        let gradient = |number: usize| {
            let (_, var) = &variables.0[number];
            let found = changes.get(&number).or_else(|| store.get(var));
            found.map_or_else(|| var.zeros_like(), |found| Ok(found.clone()))
        };
        let vectors = groups.0.iter().map(|group| group.join(gradient));
        Ok(Self(vectors.collect::<Result<_>>()?))
    }

    /// Returns gradients from the host: a vector for each variable, by its number. Those of frozen variables may be empty.
    ///
    /// # Errors
    /// candle's.
    pub fn from_host(
        groups: &DeviceGroups,
        variables: &Variables,
        gradients: &[Vec<f32>],
    ) -> Result<Self> {
        let gradient = |number: usize| {
            let (_, var) = &variables.0[number];
            Tensor::from_slice(&gradients[number], gradients[number].len(), var.device())
        };
        let vectors = groups.0.iter().map(|group| group.join(gradient));
        vectors.collect::<Result<_>>().map(Self)
    }

    /// Returns zeros.
    ///
    /// # Errors
    /// candle's.
    pub(crate) fn zeros(groups: &DeviceGroups, variables: &Variables) -> Result<Self> {
        let zeros = |group: &Group| {
            let device = variables.0[group.variables[0]].1.device();
            Tensor::zeros(group.elements(), DType::F32, device)
        };
        groups.0.iter().map(zeros).collect::<Result<_>>().map(Self)
    }

    /// Calls `act` with each vector. All replicas have the same ones, in the same order.
    ///
    /// # Errors
    /// Those of `act`.
    pub(crate) fn each(&self, act: impl Fn(&Tensor) -> Result<()>) -> Result<()> {
        self.0.iter().try_for_each(act)
    }

    /// Returns the gradients, each times a factor.
    ///
    /// # Errors
    /// candle's.
    pub(crate) fn times(self, factor: f64) -> Result<Self> {
        let vectors = self.0.into_iter();
        let vectors = vectors.map(|vector| vector.affine(factor, 0.0));
        vectors.collect::<Result<_>>().map(Self)
    }

    /// Returns the norm of trained variables' gradients and of those of rows, given the sum of the squares of the latter.
    pub(crate) fn norm(&self, groups: &DeviceGroups, squares_of_rows: f64) -> Result<f64> {
        let mut sum: Option<Tensor> = None;
        for (group, vector) in groups.0.iter().zip(&self.0) {
            if group.kind.is_optimized() {
                let squares = sum_of_squares(vector)?;
                sum = Some(match sum {
                    Some(sum) => (sum + squares)?,
                    None => squares,
                });
            }
        }
        // A single number is read, because each read waits for the GPU.
        let squares = sum.map_or(Ok(0.0), |sum| sum.to_scalar::<f64>())?;
        Ok((squares + squares_of_rows).sqrt())
    }

    /// Limits the gradients of trained variables, which have this norm together with those of rows. Gradients with a norm that is not finite
    /// stay, to be found.
    pub(crate) fn clipped(self, groups: &DeviceGroups, clip: Clip, norm: f64) -> Result<Self> {
        if !norm.is_finite() {
            return Ok(self);
        }
        let (mut limited, mut norm) = (self, norm);
        if let Some(most) = clip.value.map(f64::from) {
            limited = limited.of_trained(groups, |vector| vector.clamp(-most, most))?;
            norm = limited.norm(groups, 0.0)?;
        }
        match clip.norm.map(f64::from).filter(|most| norm > *most) {
            Some(most) => limited.of_trained(groups, |vector| vector.affine(most / norm, 0.0)),
            None => Ok(limited),
        }
    }

    fn of_trained(
        self,
        groups: &DeviceGroups,
        act: impl Fn(&Tensor) -> Result<Tensor>,
    ) -> Result<Self> {
        let pairs = groups.0.iter().zip(self.0);
        let acted = pairs.map(|(group, vector)| match group.kind.is_optimized() {
            true => act(&vector),
            false => Ok(vector),
        });
        acted.collect::<Result<_>>().map(Self)
    }

    /// Returns the gradients of all variables on the host, empty for frozen ones.
    pub(crate) fn on_host(&self, groups: &DeviceGroups, variables: usize) -> Result<Vec<Elements>> {
        let mut values = vec![Vec::new(); variables];
        for (group, vector) in groups.0.iter().zip(&self.0) {
            for (number, part) in group.split(vector) {
                values[number] = elements(&part?)?;
            }
        }
        Ok(values.into_iter().map(Elements::from).collect())
    }
}

/// Returns the sum of the squares of a vector, of type `f64`: squares may not fit into `f32`.
fn sum_of_squares(vector: &Tensor) -> Result<Tensor> {
    let mut sum = Tensor::zeros((), DType::F64, vector.device())?;
    let length = vector.elem_count();
    for start in (0..length).step_by(ELEMENTS) {
        let part = vector.narrow(0, start, ELEMENTS.min(length - start))?;
        let squares = part.to_dtype(DType::F64)?.sqr()?;
        // A GPU computes many sums of few elements faster than one of many.
        let of_rows = part.elem_count() - part.elem_count() % PER_SUM;
        if of_rows > 0 {
            let rows = squares.narrow(0, 0, of_rows)?;
            let sums = rows.reshape((of_rows / PER_SUM, PER_SUM))?.sum(1)?;
            sum = (sum + sums.sum_all()?)?;
        }
        if of_rows < part.elem_count() {
            let rest = squares.narrow(0, of_rows, part.elem_count() - of_rows)?;
            sum = (sum + rest.sum_all()?)?;
        }
    }
    Ok(sum)
}

/// An optimizer's slots in a device's memory, and the moving averages.
#[derive(Debug)]
pub(super) struct DeviceSlots(Vec<GroupSlots>);

#[derive(Debug)]
struct GroupSlots {
    slots: Vec<Tensor>,
    averages: Option<Tensor>,
}

impl DeviceSlots {
    /// Copies slots to the device. `of` returns those of a variable.
    pub(super) fn upload<'a>(
        groups: &DeviceGroups,
        variables: &Variables,
        rules: &[VariableRule],
        of: impl Fn(usize) -> (&'a [f32], &'a [f32]),
    ) -> Result<Self> {
        let upload = |group: &Group| {
            let rule = &rules[group.variables[0]];
            let slot = |slot: usize| {
                group.join(|number| {
                    let (spec, var) = &variables.0[number];
                    let length = spec.elements();
                    let slots = &of(number).0[slot * length..][..length];
                    Tensor::from_slice(slots, length, var.device())
                })
            };
            let averages = |number: usize| {
                let averages = of(number).1;
                Tensor::from_slice(averages, averages.len(), variables.0[number].1.device())
            };
            let averages = rule.has_averages().then(|| group.join(averages));
            Ok(GroupSlots {
                slots: (0..rule.rule_slots().count)
                    .map(slot)
                    .collect::<Result<_>>()?,
                averages: averages.transpose()?,
            })
        };
        groups.0.iter().map(upload).collect::<Result<_>>().map(Self)
    }

    /// Copies the slots to the host. `to` takes those of a variable: the number of the slot, none for the moving average, and the values.
    pub(super) fn download(
        &self,
        groups: &DeviceGroups,
        mut to: impl FnMut(usize, Option<usize>, &[f32]),
    ) -> Result<()> {
        for (group, own) in groups.0.iter().zip(&self.0) {
            let slots = own.slots.iter().enumerate();
            let slots = slots.map(|(slot, vector)| (Some(slot), vector));
            for (slot, vector) in slots.chain(own.averages.iter().map(|vector| (None, vector))) {
                let values = elements(vector)?;
                for (number, place) in group.variables.iter().zip(&group.places) {
                    to(*number, slot, &values[place.clone()]);
                }
            }
        }
        Ok(())
    }

    /// Updates the variables by gradients. `update_of` returns the parameters of an update by a rule.
    pub(super) fn update(
        &mut self,
        groups: &DeviceGroups,
        (variables, rules): (&Variables, &[VariableRule]),
        update_of: impl Fn(&VariableRule) -> Update,
        gradients: DeviceGradients,
    ) -> Result<()> {
        let own = self.0.iter_mut().zip(gradients.0);
        for (group, (own, gradient)) in groups.0.iter().zip(own) {
            let rule = &rules[group.variables[0]];
            let update = update_of(rule);
            let weights = group.join(|number| Ok(variables.0[number].1.as_tensor().clone()))?;
            let weights = updated(rule.optimizer(), update, &weights, gradient, &mut own.slots)?;
            for (number, part) in group.split(&weights) {
                let (_, var) = &variables.0[number];
                var.set(&part?.reshape(var.shape())?)?;
            }
            if let (Some(averages), Some(decay)) = (&mut own.averages, rule.ema_decay()) {
                *averages = match update.number {
                    1 => weights,
                    _ => (&*averages + ((weights - &*averages)? * f64::from(1.0 - decay))?)?,
                };
            }
        }
        Ok(())
    }
}

/// Returns new weights, and updates their slots. The formulas are those of the crate `optimizer`.
fn updated(
    optimizer: &Optimizer,
    update: Update,
    weights: &Tensor,
    gradient: Tensor,
    slots: &mut [Tensor],
) -> Result<Tensor> {
    let rate = f64::from(update.learning_rate);
    let with_decay = |decay: f32| match decay {
        0.0 => Ok(gradient.clone()),
        decay => &gradient + (weights * f64::from(decay))?,
    };
    match (optimizer, slots) {
        (Optimizer::Sgd(own), []) => weights - (with_decay(own.weight_decay)? * rate)?,
        (Optimizer::Momentum(own), [velocity]) => {
            let gradient = with_decay(own.weight_decay)?;
            *velocity = ((&*velocity * f64::from(own.momentum))? + &gradient)?;
            let step = match own.nesterov {
                true => (gradient + (&*velocity * f64::from(own.momentum))?)?,
                false => velocity.clone(),
            };
            weights - (step * rate)?
        }
        (Optimizer::Adagrad(own), [sum]) => {
            let gradient = with_decay(own.weight_decay)?;
            *sum = (&*sum + gradient.sqr()?)?;
            let root = (sum.sqrt()? + f64::from(own.epsilon))?;
            weights - ((gradient * rate)? / root)?
        }
        (Optimizer::RmsProp(own), [square, velocity @ ..]) => {
            let gradient = with_decay(own.weight_decay)?;
            *square = mixed(square, own.alpha, &gradient.sqr()?)?;
            let step = (gradient / (square.sqrt()? + f64::from(own.epsilon))?)?;
            match velocity {
                [velocity] => {
                    *velocity = ((&*velocity * f64::from(own.momentum))? + step)?;
                    weights - (&*velocity * rate)?
                }
                _ => weights - (step * rate)?,
            }
        }
        (Optimizer::Adam(own), [mean, square]) => {
            let gradient = with_decay(own.weight_decay)?;
            let moments = (own.beta1, own.beta2, own.epsilon);
            weights - adam_step(update, moments, &gradient, (mean, square))?
        }
        (Optimizer::AdamW(own), [mean, square]) => {
            let moments = (own.beta1, own.beta2, own.epsilon);
            let step = adam_step(update, moments, &gradient, (mean, square))?;
            let keep = 1.0 - update.learning_rate * own.weight_decay;
            (weights * f64::from(keep))? - step
        }
        (Optimizer::Ftrl(own), [sum, linear]) => {
            ftrl_weights(own, update.learning_rate, weights, &gradient, (sum, linear))
        }
        (other, slots) => bail!(
            "{} slots do not fit the optimizer {other:?}; this is a fault of the program, please report it",
            slots.len()
        ),
    }
}

/// Returns `before` times `share`, and `new` times the rest.
fn mixed(before: &Tensor, share: f32, new: &Tensor) -> Result<Tensor> {
    (before * f64::from(share))? + (new * f64::from(1.0 - share))?
}

/// Returns by how much Adam lowers weights, and updates the means of gradients and of their squares.
fn adam_step(
    update: Update,
    (beta1, beta2, epsilon): (f32, f32, f32),
    gradient: &Tensor,
    (mean, square): (&mut Tensor, &mut Tensor),
) -> Result<Tensor> {
    let power = update.number.min(i32::MAX as u64) as i32;
    let lack = |beta: f32| 1.0 - f64::from(beta).powi(power);
    *mean = mixed(mean, beta1, gradient)?;
    *square = mixed(square, beta2, &gradient.sqr()?)?;
    let divisor = square
        .sqrt()?
        .affine(1.0 / lack(beta2).sqrt(), f64::from(epsilon))?;
    (&*mean * (f64::from(update.learning_rate) / lack(beta1)))? / divisor
}

/// Returns the weights that FTRL makes, and updates the sum of squares and the linear term.
fn ftrl_weights(
    own: &Ftrl,
    rate: f32,
    weights: &Tensor,
    gradient: &Tensor,
    (sum, linear): (&mut Tensor, &mut Tensor),
) -> Result<Tensor> {
    if rate == 0.0 {
        // The weights may be a variable's own memory.
        return weights.copy();
    }
    let (inverse, begin) = (f64::from(1.0 / rate), f64::from(own.initial_accumulator));
    let raised = |sum: &Tensor| (sum + begin)?.powf(-f64::from(own.learning_rate_power));
    let before = raised(sum)?;
    *sum = (&*sum + gradient.sqr()?)?;
    let after = raised(sum)?;
    let shrunk = (gradient + (weights * f64::from(2.0 * own.l2_shrinkage))?)?;
    let moved = ((&after - before)? * inverse)?.mul(weights)?;
    *linear = ((&*linear + shrunk)? - moved)?;
    let l1 = f64::from(own.l1);
    let l2 = own.l2 + own.beta / (2.0 * rate);
    let divisor = after.affine(inverse, f64::from(2.0 * l2))?;
    (linear.clamp(-l1, l1)? - &*linear)? / divisor
}

#[cfg(test)]
mod tests {
    use candle_core::Device;
    use candle_nn::Init;

    use super::*;

    /// Slots that knew the operations behind them would keep the tensors of all steps before.
    #[test]
    fn no_vector_knows_the_operations_that_made_it() {
        for optimizer in [
            "name = \"momentum\"\nweight_decay = 0.1",
            "name = \"adam\"\nweight_decay = 0.1",
            "name = \"ftrl\"",
        ] {
            let job = format!("ema_decay = 0.5\n[optimizer]\n{optimizer}\n");
            let job = Job::from_toml(&job).unwrap();
            let (init, device) = (Init::Const(0.5), Device::Cpu);
            let kind_of = VariableKind::by_name;
            let built = Variables::build::<_, candle_core::Error>(1, kind_of, &device, |vars| {
                let average = vars.pp("norm").get(3, "running_mean")?;
                Ok((vars.get_with_hints((3, 3), "a", init)?, average))
            });
            let (variables, (weight, _)) = built.unwrap();
            let groups = DeviceGroups::of(&job, &variables);
            let rules = variables.0.iter();
            let rules: Vec<_> = rules
                .map(|(spec, _)| VariableRule::of(&job, spec, 9))
                .collect();
            let zeros = [0.0; 27];
            let of = |number: usize| {
                let elements = variables.0[number].0.elements();
                let slots = rules[number].rule_slots().count * elements;
                (&zeros[..slots], &zeros[..elements])
            };
            let mut slots = DeviceSlots::upload(&groups, &variables, &rules, of).unwrap();
            for step in 0..3 {
                let before = variables.measured_on_device().unwrap();
                // candle's gradient of a direct operand knows its operations.
                let x = Tensor::ones((3, 3), DType::F32, &device).unwrap();
                let loss = x.matmul(&weight).unwrap().sqr().unwrap().sum_all().unwrap();
                let store = loss.backward().unwrap();
                let changes = variables.restore_on_device(&before).unwrap();
                let gradients = DeviceGradients::of(&groups, &variables, &store, &changes).unwrap();
                assert!(gradients.0.iter().all(|vector| !vector.track_op()));
                let update_of = |rule: &VariableRule| rule.update_after(step, 1.0);
                let rules = (&variables, &rules[..]);
                slots.update(&groups, rules, update_of, gradients).unwrap();
                let all = slots.0.iter();
                let mut all = all.flat_map(|own| own.slots.iter().chain(&own.averages));
                assert!(all.all(|vector| !vector.track_op()), "{optimizer}");
            }
        }
    }
}
