//! `flambeau eval`: evaluates a run's weights again.

use daemon::outln;
use std::collections::BTreeMap;
use std::path::PathBuf;

use clap::Args;
use shared_proto::number::Number;
use worker::device;
use worker::local::evaluate_trained;
use worker::registry::Registry;

use crate::command::{FinishedRun, Weights};
use crate::error::CommandError;

#[derive(Clone, Debug, Args)]
pub(crate) struct Arguments {
    /// The run directory, with job.toml and model.safetensors.
    run_dir: PathBuf,
    /// Evaluate the best weights, best.safetensors, which a job with [best] keeps.
    #[arg(long)]
    best: bool,
    /// The folder or file of the data; overrides the job's.
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
    /// The device to compute on: auto, cpu or cuda:N.
    #[arg(long, default_value = "auto")]
    device: device::Choice,
    /// One JSON object instead of lines.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(arguments: &Arguments, registry: &Registry) -> Result<(), CommandError> {
    let weights = Weights::best_if(arguments.best);
    let finished = FinishedRun::read(&arguments.run_dir, weights, arguments.data_dir.as_deref())?;
    let device = device::open(arguments.device)?;
    let metrics = evaluate_trained(&finished.trained(), registry, &device)?;
    if arguments.json {
        let numbers: BTreeMap<_, _> = metrics
            .into_iter()
            .map(|(name, value)| (name, Number(value)))
            .collect();
        let mut object = serde_json::json!({ "metrics": numbers });
        for (name, value) in numbers {
            object[format!("test_{name}")] = serde_json::json!(value);
        }
        outln!("{object}");
    } else {
        for (name, value) in metrics {
            outln!("test {name} {value:.4}");
        }
    }
    Ok(())
}
