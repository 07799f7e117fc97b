//! A model of your own, with the whole command line of Flambeau around it:
//!
//!     cargo run --release --example own_model -- train --model residual
//!     cargo run --release --example own_model -- worker --coordinator HOST:7070

use std::process::ExitCode;

use flambeau::candle_core::{Result, Tensor};
use flambeau::candle_nn::{self, Linear, Module, VarBuilder};
use flambeau::{App, Batch, Model, Pass, Setup};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// A residual network: each block adds to what it is given.
struct Residual {
    entry: Linear,
    blocks: Vec<Linear>,
    exit: Linear,
}

impl Model for Residual {
    fn new(setup: &Setup, vars: VarBuilder) -> Result<Self> {
        // Settings of the model's own stand under `options` in the job's [model].
        let depth = setup
            .settings
            .options
            .get("depth")
            .and_then(|d| d.as_integer());
        let block = |i| candle_nn::linear(64, 64, vars.pp(format!("block.{i}")));
        Ok(Self {
            entry: candle_nn::linear(setup.features()?, 64, vars.pp("entry"))?,
            blocks: (0..depth.unwrap_or(3)).map(block).collect::<Result<_>>()?,
            exit: candle_nn::linear(64, setup.outputs(), vars.pp("exit"))?,
        })
    }

    fn forward(&self, batch: &Batch, _: &Pass) -> Result<Tensor> {
        let mut x = self.entry.forward(&batch.input()?.flatten_from(1)?)?;
        for block in &self.blocks {
            x = (&x + block.forward(&x.silu()?)?)?;
        }
        self.exit.forward(&x)
    }
}

fn main() -> ExitCode {
    App::new().model::<Residual>("residual").main()
}
