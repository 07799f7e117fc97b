//! An optimizer's slots in a device's memory, and the updates that use them.

use candle_core::{Result, Tensor};
use optimizer::{Update, VariableRule};

use super::gradients::DeviceGradients;
use super::rules::updated;
use super::{Group, UpdateGroups};
use crate::memory::elements;
use crate::set::Variables;

/// An optimizer's slots in a device's memory, and the moving averages.
#[derive(Debug)]
pub(crate) struct DeviceSlots(Vec<GroupSlots>);

#[derive(Debug)]
struct GroupSlots {
    slots: Vec<Tensor>,
    averages: Option<Tensor>,
}

impl DeviceSlots {
    /// Copies slots and moving averages to the device. `of` returns the slots and the averages of a variable.
    pub(crate) fn upload<'a>(
        groups: &UpdateGroups,
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

    /// Copies slots and moving averages to the host. Calls `to` for each variable with its number, the index of a slot,
    /// or `None` for the moving averages, and the values.
    pub(crate) fn download(
        &self,
        groups: &UpdateGroups,
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
    pub(crate) fn update(
        &mut self,
        groups: &UpdateGroups,
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

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};
    use candle_nn::Init;
    use shared_proto::blocks::VariableKind;
    use shared_proto::job::Job;

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
            let groups = UpdateGroups::new(&job, &variables);
            let rules = variables.0.iter();
            let rules: Vec<_> = rules
                .map(|(spec, _)| VariableRule::new(&job, spec, 9))
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
