//! The settings of the process, and the job that they name.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use daemon::settings::{ConnectionSettings, JobFlags, ProcessSettings};
use shared_proto::job::Job;
use shared_proto::transport::socket_address;

use super::error::CoordinatorError;

/// The settings of a coordinator.
#[derive(Clone, Debug, clap::Args)]
pub struct Settings {
    /// The job file; `flambeau job init` writes one. Default: digits, MLP.
    #[arg(env = "FLAMBEAU_JOB", value_name = "JOB.toml")]
    pub job_file: Option<PathBuf>,
    /// Listen on this address, which all other processes are given.
    #[arg(long, env = "FLAMBEAU_LISTEN", value_name = "HOST:PORT", value_parser = socket_address, default_value = "127.0.0.1:7070")]
    pub listen: SocketAddr,
    /// Serve a live page for browsers on this address; port 0 takes a free one. It needs the token if there is one, and is
    /// served over TLS if calls are. Default: no page.
    #[arg(long, env = "FLAMBEAU_HTTP", value_name = "HOST:PORT", value_parser = socket_address)]
    pub http: Option<SocketAddr>,
    /// Begin with a checkpoint: a run directory (its newest one), a checkpoint's folder, or the URL of
    /// either. Ignored if the run directory already has a run to resume.
    #[arg(long, env = "FLAMBEAU_RESTORE", value_name = "RUN_DIR|CHECKPOINT|URL")]
    pub restore: Option<String>,
    /// Resume a failed job of the run directory from its newest checkpoint. A job that failed because no
    /// worker could work is resumed without this.
    #[arg(long, env = "FLAMBEAU_RESUME_FAILED")]
    pub resume_failed: bool,
    /// Begin without a job, and wait for those that `flambeau submit` adds. Of the job's settings, only cluster.ps,
    /// cluster.workers and checkpoint.location count, for submitted jobs that leave them out. The folder of the jobs is
    /// --run-dir, by default runs/cluster. Implies --after-job wait.
    #[arg(long, env = "FLAMBEAU_NO_JOB")]
    pub no_job: bool,
    /// Limits of connections.
    #[command(flatten)]
    pub connections: ConnectionSettings,
    /// The settings of all processes.
    #[command(flatten)]
    pub process: ProcessSettings,
    /// Overrides of the job file.
    #[command(flatten)]
    pub job: JobFlags,
}

impl Settings {
    /// Reads the job. Flags override the file, which overrides the defaults.
    ///
    /// # Errors
    /// If the file cannot be read or the job makes no sense.
    pub fn read_job(&self) -> Result<Job, CoordinatorError> {
        read_job(self.job_file.as_deref(), self.job.clone())
    }
}

/// Reads the job of a file, or takes the default job, and applies the flags.
///
/// # Errors
/// If the file cannot be read or the job makes no sense.
pub fn read_job(path: Option<&Path>, flags: JobFlags) -> Result<Job, CoordinatorError> {
    let file = path.map(|path| {
        let text = std::fs::read_to_string(path).map_err(|error| CoordinatorError::JobFile {
            path: path.to_owned(),
            error,
        })?;
        // The flags may supply what the file lacks, so both are validated together.
        Ok::<_, CoordinatorError>(Job::parse(&text)?)
    });
    Ok(flags.over(file.transpose()?)?)
}
