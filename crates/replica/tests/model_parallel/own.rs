//! Data and models of one's own.

use std::time::Duration;

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, bail};
use candle_nn::VarBuilder;
use model::input::{Column, DataSetup, Dataset, InMemory, InputError, Source, Values};
use model::{Batch, Model, Pass, Setup, forward_blocks};
use nn::Linear;
use rand::{RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Sequences of 6 vectors of 5 numbers, in 4 classes.
pub(crate) struct Sequences;

impl Source for Sequences {
    fn open(_: &DataSetup) -> std::result::Result<Dataset, InputError> {
        let mut random = ChaCha8Rng::seed_from_u64(3);
        let mut samples = |count: usize| {
            let mut values = vec![0; count * 30];
            random.fill_bytes(&mut values);
            let labels = (0..count).map(|_| random.next_u32() % 4).collect();
            let vectors = Column::bytes("vectors", vec![6, 5], values, 100.0);
            InMemory::new(vec![vectors], vec![Column::category("kind", labels, 4)])
        };
        Dataset::in_memory(samples(256)?, samples(32)?)
    }
}

/// Numbers, and any number of tags with weights, in 3 classes.
pub(crate) struct Tagged;

impl Source for Tagged {
    fn open(_: &DataSetup) -> std::result::Result<Dataset, InputError> {
        let mut random = ChaCha8Rng::seed_from_u64(4);
        let mut samples = |count: usize| {
            let mut values = vec![0; count * 3];
            random.fill_bytes(&mut values);
            let labels = (0..count).map(|_| random.next_u32() % 3).collect();
            let (mut tags, mut ends) = (Vec::new(), vec![0]);
            for _ in 0..count {
                // Some samples have none, sometimes all of a micro-batch.
                let own = (random.next_u32() % 4).saturating_sub(1);
                tags.extend((0..own).map(|_| i64::from(random.next_u32() % 9)));
                ends.push(tags.len());
            }
            let weights = tags.iter().map(|tag| 0.5 + *tag as f32).collect();
            let tags = Column::ragged("tags", Values::I64(tags), ends, Some(weights), Some(9));
            let numbers = Column::bytes("numbers", vec![3], values, 100.0);
            let kind = Column::category("kind", labels, 3);
            InMemory::new(vec![numbers, tags], vec![kind])
        };
        Dataset::in_memory(samples(256)?, samples(32)?)
    }
}

/// Returns the layers of a chain of this many blocks.
fn layers(setup: &Setup, blocks: usize, vars: &VarBuilder) -> Result<Vec<Linear>> {
    let mut width = setup.features()?;
    let mut layers = Vec::new();
    for block in 0..blocks {
        let next = if block + 1 < blocks {
            16
        } else {
            setup.outputs()
        };
        let vars = setup.block(block, blocks, vars)?;
        layers.push(Linear::new(width, next, vars.pp("layer").pp(block))?);
        width = next;
    }
    Ok(layers)
}

fn layer(layers: &[Linear], block: usize, x: Option<&Tensor>, batch: &Batch) -> Result<Tensor> {
    let x = match x {
        Some(x) => x.clone(),
        None => batch.input()?.flatten_from(1)?,
    };
    layers[block].forward(&x)?.tanh()
}

/// A model of one's own.
pub(crate) struct Chain(Vec<Linear>);

impl Model for Chain {
    fn new(setup: &Setup, vars: VarBuilder) -> Result<Self> {
        Ok(Self(layers(setup, 5, &vars.pp("own"))?))
    }

    fn forward(&self, batch: &Batch, pass: &Pass) -> Result<Tensor> {
        forward_blocks(self, batch, pass)
    }

    fn blocks(&self) -> usize {
        self.0.len()
    }

    fn forward_block(
        &self,
        block: usize,
        x: Option<&Tensor>,
        batch: &Batch,
        _: &Pass,
    ) -> Result<Tensor> {
        layer(&self.0, block, x, batch)
    }
}

/// A model with a block that fails, panics, or has outputs that are NaN.
pub(crate) struct Fails(Vec<Linear>, usize, Option<String>);

impl Model for Fails {
    fn new(setup: &Setup, vars: VarBuilder) -> Result<Self> {
        let options = &setup.settings.options;
        let at = options
            .get("at")
            .and_then(|at| at.as_integer())
            .unwrap_or(0);
        let instead = options.get("instead").and_then(|what| what.as_str());
        let instead = instead.map(str::to_owned);
        Ok(Self(layers(setup, 4, &vars)?, at as usize, instead))
    }

    fn forward(&self, batch: &Batch, pass: &Pass) -> Result<Tensor> {
        forward_blocks(self, batch, pass)
    }

    fn blocks(&self) -> usize {
        self.0.len()
    }

    fn forward_block(
        &self,
        block: usize,
        x: Option<&Tensor>,
        batch: &Batch,
        _: &Pass,
    ) -> Result<Tensor> {
        let outputs = layer(&self.0, block, x, batch)?;
        match self.2.as_deref() {
            _ if block != self.1 || batch.samples() != 3 => Ok(outputs),
            Some("panic") => panic!("the planted panic"),
            Some("nan") => outputs * f64::NAN,
            _ => bail!("the planted error"),
        }
    }
}

/// A chain with a variable that is in no block.
pub(crate) struct Astray(Chain);

impl Model for Astray {
    fn new(setup: &Setup, vars: VarBuilder) -> Result<Self> {
        Linear::new(2, 2, vars.pp("astray"))?;
        Chain::new(setup, vars).map(Self)
    }

    fn forward(&self, batch: &Batch, pass: &Pass) -> Result<Tensor> {
        self.0.forward(batch, pass)
    }

    fn blocks(&self) -> usize {
        self.0.blocks()
    }
}

/// A chain with a variable that is in two blocks.
pub(crate) struct Doubled;

impl Model for Doubled {
    fn new(setup: &Setup, vars: VarBuilder) -> Result<Self> {
        for block in 0..2 {
            Linear::new(2, 2, setup.block(block, 2, &vars)?.pp("layer"))?;
        }
        Ok(Self)
    }

    fn forward(&self, _: &Batch, _: &Pass) -> Result<Tensor> {
        bail!("it is never built")
    }
}

/// A chain in which the last block uses a variable of the first one too.
pub(crate) struct Tied(Vec<Linear>, Tensor);

impl Model for Tied {
    fn new(setup: &Setup, vars: VarBuilder) -> Result<Self> {
        let scale = setup.block(0, 4, &vars)?.get((1,), "scale")?;
        Ok(Self(layers(setup, 4, &vars)?, scale))
    }

    fn forward(&self, batch: &Batch, pass: &Pass) -> Result<Tensor> {
        forward_blocks(self, batch, pass)
    }

    fn blocks(&self) -> usize {
        self.0.len()
    }

    fn forward_block(
        &self,
        block: usize,
        x: Option<&Tensor>,
        batch: &Batch,
        _: &Pass,
    ) -> Result<Tensor> {
        let y = layer(&self.0, block, x, batch)?;
        match block {
            0 | 3 => y.broadcast_add(&self.1),
            _ => Ok(y),
        }
    }
}

/// A model that has several blocks according to itself, and does not say how to compute them.
pub(crate) struct Mute(Chain);

impl Model for Mute {
    fn new(setup: &Setup, vars: VarBuilder) -> Result<Self> {
        Chain::new(setup, vars).map(Self)
    }

    fn forward(&self, batch: &Batch, pass: &Pass) -> Result<Tensor> {
        forward_blocks(self, batch, pass)
    }

    fn blocks(&self) -> usize {
        self.0.blocks()
    }
}

/// Four equal blocks, which sleep in both directions.
pub(crate) struct Sleepy(Vec<Linear>);

/// The time that a block of [`Sleepy`] takes for a micro-batch.
pub(crate) const FORWARD: Duration = Duration::from_millis(5);
pub(crate) const BACKWARD: Duration = Duration::from_millis(10);

impl Model for Sleepy {
    fn new(setup: &Setup, vars: VarBuilder) -> Result<Self> {
        layers(setup, 4, &vars).map(Self)
    }

    fn forward(&self, batch: &Batch, pass: &Pass) -> Result<Tensor> {
        forward_blocks(self, batch, pass)
    }

    fn blocks(&self) -> usize {
        self.0.len()
    }

    fn forward_block(
        &self,
        block: usize,
        x: Option<&Tensor>,
        batch: &Batch,
        _: &Pass,
    ) -> Result<Tensor> {
        layer(&self.0, block, x, batch)?.apply_op1(Sleep)
    }
}

/// Returns its input.
struct Sleep;

impl CustomOp1 for Sleep {
    fn name(&self) -> &'static str {
        "sleep"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        std::thread::sleep(FORWARD);
        Ok((x.clone(), layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        std::thread::sleep(BACKWARD);
        Ok(Some(gradient.clone()))
    }
}
