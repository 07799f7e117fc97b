//! The command line: its subcommands, and the module that runs each.

use daemon::noteln;
use std::ffi::OsStr;
use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use daemon::process;
use model::Model;
use model::input::Source;
use model::registry::Registry;

use crate::error::CommandError;
use crate::scorer::{Scorer, Scoring};
use crate::{
    bench, certs, checkpoint, describe, devices, eval, evaluator, find_learning_rate, job, jobs,
    predict, report, status, table, tf_task, train,
};

/// Distributed training for candle.
#[derive(Parser)]
#[command(name = "flambeau", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Train on a whole cluster, on this machine: real processes over loopback.
    Train(train::Arguments),
    /// Go on with a run from its newest checkpoint.
    Resume(train::resume::Arguments),
    /// Evaluate the final weights of a run again, or the best ones.
    Eval(eval::Arguments),
    /// Evaluate the checkpoints of a run as they come, beside the training.
    Evaluator(evaluator::Arguments),
    /// Try rising learning rates for some steps, in this process, and suggest one.
    FindLearningRate(find_learning_rate::Arguments),
    /// Write the predictions of a run's final or best weights as CSV or Parquet.
    Predict(predict::Arguments),
    /// Write the report of a run: its curves, summary and settings as a page.
    Report(report::Arguments),
    /// Show the state of a cluster.
    Status(status::Arguments),
    /// Add a job to the queue of a long-lived cluster.
    Submit(jobs::Submit),
    /// List the jobs of a long-lived cluster.
    Jobs(jobs::List),
    /// Cancel a job of a long-lived cluster.
    Cancel(jobs::Cancel),
    /// List the devices of this machine that workers can compute on.
    Devices(devices::Arguments),
    /// Show rows of a table, of a running cluster or of a checkpoint.
    Table(table::Arguments),
    /// Look at checkpoints, check them, or take the weights out of one.
    #[command(subcommand)]
    Checkpoint(checkpoint::Command),
    /// Make a private authority, the roles' certificates and a token, for a trial.
    Certs(certs::Arguments),
    /// Look at the columns of a file.
    #[command(subcommand)]
    Data(describe::Command),
    /// Write a job file.
    #[command(subcommand)]
    Job(job::Command),
    /// Run benchmarks.
    #[command(subcommand)]
    Bench(bench::Command),
    /// Run the coordinator. All other processes are given its address.
    Coordinator(coordinator::Settings),
    /// Run a parameter server.
    PsServer(ps_server::Settings),
    /// Run a worker.
    Worker(worker::Settings),
    /// Run the process that TF_CONFIG describes, for launchers made for TensorFlow: chief (with the coordinator), worker, ps
    /// or evaluator.
    TfTask(tf_task::Arguments),
    /// Train in this process alone, with candle's own optimizer, as the reference for a cluster.
    #[command(hide = true)]
    Local(bench::LocalArguments),
    /// Serve the plain TCP that `bench dense` compares with.
    #[command(hide = true)]
    BenchTcpServer(bench::ServerArguments),
    /// A process of `bench allreduce`.
    #[command(hide = true)]
    BenchRank(bench::RankArguments),
}

impl Command {
    /// Returns whether this process computes much with candle.
    fn computes(&self) -> bool {
        matches!(
            self,
            Self::Worker(_)
                | Self::TfTask(_)
                | Self::Eval(_)
                | Self::Evaluator(_)
                | Self::FindLearningRate(_)
                | Self::Predict(_)
                | Self::Local(_)
        )
    }
}

/// Flambeau's command line, with the models and data sources that jobs may name.
#[derive(Clone, Debug)]
pub struct App {
    registry: Registry,
}

impl Default for App {
    fn default() -> Self {
        Self::new()
    }
}

impl App {
    /// Returns the command line with the models and data sources that come with Flambeau.
    pub fn new() -> Self {
        Self {
            registry: Registry::builtin(),
        }
    }

    /// Adds a model of your own, which jobs can name.
    #[must_use]
    pub fn model<M: Model>(self, name: &'static str) -> Self {
        Self {
            registry: self.registry.model::<M>(name),
        }
    }

