//! `flambeau bench apply`: measures each optimizer's update alone, and compares it with a copy of memory.

use daemon::outln;
use std::time::{Duration, Instant};

use clap::Args;
use comfy_table::{Table, presets};
use optimizer::{Part, Update, rule};
use serde::Serialize;
use shared_proto::job::Optimizer;
use shared_proto::kernel::Kernel;
use shared_proto::payload::LeF32;

use super::median;
use crate::error::CommandError;

/// The number of measurements of each update and each copy; the medians are reported.
const REPETITIONS: usize = 7;

#[derive(Clone, Debug, Args)]
pub(crate) struct Arguments {
    /// Bytes of the weights.
    #[arg(long, default_value_t = 64 << 20)]
    size: usize,
    /// Seconds for each optimizer.
    #[arg(long, default_value_t = 1.0, value_parser = super::seconds)]
    seconds: f64,
    /// One JSON object instead of a table.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Row {
    optimizer: &'static str,
    /// The bytes for each element: its weight and slots are read and written, its gradient is read.
    bytes_touched_per_element: usize,
    /// The name of the kernel, which is the instruction set of the update.
    kernel: &'static str,
    gigabytes_touched_per_second: f64,
    ratio_memcpy: f64,
    /// The speed as a multiple of the speed with the baseline kernel, whose instructions every CPU has.
    ratio_baseline_kernel: f64,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), CommandError> {
    let elements = (arguments.size / size_of::<f32>()).max(1);
    let time = Duration::from_secs_f64(arguments.seconds / REPETITIONS as f64);
    let rows: Vec<Row> = Optimizer::NAMES
        .iter()
        .filter_map(|name| measure(name, elements, time))
        .collect();
    if arguments.json {
        outln!("{}", serde_json::json!({ "rows": rows }));
        return Ok(());
    }
    let mut table = Table::new();
    table.load_preset(presets::ASCII_MARKDOWN).set_header([
        "optimizer",
        "bytes/element",
        "kernel",
        "GB/s touched",
        "of memcpy",
        "of baseline kernel",
    ]);
    for row in rows {
        table.add_row([
            row.optimizer.to_owned(),
            row.bytes_touched_per_element.to_string(),
            row.kernel.to_owned(),
            format!("{:.1}", row.gigabytes_touched_per_second),
            format!("{:.2}", row.ratio_memcpy),
            format!("{:.2}", row.ratio_baseline_kernel),
        ]);
    }
    outln!("{}", table.trim_fmt());
    Ok(())
}

/// Measures the update and the copy in turns, so that both run under the same conditions.
fn measure(name: &'static str, elements: usize, time: Duration) -> Option<Row> {
    let rule = rule(&Optimizer::named(name)?);
    let slots = rule.slots();
    let mut weights = vec![0.5f32; elements];
    let mut state = vec![slots.initial; slots.count * elements];
    let gradient = vec![LeF32::from(0.01); elements];
    let block = shared_proto::blocks::BLOCK_ELEMENTS;
    let (from, mut to) = (vec![1f32; elements], vec![2f32; elements]);
    let mut number = 0;
    let touched = size_of::<f32>() * (3 + 2 * slots.count);
    let mut updates = |kernel| {
        rate(time, elements * touched, || {
            number += 1;
            let update = Update {
                learning_rate: 1e-4,
                factor: 1.0,
                number,
                kernel,
            };
            let blocks = weights.chunks_mut(block).zip(gradient.chunks(block));
            let mut rest = &mut state[..];
            for (weights, gradient) in blocks {
                let (state, after) = rest.split_at_mut(slots.count * weights.len());
                let part = Part {
                    weights,
                    gradient,
                    slots: slots.split(state),
                    ahead: None,
                };
                rule.apply(update, part);
                rest = after;
            }
        })
    };
    let (mut best, mut baseline, mut copies) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..REPETITIONS {
        best.push(updates(Kernel::best()));
        baseline.push(updates(Kernel::baseline()));
        // The copy reads as many bytes as the weights have, and writes as many.
        copies.push(rate(time, 2 * size_of_val(&*from), || {
            to.copy_from_slice(std::hint::black_box(&from));
            std::hint::black_box(&mut to);
        }));
    }
    let (update, copy) = (median(best), median(copies));
    Some(Row {
        optimizer: name,
        bytes_touched_per_element: touched,
        kernel: Kernel::best().name(),
        gigabytes_touched_per_second: update / 1e9,
        ratio_memcpy: update / copy,
        ratio_baseline_kernel: update / median(baseline),
    })
}

/// Repeats `once`, which touches `bytes` bytes, for `time`. Returns the bytes per second. One run before warms up.
fn rate(time: Duration, bytes: usize, mut once: impl FnMut()) -> f64 {
    once();
    let begin = Instant::now();
    let mut times = 0;
    while times == 0 || begin.elapsed() < time {
        once();
        times += 1;
    }
    bytes as f64 * f64::from(times) / begin.elapsed().as_secs_f64()
}
