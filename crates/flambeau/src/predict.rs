//! `flambeau predict`: the predictions of a run's final weights.

use std::io;
use std::path::PathBuf;

use clap::Args;
use worker::device;
use worker::predict::predict;
use worker::registry::Registry;

use crate::command::FinishedRun;
use crate::error::CommandError;

#[derive(Clone, Debug, Args)]
pub(crate) struct Arguments {
    /// The run directory, with job.toml and model.safetensors, and transforms.json if the training wrote it.
    run_dir: PathBuf,
    /// The data to predict: a table of the job's kind, with or without the label; pictures in a folder; or a folder of
    /// NumPy files. For other kinds, the folder or file of the data, of which the held-out samples are predicted.
    #[arg(long, value_name = "FILE")]
    data_dir: Option<PathBuf>,
    /// The CSV file to write; standard output if none is given.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// The device to compute on: auto, cpu or cuda:N.
    #[arg(long, default_value = "auto")]
    device: device::Choice,
}

pub(crate) fn run(arguments: &Arguments, registry: &Registry) -> Result<(), CommandError> {
    let finished = FinishedRun::read(&arguments.run_dir, arguments.data_dir.as_deref())?;
    let device = device::open(arguments.device)?;
    let predictions = predict(&finished.trained(), registry, &device)?;
    match &arguments.out {
        Some(path) => {
            let file = std::fs::File::create(path).map_err(CommandError::file(path))?;
            let written = predictions.write_csv(io::BufWriter::new(file));
            written.map_err(CommandError::file(path))
        }
        None => {
            let written = predictions.write_csv(io::stdout().lock());
            written.map_err(CommandError::file("standard output"))
        }
    }
}
