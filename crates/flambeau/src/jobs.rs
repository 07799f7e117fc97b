//! `flambeau submit`, `jobs` and `cancel`: the jobs of a long-lived cluster.
//!
//! - `shown`: jobs as a table, a line or JSON

mod shown;

use daemon::{noteln, outln};
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use coordinator::read_job;
use daemon::job_flags::JobFlags;
use daemon::membership::Coordinator;
use daemon::settings::SecuritySettings;
use serde_json::json;
use shared_proto::wire::{JobState, QueuedJob, SubmitJobRequest};

use crate::command::block_on;
use crate::error::CommandError;
use crate::status::{harmless, local};
use shown::{as_json, line, progress, table};

/// The interval at which the state of a job is fetched.
const LOOK: Duration = Duration::from_millis(500);

/// The longest time for which the coordinator may not answer while a command waits for a job.
const AWAY: Duration = Duration::from_secs(600);

/// The coordinator of the cluster.
#[derive(Clone, Debug, Args)]
struct Place {
    /// The coordinator, as host:port. Default: the cluster of this user on this machine.
    #[arg(long, env = "FLAMBEAU_COORDINATOR")]
    coordinator: Option<String>,
    /// The time for which to call a coordinator that does not answer, in seconds.
    #[arg(long, default_value_t = 10)]
    patience_seconds: u64,
    #[command(flatten)]
    security: SecuritySettings,
}

impl Place {
    fn coordinator(&self, patience: Duration) -> Result<Coordinator, CommandError> {
        let security = self.security.load()?;
        let address = match &self.coordinator {
            Some(address) => address.clone(),
            None => local::coordinator()?,
        };
        Ok(Coordinator::at(&address, patience, security)?)
    }

    fn patience(&self) -> Duration {
        Duration::from_secs(self.patience_seconds)
    }
}

#[derive(Clone, Debug, Args)]
pub(crate) struct Submit {
    /// The job file; `flambeau job init` writes one.
    #[arg(value_name = "JOB.toml")]
    file: PathBuf,
    /// Any setting of the job file, as in epochs=3 or data.dir=/data/mnist; may be given more than once, or several
    /// separated by semicolons.
    #[arg(long, value_delimiter = ';', value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Begin with a checkpoint, where the coordinator finds it: a run directory (its newest one), a checkpoint's folder, or
    /// the URL of either.
    #[arg(long, value_name = "RUN_DIR|CHECKPOINT|URL")]
    restore: Option<String>,
    /// Wait for the end of the job. The exit code is 0 if it is done, and 1 if it failed or was cancelled.
    #[arg(long)]
    wait: bool,
    /// Print one JSON object on stdout, and nothing else.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    place: Place,
}

#[derive(Clone, Debug, Args)]
pub(crate) struct List {
    /// The only job to show.
    #[arg(value_name = "ID")]
    id: Option<u64>,
    /// A JSON object instead of a table.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    place: Place,
}

#[derive(Clone, Debug, Args)]
pub(crate) struct Cancel {
    /// The job's id, as `flambeau jobs` shows it. A running job finishes the data that its workers hold, and writes its
    /// model and a checkpoint. A repeated call changes nothing.
    #[arg(value_name = "ID")]
    id: u64,
    /// End a running job at once, without its model and a last checkpoint.
    #[arg(long)]
    now: bool,
    /// One JSON object instead of a line.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    place: Place,
}

pub(crate) fn submit(arguments: Submit) -> Result<(), CommandError> {
    // Flags of the environment belong to the coordinator's own job, and so do not count here.
    let flags = JobFlags {
        set: arguments.set,
        ..JobFlags::default()
    };
    let mut job = read_job(Some(&arguments.file), flags)?;
    if let Some(dir) = job.run_dir.take() {
        let dir = dir.display();
        noteln!("flambeau: the coordinator gives the job a folder; run_dir {dir} does not count");
    }
    let request = SubmitJobRequest {
        job_toml: job.to_toml(),
        submission: rand::random::<u64>().max(1),
        restore: arguments.restore.unwrap_or_default(),
    };
    block_on(async {
        let coordinator = arguments.place.coordinator(arguments.place.patience())?;
        let reply = coordinator.submit_job(request).await?;
        let (id, name, folder) = (reply.id, &job.name, &reply.run_dir);
        if !arguments.json {
            outln!(
                "job {id} {name:?} is queued; its folder is {}",
                harmless(folder)
            );
        } else if !arguments.wait {
            let object = json!({ "id": id, "name": name, "state": "queued", "run_dir": folder });
            outln!("{object}");
        }
        match arguments.wait {
            true => wait(&arguments.place.coordinator(AWAY)?, id, arguments.json).await,
            false => Ok(()),
        }
    })
}

/// Follows a job to its end.
async fn wait(coordinator: &Coordinator, id: u64, as_one_object: bool) -> Result<(), CommandError> {
    let job = tokio::select! {
        ended = ended(coordinator, id, as_one_object) => ended?,
        // Also while the coordinator does not answer.
        _ = tokio::signal::ctrl_c() => {
            noteln!("flambeau: job {id} goes on; `flambeau cancel {id}` ends it");
            return Err(CommandError::Interrupted);
        }
    };
    match as_one_object {
        true => outln!("{}", as_json(&job)),
        false => outln!("{}", line(&job)),
    }
    match job.state() {
        JobState::Failed => Err(CommandError::JobFailed(harmless(&job.error).into_owned())),
        JobState::Cancelled => Err(CommandError::JobCancelled { id }),
        _ => Ok(()),
    }
}

/// Waits for the end of a job. Prints the job's progress unless `as_one_object` is true.
async fn ended(
    coordinator: &Coordinator,
    id: u64,
    as_one_object: bool,
) -> Result<QueuedJob, CommandError> {
    let mut last = String::new();
    loop {
        let job = only(coordinator.list_jobs(Some(id)).await?)?;
        if !matches!(job.state(), JobState::Queued | JobState::Running) {
            return Ok(job);
        }
        let now = progress(&job);
        if !as_one_object && now != last {
            noteln!("{now}");
            last = now;
        }
        tokio::time::sleep(LOOK).await;
    }
}

pub(crate) fn list(arguments: &List) -> Result<(), CommandError> {
    block_on(async {
        let coordinator = arguments.place.coordinator(arguments.place.patience())?;
        let jobs = coordinator.list_jobs(arguments.id).await?;
        if arguments.json {
            let jobs: Vec<_> = jobs.iter().map(as_json).collect();
            outln!("{}", json!({ "jobs": jobs }));
        } else if jobs.is_empty() {
            outln!("no jobs; `flambeau submit JOB.toml` adds one");
        } else {
            outln!("{}", table(&jobs));
        }
        Ok(())
    })
}

pub(crate) fn cancel(arguments: &Cancel) -> Result<(), CommandError> {
    block_on(async {
        let coordinator = arguments.place.coordinator(arguments.place.patience())?;
        let job = coordinator.cancel_job(arguments.id, arguments.now).await?;
        let job = only(job.into_iter().collect())?;
        match arguments.json {
            true => outln!("{}", as_json(&job)),
            false => outln!("{}", line(&job)),
        }
        Ok(())
    })
}

/// Returns the only job of an answer.
fn only(jobs: Vec<QueuedJob>) -> Result<QueuedJob, CommandError> {
    jobs.into_iter().next().ok_or(CommandError::NoAnswer)
}
