//! The parts that several commands have: the job that they are about, and the runtime of those that call processes.

use std::path::PathBuf;

use clap::Args;
use daemon::settings::JobFlags;

use crate::error::CommandError;

/// The job that a command is about.
#[derive(Clone, Debug, Args)]
pub(crate) struct JobArguments {
    /// The job file; `flambeau job init` writes one. Default: digits, MLP.
    #[arg(env = "FLAMBEAU_JOB", value_name = "JOB.toml")]
    pub(crate) file: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) flags: JobFlags,
}

/// Runs a command that talks to others.
pub(crate) fn block_on<T>(
    future: impl Future<Output = Result<T, CommandError>>,
) -> Result<T, CommandError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(CommandError::file("the runtime"))?;
    runtime.block_on(future)
}
