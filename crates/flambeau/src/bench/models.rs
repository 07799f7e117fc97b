//! `flambeau bench models`: measures training steps in one process: forward pass, backward pass and update by SGD. The
//! models take vectors, pictures or sequences. `scripts/bench-torch.py` measures the same steps with PyTorch.

use daemon::{out, outln};
use std::time::{Duration, Instant};

use candle_core::{Device, Tensor};
use candle_nn::{Optimizer as _, SGD};
use clap::Args;
use comfy_table::{Table, presets};
use model::input::{Field, Signature};
use model::registry::Registry;
use model::tables::Tables;
use model::{Batch, Objective, Pass, Setup, Stages};
use nn::backward;
use replica::ReplicaError;
use replica::threads::VARIABLE as THREADS;
use serde::Serialize;
use shared_proto::blocks::VariableKind;
use shared_proto::job;
use variables::Variables;

use super::{median, with_threads};
use crate::error::CommandError;

/// The number of classes of the random samples.
const CLASSES: usize = 10;

/// The number of steps before the measured steps.
const WARM_UP: usize = 3;

#[derive(Clone, Debug, Args)]
pub(crate) struct Arguments {
    /// The models to measure. Default: mlp, cnn, resnet20, resnet56, resnet18, resnet50, mobilenetv2, transformer.
    #[arg(value_name = "MODEL", value_parser = named)]
    models: Vec<Measured>,
    /// Threads that compute.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    threads: u32,
    /// Seconds for each model.
    #[arg(long, default_value_t = 5.0, value_parser = super::seconds)]
    seconds: f64,
    /// One JSON object instead of a table.
    #[arg(long)]
    json: bool,
}

/// A model, and the shape and number of the samples with which it is measured.
#[derive(Clone, Copy, Debug)]
struct Measured {
    name: &'static str,
    batch: usize,
    shape: &'static [usize],
    hidden: &'static [usize],
}

/// All models that are measured.
const MODELS: [Measured; 8] = [
    of("mlp", 64, &[1, 28, 28], &[512, 256]),
    of("cnn", 64, &[1, 28, 28], &[128]),
    of("resnet20", 128, &[3, 32, 32], &[]),
    of("resnet56", 128, &[3, 32, 32], &[]),
    of("resnet18", 32, &[3, 32, 32], &[]),
    of("resnet50", 32, &[3, 32, 32], &[]),
    of("mobilenetv2", 32, &[3, 32, 32], &[]),
    of("transformer", 32, &[64, 128], &[]),
];

const fn of(
    name: &'static str,
    batch: usize,
    shape: &'static [usize],
    hidden: &'static [usize],
) -> Measured {
    Measured {
        name,
        batch,
        shape,
        hidden,
    }
}

fn named(name: &str) -> Result<Measured, String> {
    let found = MODELS.into_iter().find(|model| model.name == name);
    found.ok_or_else(|| {
        format!(
            "the models are {}",
            MODELS.map(|model| model.name).join(", ")
        )
    })
}

#[derive(Debug, Serialize)]
struct Row {
    model: &'static str,
    threads: u32,
    /// The number of samples in a step, divided by the median time of a step.
    samples_per_second: f64,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), CommandError> {
    if std::env::var(THREADS).as_deref() != Ok(&arguments.threads.to_string()) {
        let again = std::env::args_os().skip(1);
        let printed = with_threads(arguments.threads, again)?;
        out!("{}", String::from_utf8_lossy(&printed));
        return Ok(());
    }
    let models = match arguments.models.as_slice() {
        [] => &MODELS,
        models => models,
    };
    let time = Duration::from_secs_f64(arguments.seconds);
    let mut rows = Vec::new();
    for model in models {
        rows.push(Row {
            model: model.name,
            threads: arguments.threads,
            samples_per_second: measure(model, time)?,
        });
    }
    if arguments.json {
        outln!("{}", serde_json::json!({ "rows": rows }));
        return Ok(());
    }
    let mut table = Table::new();
    let header = ["model", "threads", "samples/s"];
    table
        .load_preset(presets::ASCII_MARKDOWN)
        .set_header(header);
    for row in rows {
        let (threads, speed) = (row.threads, row.samples_per_second);
        let speed = format!("{speed:.0}");
        table.add_row([row.model.to_owned(), threads.to_string(), speed]);
    }
    outln!("{}", table.trim_fmt());
    Ok(())
}

/// Returns the number of samples that a model trains on in a second.
fn measure(model: &Measured, time: Duration) -> Result<f64, ReplicaError> {
    let settings = job::Model {
        hidden: model.hidden.to_vec(),
        ..job::Model::default()
    };
    let data = Signature {
        inputs: vec![Field::numbers("input", model.shape.to_vec())],
        targets: vec![Field::category("label", CLASSES as u64)],
    };
    let objective = Objective::new(&job::Objective::default(), &data)?;
    let setup = Setup {
        settings: &settings,
        data: &data,
        objective: &objective,
        tables: &Tables::default(),
        stages: &Stages::default(),
    };
    let registry = Registry::builtin();
    let (variables, network) = Variables::build(1, VariableKind::by_name, &Device::Cpu, |vars| {
        registry.build(model.name, &setup, vars)
    })?;
    let shape = [&[model.batch], model.shape].concat();
    let inputs = Tensor::randn(0f32, 1.0, shape, &Device::Cpu)?;
    let labels = (0u32..).take(model.batch).map(|i| i % CLASSES as u32);
    let labels = Tensor::from_iter(labels, &Device::Cpu)?;
    let batch = Batch::new(model.batch).with_input("input", inputs);
    let batch = batch.with_target("label", labels);
    let mut optimizer = SGD::new(variables.trained(), 1e-3)?;
    let mut step = |number: u64| -> candle_core::Result<()> {
        let pass = Pass::training(&objective, 1, number, 0);
        let outputs = network.forward(&batch, &pass)?;
        optimizer.step(&backward(&network.loss(&outputs, &batch, &pass)?)?)
    };
    let (mut times, mut began) = (Vec::new(), Instant::now());
    for number in 0.. {
        let start = Instant::now();
        step(number)?;
        if number < WARM_UP as u64 {
            began = Instant::now();
            continue;
        }
        times.push(start.elapsed().as_secs_f64());
        if began.elapsed() >= time {
            break;
        }
    }
    Ok(model.batch as f64 / median(times))
}
