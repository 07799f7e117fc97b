//! `flambeau bench`: repeatable measurements.

mod allreduce;
mod apply;
mod data;
mod dense;
mod models;
mod processes;
mod scale;
mod sparse;
mod tcp;
mod train;

use std::ffi::OsString;

use clap::Subcommand;
use daemon::membership::Registration;
use shared_proto::ids::Role;

use crate::error::CommandError;

pub(crate) use allreduce::{RankArguments, follow};
pub(crate) use tcp::{ServerArguments, serve};
pub(crate) use train::{LocalArguments, local};

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Add up vectors among processes, as strategies without servers do.
    Allreduce(allreduce::Arguments),
    /// Read the data of jobs on one thread, from files to batches.
    Data(data::Arguments),
    /// Push gradients to be applied, and pull the new weights; compared with plain TCP.
    Dense(dense::Arguments),
    /// Run each optimizer's update alone; compared with a copy of the same bytes.
    Apply(apply::Arguments),
    /// Measure training steps of models in one process.
    Models(models::Arguments),
    /// Run the coordinator with up to thousands of simulated members, which call it but train no model.
    Scale(scale::Arguments),
    /// Pull and push rows of an embedding table, alone and in the steps of models.
    Sparse(sparse::Arguments),
    /// Train the same job in one process with candle alone, and with some numbers of workers.
    Train(Box<train::Arguments>),
}

pub(crate) fn run(command: Command) -> Result<(), CommandError> {
    match command {
        Command::Allreduce(arguments) => allreduce::run(&arguments),
        Command::Data(arguments) => data::run(&arguments),
        Command::Dense(arguments) => dense::run(&arguments),
        Command::Apply(arguments) => apply::run(&arguments),
        Command::Models(arguments) => models::run(&arguments),
        Command::Scale(arguments) => scale::run(&arguments),
        Command::Sparse(arguments) => sparse::run(&arguments),
        Command::Train(arguments) => train::run(*arguments),
    }
}

/// Runs this program with `arguments` in a new process that computes with `threads` threads. Returns its standard
/// output.
fn with_threads(
    threads: u32,
    arguments: impl IntoIterator<Item = OsString>,
) -> Result<Vec<u8>, CommandError> {
    let failed = |reason: String| CommandError::Start {
        name: "the process that computes".to_owned(),
        reason,
    };
    let executable = std::env::current_exe().map_err(CommandError::file("this executable"))?;
    let output = std::process::Command::new(executable)
        .args(arguments)
        .env(replica::threads::VARIABLE, threads.to_string())
        .output()
        .map_err(|error| failed(error.to_string()))?;
    match output.status.success() {
        true => Ok(output.stdout),
        false => Err(failed(String::from_utf8_lossy(&output.stderr).into_owned())),
    }
}

/// Returns the registration of a worker that measures.
fn registration(index: u32) -> Registration {
    Registration {
        role: Role::Worker,
        identity: format!("bench-{index}"),
        address: String::new(),
        metrics_address: String::new(),
        holding: None,
        capacity_bytes: 0,
    }
}

/// Returns the error of a measurement that cannot go on.
fn failed(error: &dyn std::fmt::Display) -> CommandError {
    CommandError::Start {
        name: "the measurement".to_owned(),
        reason: error.to_string(),
    }
}

/// Reads the length of a measurement, in seconds.
fn seconds(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(seconds) if seconds > 0.0 && seconds <= 3600.0 => Ok(seconds),
        _ => Err("must be a number above 0, and at most 3600".to_owned()),
    }
}

/// Returns the median.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Returns the value below which the given share of the sorted values lies.
fn quantile(sorted: &[f64], share: f64) -> f64 {
    let index = (sorted.len() as f64 * share) as usize;
    sorted
        .get(index.min(sorted.len().saturating_sub(1)))
        .copied()
        .unwrap_or(f64::NAN)
}
