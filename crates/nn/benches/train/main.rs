//! Training steps of whole models, in samples per second: forward, loss, backward, and an update by SGD.
//!
//! `RAYON_NUM_THREADS=1 cargo bench -p nn -- [cnn] [resnet20] [mobilenetv2] [transformer] [--seconds N]` measures the
//! models that are named, or all, with one thread. `scripts/bench-torch.py` does the same with PyTorch.

#![allow(clippy::unwrap_used, missing_docs)]

mod arguments;
mod models;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use arguments::Arguments;
use candle_core::utils::get_num_threads;
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Optimizer, SGD, VarBuilder, VarMap};
use models::{Cnn, MobileNetV2, Network, ResNet20, Transformer};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let models = models();
    let names: Vec<&str> = models.iter().map(|model| model.0).collect();
    let arguments = std::env::args().skip(1);
    let Arguments { names, time } = match Arguments::read(arguments, &names, get_num_threads()) {
        Ok(arguments) => arguments,
        Err(message) => {
            eprintln!("{message}");
            return ExitCode::FAILURE;
        }
    };
    for (name, batch, shape, build) in models {
        if names.is_empty() || names.iter().any(|asked| asked == name) {
            let speed = measure(batch, shape, build, time).unwrap();
            println!("{name} {speed:.0} samples/s");
        }
    }
    ExitCode::SUCCESS
}

type Build = fn(VarBuilder) -> Result<Box<dyn Network>>;

fn models() -> Vec<(&'static str, usize, &'static [usize], Build)> {
    vec![
        ("cnn", 64, &[1, 28, 28], |vars| {
            Ok(Box::new(Cnn::new(vars)?))
        }),
        ("resnet20", 128, &[3, 32, 32], |vars| {
            Ok(Box::new(ResNet20::new(vars)?))
        }),
        ("mobilenetv2", 32, &[3, 32, 32], |vars| {
            Ok(Box::new(MobileNetV2::new(vars)?))
        }),
        ("transformer", 32, &[64, 128], |vars| {
            Ok(Box::new(Transformer::new(vars)?))
        }),
    ]
}

fn measure(batch: usize, shape: &[usize], build: Build, time: Duration) -> Result<f64> {
    let map = VarMap::new();
    let model = build(VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu))?;
    let shape = [&[batch], shape].concat();
    let inputs = Tensor::randn(0f32, 1.0, shape, &Device::Cpu)?;
    let targets: Vec<u32> = (0..batch as u32).map(|i| i % 10).collect();
    let targets = Tensor::new(targets, &Device::Cpu)?;
    // The running statistics have no gradient, and stay as they are.
    let mut optimizer = SGD::new(map.all_vars(), 1e-3)?;
    let mut step = || {
        let loss = nn::cross_entropy(&model.forward(&inputs)?, &targets)?;
        optimizer.step(&nn::backward(&loss)?)
    };
    for _ in 0..3 {
        step()?;
    }
    // The median of the steps' time on the CPU, so that what else runs on the machine counts little.
    let (mut times, start) = (Vec::new(), Instant::now());
    while times.is_empty() || start.elapsed() < time {
        let before = seconds_on_cpu();
        step()?;
        times.push(seconds_on_cpu() - before);
    }
    times.sort_by(f64::total_cmp);
    Ok(batch as f64 / times[times.len() / 2])
}

/// Returns the time that this thread has had on a CPU.
fn seconds_on_cpu() -> f64 {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    let nanoseconds = stat.split_whitespace().next().unwrap();
    nanoseconds.parse::<f64>().unwrap() * 1e-9
}
