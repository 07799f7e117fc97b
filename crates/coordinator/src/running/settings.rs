//! The settings of the process, and the job that they name.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use daemon::job_flags::JobFlags;
use daemon::settings::{AfterJob, ConnectionSettings, LocationSettings, ProcessSettings};
use network::transport::socket_address;
use shared_proto::job::Job;
use storage::AllowedLocations;

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
    /// --run-dir, by default runs/cluster. A coordinator with --after-job wait and no job needs no --no-job.
    #[arg(long, env = "FLAMBEAU_NO_JOB")]
    pub no_job: bool,
    /// The places that submitted jobs may use.
    #[command(flatten)]
    pub locations: LocationSettings,
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
    /// Returns whether the coordinator begins without a job: because of `--no-job`, or because it was given no job and
    /// is to wait for the next one after its job (`--after-job wait`).
    pub(crate) fn begins_without_job(&self, after_job: Option<AfterJob>) -> bool {
        let has_job = self.job_file.is_some() || self.job.name_a_job();
        self.no_job || (after_job == Some(AfterJob::Wait) && !has_job)
    }

    /// Returns the locations that submitted jobs may use: those of the settings, the coordinator's own folder `dir`,
    /// and the checkpoint location of `job`.
    pub(crate) fn allowed_locations(
        &self,
        dir: &Path,
        job: &Job,
    ) -> Result<AllowedLocations, CoordinatorError> {
        let given = self.locations.allow_location.iter().map(String::as_str);
        let allowed = AllowedLocations::read(given);
        let allowed = allowed.and_then(|allowed| allowed.and(&dir.display().to_string()));
        let allowed = allowed.and_then(|allowed| match &job.checkpoint.location {
            Some(own) => allowed.and(own),
            None => Ok(allowed),
        });
        allowed.map_err(CoordinatorError::AllowLocation)
    }

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
