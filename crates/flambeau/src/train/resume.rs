//! `flambeau resume`: goes on with a run from its newest checkpoint.

use std::path::{Path, PathBuf};

use clap::Args;
use coordinator::read_job;
use daemon::job_flags::JobFlags;
use model::registry::Registry;
use shared_proto::job::{Job, run_dir};

use super::outcome::next_dir;
use super::{Options, are_same, begin};
use crate::command::JobArguments;
use crate::error::CommandError;

#[derive(Clone, Debug, Args)]
pub(crate) struct Arguments {
    /// The run directory. The new run has the same job, except for the flags, and a run directory of its own: the next free one beside this
    /// one, unless --run-dir names another.
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

/// Trains the job of a run directory, with the flags applied.
pub(super) fn go_on(
    run: &Path,
    arguments: super::Arguments,
    registry: &Registry,
) -> Result<(), CommandError> {
    let job = job_beside(run, &arguments.job.flags)?;
    begin(job, arguments, registry)
}

/// Returns the folder of a file.
pub(super) fn folder_of(file: &Path) -> Option<&Path> {
    let folder = file.parent()?;
    Some(match folder.as_os_str().is_empty() {
        true => Path::new("."),
        false => folder,
    })
}

/// Returns whether `folder` is a run directory, and `file` in it is the job of the run.
pub(super) fn is_job_of_run(file: &Path, folder: &Path) -> bool {
    let has = |record: &str| folder.join(record).exists();
    let has_records = has(run_dir::STATE) || has(run_dir::SUMMARY) && has(run_dir::METRICS);
    has_records && file.ends_with(run_dir::JOB)
}

/// Returns the job of a run directory, with the flags applied. The new run gets the next free directory beside `run`,
/// so that `run` keeps its records, unless the flags name another directory.
pub(super) fn job_beside(run: &Path, flags: &JobFlags) -> Result<Job, CommandError> {
    let mut job = read_job(Some(&run.join(run_dir::JOB)), flags.clone())?;
    // The directory may be a copy, whose job names the original.
    let is_named = flags.run_dir.is_some() || job.run_dir != job_of(run)?.run_dir;
    let named = job.run_dir.as_deref().filter(|_| is_named);
    if named.is_none_or(|named| are_same(named, run)) {
        job.run_dir = Some(next_dir(run));
    }
    Ok(job)
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
