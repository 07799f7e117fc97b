//! Models that are chains of blocks, which can be cut into stages on different devices.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Device, Result, Shape, Tensor, bail};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use parking_lot::Mutex;

use super::pass::Pass;
use super::{Batch, Model};

/// The stages into which a model's blocks are cut. Each stage has consecutive blocks, and the numbers of blocks of any
/// two stages differ by at most one. By default there is one stage, and blocks have no effect.
#[derive(Clone, Debug, Default)]
pub struct Stages {
    /// The device of each stage; empty by default.
    devices: Vec<Device>,
    asked: Arc<Mutex<Asked>>,
}

/// The blocks and variables that a model has asked for while it was built.
#[derive(Debug, Default)]
struct Asked {
    /// The number of the model's blocks; `None` if the model has not asked for the variables of a block.
    blocks: Option<usize>,
    /// The stage of each variable.
    variables: BTreeMap<String, usize>,
}

impl Stages {
    /// Returns one stage for each of these devices, in the order of the blocks.
    #[doc(hidden)]
    pub fn on(devices: Vec<Device>) -> Self {
        Self {
            devices,
            asked: Arc::default(),
        }
    }

    /// Returns the number of stages.
    #[doc(hidden)]
    pub fn count(&self) -> usize {
        self.devices.len().max(1)
    }

    /// Returns the device of each stage; an empty slice by default.
    #[doc(hidden)]
    pub fn devices(&self) -> &[Device] {
        &self.devices
    }

    /// Returns the indices of the blocks in a stage, for a model of `blocks` blocks.
    #[doc(hidden)]
    pub fn blocks_of(&self, stage: usize, blocks: usize) -> Range<usize> {
        let stages = self.count();
        // Block `b` is in stage `b * stages / blocks`, rounded down.
        let first = |stage: usize| (stage * blocks).div_ceil(stages);
        first(stage)..first(stage + 1)
    }

    /// Returns the variables for block `block` of `of` blocks, on the device of the block's stage.
    pub(super) fn block<'v>(
        &self,
        block: usize,
        of: usize,
        vars: &VarBuilder<'v>,
    ) -> Result<VarBuilder<'v>> {
        if block >= of {
            bail!("there is no block {block} of {of}; the first one is block 0");
        }
        let mut asked = self.asked.lock();
        if let Some(before) = asked.blocks.replace(of)
            && before != of
        {
            bail!(
                "a model asks for variables of a block of {before} and of a block of {of}; it has one number of blocks"
            );
        }
        let stages = self.count();
        if stages == 1 {
            return Ok(vars.clone());
        }
        if stages > of {
            bail!(
                "it is a chain of {of} blocks, too few for {stages} stages; set strategy.stages to at most {of} (without it, each device has a stage), or make the model deeper"
            );
        }
        let stage = block * stages / of;
        let noted = Noted {
            vars: vars.clone(),
            stage,
            asked: Arc::clone(&self.asked),
        };
        let device = self.devices[stage].clone();
        Ok(VarBuilder::from_backend(
            Box::new(noted),
            vars.dtype(),
            device,
        ))
    }

    /// Returns the model's number of blocks, and the stage of each variable that the model has asked for. The number is
    /// `None` if the model has not asked for the variables of a block.
    #[doc(hidden)]
    pub fn asked(&self) -> (Option<usize>, BTreeMap<String, usize>) {
        let asked = self.asked.lock();
        (asked.blocks, asked.variables.clone())
    }
}

/// Variables whose stage is recorded when the model asks for them.
struct Noted<'v> {
    vars: VarBuilder<'v>,
    stage: usize,
    asked: Arc<Mutex<Asked>>,
}

impl Noted<'_> {
    fn note(&self, name: &str) -> Result<()> {
        let prefix = self.vars.prefix();
        let full = match prefix.is_empty() {
            true => name.to_owned(),
            false => format!("{prefix}.{name}"),
        };
        let mut asked = self.asked.lock();
        let stage = *asked.variables.entry(full).or_insert(self.stage);
        if stage != self.stage {
            bail!(
                "variable {name:?} is asked for in stage {stage} and in stage {}, but lives on one device; let one block use it, or use fewer stages",
                self.stage
            );
        }
        Ok(())
    }
}

impl SimpleBackend for Noted<'_> {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        init: Init,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        self.note(name)?;
        let there = self.vars.clone().set_device(device.clone());
        there.get_with_hints_dtype(shape, name, init, dtype)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        self.note(name)?;
        let there = self.vars.clone().set_device(device.clone());
        there.get_unchecked_dtype(name, dtype)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.vars.contains_tensor(name)
    }
}

/// Computes the blocks of a model one after another, and returns the outputs of the last block. A model with several
/// blocks calls this in [`Model::forward`].
///
/// # Errors
/// Those of the blocks.
pub fn forward_blocks(model: &(impl Model + ?Sized), batch: &Batch, pass: &Pass) -> Result<Tensor> {
    let number = pass.next_batch();
    let mut x = model.forward_block(0, None, batch, &pass.of_block(0, number))?;
    for block in 1..model.blocks() {
        x = model.forward_block(block, Some(&x), batch, &pass.of_block(block, number))?;
    }
    Ok(x)
}
