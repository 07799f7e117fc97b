//! The program under test: Flambeau's command line with models that misbehave on purpose. Environment variables, which
//! differ between workers, choose the faults.

#![allow(clippy::unwrap_used)]

use std::process::ExitCode;
use std::time::Duration;

use flambeau::candle_core::{Result, Tensor};
use flambeau::candle_nn::{self, Linear, Module, VarBuilder};
use flambeau::{App, Batch, Metrics, Model, Setup, classification_metrics};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// A linear model. Its step takes as many milliseconds as `TEST_STEP_MILLISECONDS` says, and 300 while the
/// file that `TEST_SLOW_WHILE` names exists. It computes NaN from step `TEST_NAN_AT` on, and panics at step
/// `TEST_PANIC_AT`. With `TEST_NO_MODEL` it cannot be built, nor by the process with the identity
/// `TEST_NO_MODEL_FOR`.
struct Odd {
    linear: Linear,
    step: std::cell::Cell<u64>,
}

fn told(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().unwrap())
}

impl Model for Odd {
    fn new(setup: &Setup, vars: VarBuilder) -> Result<Self> {
        let for_whom = std::env::var("TEST_NO_MODEL_FOR");
        let is_meant = for_whom.is_ok_and(|name| std::env::args().any(|a| a == name));
        if told("TEST_NO_MODEL").is_some() || is_meant {
            return Err(flambeau::candle_core::Error::msg("told to be none"));
        }
        let features = setup.sample_shape.iter().product();
        Ok(Self {
            linear: candle_nn::linear(features, setup.classes, vars.pp("line"))?,
            step: std::cell::Cell::new(0),
        })
    }

    fn loss(&self, batch: &Batch) -> Result<Tensor> {
        let step = self.step.replace(self.step.get() + 1);
        if let Some(milliseconds) = told("TEST_STEP_MILLISECONDS") {
            std::thread::sleep(Duration::from_millis(milliseconds));
        }
        let slow_while = std::env::var_os("TEST_SLOW_WHILE");
        if slow_while.is_some_and(|file| std::path::Path::new(&file).exists()) {
            std::thread::sleep(Duration::from_millis(300));
        }
        assert!(
            told("TEST_PANIC_AT") != Some(step),
            "told to panic at step {step}"
        );
        let logits = self.linear.forward(&batch.inputs.flatten_from(1)?)?;
        let loss = candle_nn::loss::cross_entropy(&logits, &batch.targets)?;
        match told("TEST_NAN_AT") {
            Some(at) if step >= at => loss.affine(f64::NAN, 0.0),
            _ => Ok(loss),
        }
    }

    fn metrics(&self, batch: &Batch) -> Result<Metrics> {
        let logits = self.linear.forward(&batch.inputs.flatten_from(1)?)?;
        classification_metrics(&logits, &batch.targets)
    }
}

/// A model with weights that count visits. Each sample has a class of its own, and each step on it adds one to that
/// element of each variable. It needs SGD at a learning rate of one, and a batch size of one.
struct Visits(Vec<Tensor>);

impl Model for Visits {
    fn new(setup: &Setup, vars: VarBuilder) -> Result<Self> {
        let zeros = candle_nn::init::ZERO;
        let variable = |name| vars.get_with_hints(setup.classes, name, zeros);
        Ok(Self(
            ["a", "b", "c", "d"]
                .map(variable)
                .into_iter()
                .collect::<Result<_>>()?,
        ))
    }

    fn loss(&self, batch: &Batch) -> Result<Tensor> {
        if let Some(milliseconds) = told("TEST_STEP_MILLISECONDS") {
            std::thread::sleep(Duration::from_millis(milliseconds));
        }
        let classes = self.0[0].elem_count() as u32;
        let all = Tensor::arange(0, classes, batch.targets.device())?;
        let visited = all.broadcast_eq(&batch.targets.unsqueeze(1)?)?;
        let visited = visited
            .to_dtype(flambeau::candle_core::DType::F32)?
            .sum(0)?;
        let mut counted = Tensor::zeros((), visited.dtype(), visited.device())?;
        for variable in &self.0 {
            counted = (counted + (variable * &visited)?.sum_all()?)?;
        }
        counted.neg()
    }
}

fn main() -> ExitCode {
    App::new()
        .model::<Odd>("odd")
        .model::<Visits>("visits")
        .main()
}
