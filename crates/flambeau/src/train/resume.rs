//! `flambeau resume`: goes on with a run from its newest checkpoint.

use std::path::PathBuf;

use clap::Args;
use daemon::settings::JobFlags;
use shared_proto::job::{Job, run_dir};
use worker::registry::Registry;

use super::Options;
use crate::command::JobArguments;
use crate::error::CommandError;

#[derive(Clone, Debug, Args)]
pub(crate) struct Arguments {
    /// The run directory. The run that goes on has the same job, except for the flags, and a run directory of its own beside this one
    /// unless --run-dir names one.
    #[arg(value_name = "RUN_DIR")]
    run: PathBuf,
    #[command(flatten)]
    flags: JobFlags,
    #[command(flatten)]
    options: Options,
}

pub(crate) fn run(arguments: Arguments, registry: &Registry) -> Result<(), CommandError> {
    let Arguments {
        run,
        flags,
        options,
    } = arguments;
    let file = run.join(run_dir::JOB);
    let text = std::fs::read_to_string(&file).map_err(CommandError::file(&file))?;
    let job = Job::parse(&text).map_err(|error| CommandError::Content {
        path: file.clone(),
        reason: error.to_string(),
    })?;
    let checkpoints = job.checkpoint.location;
    let restore = checkpoints.unwrap_or_else(|| run.display().to_string());
    let arguments = super::Arguments {
        job: JobArguments {
            file: Some(file),
            flags,
        },
        restore: Some(restore),
        options,
    };
    super::run(arguments, registry)
}
