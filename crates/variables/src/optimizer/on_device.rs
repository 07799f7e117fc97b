//! Updates in a device's memory. Slots and averages stay there until they are wanted on the host.

use std::collections::BTreeMap;
use std::sync::Arc;

use optimizer::VariableRule;

use super::LocalOptimizer;
use crate::error::VariablesError;
use crate::on_device::{DeviceGradients, DeviceSlots, UpdateGroups};
use crate::set::Variables;

/// Slots and averages in a device's memory.
pub(super) struct OnDevice {
    groups: Arc<UpdateGroups>,
    slots: DeviceSlots,
    /// True if the slots and averages on the host are out of date.
    newer: bool,
}

impl LocalOptimizer {
    /// Updates the variables by gradients in their device's memory. The slots stay there until they are wanted on the host.
    ///
    /// # Errors
    /// [`VariablesError::Range`] if the job shares out its slots, or candle's.
    pub fn update_on_device(
        &mut self,
        variables: &Variables,
        groups: &Arc<UpdateGroups>,
        gradients: DeviceGradients,
    ) -> Result<(), VariablesError> {
        if self.shares_slots {
            let problem = "slots that are shared out are updated on the host";
            return Err(VariablesError::Range(problem.to_owned()));
        }
        self.check_whole()?;
        let mut on_device = match self.on_device.take() {
            Some(on_device) => on_device,
            None => self.upload(variables, groups)?,
        };
        let (updates, lowered_to) = (self.updates, self.lowered_to);
        let update_of = |rule: &VariableRule| rule.update_after(updates, lowered_to);
        let rules = (variables, &self.rules[..]);
        on_device.newer = true;
        on_device
            .slots
            .update(groups, rules, update_of, gradients)?;
        self.on_device = Some(on_device);
        self.updates += 1;
        Ok(())
    }

    fn upload(
        &self,
        variables: &Variables,
        groups: &Arc<UpdateGroups>,
    ) -> Result<OnDevice, VariablesError> {
        let parts = self.held.parts.iter();
        let parts: BTreeMap<usize, &[f32]> =
            parts.map(|part| (part.variable, &part.slots[..])).collect();
        let of = |number: usize| {
            let slots = parts.get(&number).copied().unwrap_or_default();
            (slots, &self.averages[number][..])
        };
        Ok(OnDevice {
            slots: DeviceSlots::upload(groups, variables, &self.rules, of)?,
            groups: Arc::clone(groups),
            newer: false,
        })
    }

    /// Copies slots and averages from the device, if those on the host are older.
    pub(super) fn copy_from_device(&mut self) -> Result<(), VariablesError> {
        let Some(on_device) = self.on_device.as_mut().filter(|slots| slots.newer) else {
            return Ok(());
        };
        let parts = self.held.parts.iter_mut();
        let mut parts: BTreeMap<usize, &mut [f32]> = parts
            .map(|part| (part.variable, &mut part.slots[..]))
            .collect();
        let averages = &mut self.averages;
        let to = |number: usize, slot: Option<usize>, values: &[f32]| match slot {
            None => averages[number].copy_from_slice(values),
            Some(slot) => {
                if let Some(slots) = parts.get_mut(&number) {
                    slots[slot * values.len()..][..values.len()].copy_from_slice(values);
                }
            }
        };
        on_device.slots.download(&on_device.groups, to)?;
        on_device.newer = false;
        Ok(())
    }

    /// Moves slots and averages back to the host.
    pub(super) fn leave_device(&mut self) -> Result<(), VariablesError> {
        self.copy_from_device()?;
        self.on_device = None;
        Ok(())
    }

    pub(super) fn check_whole(&self) -> Result<(), VariablesError> {
        match self.places.is_whole(&self.held.parts) {
            true => Ok(()),
            false => Err(VariablesError::Range(
                "this replica has the slots of some elements alone".to_owned(),
            )),
        }
    }
}
