//! The bubble of stages that take a known time. They sleep, so that any number of devices finds a core.

use std::time::Duration;

use candle_core::{CpuStorage, CustomOp1, Device, Layout, Result, Shape, Tensor};
use candle_nn::VarBuilder;
use model::input::{Order, Purpose, read};
use model::registry::Registry;
use model::{Setup, forward_blocks};
use nn::Linear;
use shared_proto::job::Job;

use super::*;
use crate::build::{Place, build};

const FORWARD: Duration = Duration::from_millis(5);
const BACKWARD: Duration = Duration::from_millis(10);

/// Four equal blocks, which sleep in both directions.
struct Sleepy(Vec<Linear>);

impl Model for Sleepy {
    fn new(setup: &Setup, vars: VarBuilder) -> Result<Self> {
        let mut layers = Vec::new();
        let mut width = setup.features()?;
        for block in 0..4 {
            let next = if block < 3 { 8 } else { setup.outputs() };
            layers.push(Linear::new(
                width,
                next,
                setup.block(block, 4, &vars)?.pp(block),
            )?);
            width = next;
        }
        Ok(Self(layers))
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
        let x = match x {
            Some(x) => x.clone(),
            None => batch.input()?.flatten_from(1)?,
        };
        self.0[block].forward(&x)?.apply_op1(Sleep)
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

/// Makes a step of four stages. Returns the bubble.
fn bubble(devices: usize, schedule: &str, micro_batches: usize) -> Bubble {
    let job = format!(
        "[model]\nname = \"sleepy\"\n[strategy]\nname = \"model-parallel\"\nstages = 4\nschedule = \"{schedule}\"\nmicro_batches = {micro_batches}\n"
    );
    let job = Job::from_toml(&job).unwrap();
    let registry = Registry::builtin().model::<Sleepy>("sleepy");
    let mut data = registry.open(&job.data, 1, Purpose::Training).unwrap();
    let objective = Objective::new(&job.objective, &data.signature).unwrap();
    let devices = vec![Device::Cpu; devices];
    let build = |stages| {
        let place = Place::in_stages(&Device::Cpu, stages);
        build(&job, &registry, &place, &data.signature, &objective)
    };
    let (built, pipeline) = Pipeline::build(&job, &devices, build).unwrap();
    let batch = read(&mut *data.training, Order::Stored, 0..32, &Device::Cpu).unwrap();
    let pass = Pass::training(&objective, 1, 0, 0);
    let alone = Neighbouring::default();
    let passed = pipeline.pass(&*built.model, &objective, &[batch], &pass, alone);
    let passed = passed.unwrap();
    pipeline.show(passed.spent, passed.ideal_bubble)
}

#[test]
#[ignore = "it measures time: cargo test --workspace --lib -- --ignored --nocapture the_measured_bubble"]
fn the_measured_bubble_is_near_that_of_the_formula() {
    println!("devices  schedule  micro-batches  measured  ideal  (p-1)/(m+p-1)");
    for devices in [2, 4] {
        for schedule in ["gpipe", "1f1b"] {
            for micro_batches in [1, 4, 8, 16] {
                let Bubble { measured, ideal } = bubble(devices, schedule, micro_batches);
                let waits = (devices - 1) as f64;
                let formula = waits / (micro_batches as f64 + waits);
                println!(
                    "{devices:7}  {schedule:8}  {micro_batches:13}  {measured:8.3}  {ideal:5.3}  {formula:.3}"
                );
                assert!((measured - ideal).abs() < 0.1);
            }
        }
    }
}