    /// Adds a data source of your own, which jobs can name.
    #[must_use]
    pub fn data<S: Source>(self, name: &'static str) -> Self {
        Self {
            registry: self.registry.data::<S>(name),
        }
    }

    /// Opens a trained model for online inference. The rows of its tables stay on running servers.
    ///
    /// # Errors
    /// If a file cannot be read or does not fit the model, or if no server has the model's tables.
    pub fn scorer(&self, scoring: &Scoring) -> candle_core::Result<Scorer> {
        Scorer::open(scoring, &self.registry)
    }

    /// Runs the command that the command line names. Call this first in `main`: if the command computes with candle,
    /// this re-executes the program, unless `RAYON_NUM_THREADS` is set.
    pub fn main(self) -> ExitCode {
        let registry = self.registry;
        let arguments = with_names(Arguments::command(), &registry).get_matches();
        let arguments = Arguments::from_arg_matches(&arguments);
        let command = arguments.unwrap_or_else(|error| error.exit()).command;
        if command.computes() {
            replica::threads::reexecute_if_unset();
        }
        match command {
            Command::Coordinator(settings) => {
                process::main(settings.process.clone(), async |process| {
                    coordinator::run(settings, process).await
                })
            }
            Command::PsServer(settings) => {
                process::main(settings.process.clone(), async |process| {
                    ps_server::run(settings, process).await
                })
            }
            Command::Worker(settings) => process::main(settings.process.clone(), async |process| {
                worker::run(settings, registry, process).await
            }),
            Command::TfTask(arguments) => tf_task::main(arguments, registry),
            Command::Train(arguments) => finish(train::run(arguments, &registry)),
            Command::Resume(arguments) => finish(train::resume::run(arguments, &registry)),
            Command::Eval(arguments) => finish(eval::run(&arguments, &registry)),
            Command::Evaluator(arguments) => finish(evaluator::run(&arguments, &registry)),
            Command::FindLearningRate(arguments) => {
                finish(find_learning_rate::run(arguments, &registry))
            }
            Command::Predict(arguments) => finish(predict::run(&arguments, &registry)),
            Command::Report(arguments) => finish(report::run(&arguments)),
            Command::Status(arguments) => finish(status::run(&arguments)),
            Command::Submit(arguments) => finish(jobs::submit(arguments)),
            Command::Jobs(arguments) => finish(jobs::list(&arguments)),
            Command::Cancel(arguments) => finish(jobs::cancel(&arguments)),
            Command::Devices(arguments) => {
                devices::run(&arguments);
                ExitCode::SUCCESS
            }
            Command::Table(arguments) => finish(table::run(&arguments)),
            Command::Certs(arguments) => finish(certs::run(&arguments)),
            Command::Checkpoint(command) => finish(checkpoint::run(&command)),
            Command::Data(command) => finish(describe::run(&command)),
            Command::Job(command) => finish(job::run(&command, &registry)),
            Command::Bench(command) => finish(bench::run(command)),
            Command::Local(arguments) => finish(bench::local(arguments, &registry)),
            Command::BenchTcpServer(arguments) => finish(bench::serve(&arguments)),
            Command::BenchRank(arguments) => finish(bench::follow(&arguments)),
        }
    }
}

/// Adds the names of the registry's data sources and models to the help of the settings that take such a name.
fn with_names(command: clap::Command, registry: &Registry) -> clap::Command {
    let list = |names: &mut dyn Iterator<Item = &str>| names.collect::<Vec<_>>().join(", ");
    let sources = list(&mut registry.sources());
    let models = list(&mut registry.models());
    command.mut_subcommands(|command| {
        command.mut_args(|arg| match arg.get_env().and_then(OsStr::to_str) {
            Some("FLAMBEAU_DATA") => arg.help(format!("Data set: {sources}, or one of your own")),
            Some("FLAMBEAU_MODEL") => arg.help(format!("Model: {models}, or one of your own")),
            _ => arg,
        })
    })
}

fn finish(outcome: Result<(), CommandError>) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            noteln!("flambeau: {error}");
            match error {
                // The exit code that shells give to a process that SIGINT has ended.
                CommandError::Interrupted | CommandError::Stopped { .. } => ExitCode::from(130),
                _ => ExitCode::FAILURE,
            }
        }
    }
}
