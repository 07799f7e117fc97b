//! The update of a variable in candle's memory.

use std::cell::RefCell;

use candle_core::{CpuStorage, InplaceOp1, Layout};
use optimizer::{MOST_SLOTS, Part, Update, VariableRule};
use shared_proto::payload::LeF32;

use super::memory::numbers;

/// An update of a variable in its own memory.
pub(super) struct Apply<'a> {
    pub(super) rule: &'a VariableRule,
    pub(super) update: Update,
    pub(super) gradient: &'a [LeF32],
    pub(super) slots: RefCell<[&'a mut [f32]; MOST_SLOTS]>,
}

impl Apply<'_> {
    fn apply(&self, weights: &mut [f32]) {
        let mut slots = self.slots.borrow_mut();
        let part = Part {
            weights,
            gradient: self.gradient,
            slots: slots.each_mut().map(|slot| &mut **slot),
            ahead: None,
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
        let device = storage.device.clone();
        let memory = storage.as_cuda_slice_mut::<f32>()?;
        let mut part = memory.slice_mut(start..start + self.gradient.len());
        let mut weights = device.clone_dtoh(&part)?;
        self.apply(&mut weights);
        device.memcpy_htod(&weights, &mut part)
    }
}
