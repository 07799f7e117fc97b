//! `flambeau eval`: evaluates a run's weights again.

use daemon::outln;
use std::collections::BTreeMap;
use std::path::PathBuf;

use clap::Args;
use model::registry::Registry;
use replica::device;
use shared_proto::number::Number;
use worker::alone::local::{Evaluated, evaluate_trained};

use crate::command::{FinishedRun, Weights, show_warnings};
use crate::error::CommandError;

#[derive(Clone, Debug, Args)]
pub(crate) struct Arguments {
    /// The run directory, with job.toml and model.safetensors.
    run_dir: PathBuf,
    /// Evaluate the best weights, best.safetensors, which a job with [best] keeps.
    #[arg(long)]
    best: bool,
    /// The folder or file of other data than the job's. All its samples are evaluated; without it, those that the job holds out.
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
    /// Of --data-dir, evaluate the samples that the job would hold out of it.
    #[arg(long, requires = "data_dir")]
    held_out: bool,
    /// The device to compute on: auto, cpu or cuda:N.
    #[arg(long, default_value = "auto")]
    device: device::Choice,
    /// One JSON object instead of lines.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(arguments: &Arguments, registry: &Registry) -> Result<(), CommandError> {
    show_warnings();
    let weights = Weights::best_if(arguments.best);
    let finished = FinishedRun::read(&arguments.run_dir, weights, arguments.data_dir.as_deref())?;
    let device = device::open(arguments.device)?;
    let samples = match arguments.data_dir.is_some() && !arguments.held_out {
        true => Evaluated::All,
        false => Evaluated::HeldOut,
    };
    let (metrics, count) = evaluate_trained(&finished.trained(), registry, &device, samples)?;
    if arguments.json {
        let numbers: BTreeMap<_, _> = metrics
            .into_iter()
            .map(|(name, value)| (name, Number(value)))
            .collect();
        let mut object = serde_json::json!({ "metrics": numbers, "samples": count });
        for (name, value) in numbers {
            object[format!("test_{name}")] = serde_json::json!(value);
        }
        outln!("{object}");
    } else {
        for (name, value) in metrics {
            outln!("test {name} {value:.4}");
        }
        outln!("samples {count}");
    }
    Ok(())
}
