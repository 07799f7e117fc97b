//! `flambeau resume`: goes on with a run from its newest checkpoint.

use std::path::{Path, PathBuf};

use clap::Args;
use coordinator::read_job;
use daemon::settings::JobFlags;
use shared_proto::job::{Job, run_dir};
use worker::registry::Registry;

use super::outcome::next_dir;
use super::{Options, begin};
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
    let job = job_of(&run)?;
    let checkpoints = job.checkpoint.location;
    let restore = checkpoints.unwrap_or_else(|| run.display().to_string());
    let arguments = super::Arguments {
        job: JobArguments { file: None, flags },
        restore: Some(restore),
        options,
    };
    go_on(&run, arguments, registry)
}

/// Trains by the job of a run directory and the flags. Unless these name another run directory, it is the next one beside this one.
pub(super) fn go_on(
    run: &Path,
    arguments: super::Arguments,
    registry: &Registry,
) -> Result<(), CommandError> {
    let file = run.join(run_dir::JOB);
    let mut job = read_job(Some(&file), arguments.job.flags.clone())?;
    // The directory may be a copy, whose job names the original.
    if job.run_dir == job_of(run)?.run_dir {
        job.run_dir = Some(next_dir(run));
    }
    begin(job, arguments, registry)
}

/// Reads the job of a run directory.
fn job_of(run: &Path) -> Result<Job, CommandError> {
    let file = run.join(run_dir::JOB);
    let text = std::fs::read_to_string(&file).map_err(CommandError::file(&file))?;
    Job::parse(&text).map_err(|error| CommandError::Content {
        path: file,
        reason: error.to_string(),
    })
}
