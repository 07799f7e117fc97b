//! A training on a cluster that runs already: the job is submitted, and the program may bring workers.

use std::fs::OpenOptions;
use std::io::{ErrorKind, Write};
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Component, Path, PathBuf};
use std::time::{Duration, Instant};

use coordinator::Summary;
use daemon::membership::{Coordinator, MembershipError};
use model::registry::Registry;
use network::security::{Security, SecurityFiles};
use shared_proto::ids::Role;
use shared_proto::job::{Job, run_dir};
use shared_proto::wire::{JobState, QueuedJob, Status, SubmitJobReply, SubmitJobRequest};
use tempfile::TempDir;

use crate::cluster::{BroughtWorkers, Joining};
use crate::command::block_on;
use crate::error::CommandError;
use crate::progress::Progress;
use crate::status::{self, harmless};
use crate::train::Observer;

/// The interval at which the state of the job is fetched.
const LOOK: Duration = Duration::from_millis(200);

/// A long-lived cluster that runs already: `flambeau coordinator --no-job`, with servers and perhaps workers.
///
/// ```no_run
/// use flambeau::{Error, Job, RunningCluster, Trainer};
///
/// # fn main() -> Result<(), Error> {
/// let cluster = RunningCluster::at("alpha:7070").bring_workers(2);
/// let mut trainer = Trainer::new(Job::from_toml("epochs = 3")?).on_cluster(cluster);
/// println!("{:?}", trainer.fit()?.last("accuracy"));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct RunningCluster {
    coordinator: String,
    security: SecurityFiles,
    workers: u32,
    listen: IpAddr,
    patience: Duration,
    obeys_ctrl_c: bool,
}

impl RunningCluster {
    /// Returns the cluster of the coordinator at this address, as host:port.
    pub fn at(coordinator: impl Into<String>) -> Self {
        Self {
            coordinator: coordinator.into(),
            security: SecurityFiles::default(),
            workers: 0,
            listen: Ipv4Addr::LOCALHOST.into(),
            patience: Duration::from_secs(30),
            obeys_ctrl_c: false,
        }
    }

    /// Adds `workers` workers to the cluster, on threads of this process. They have the program's own models and data
    /// sources, which the workers of the cluster may lack. By default none are added, and the workers of the cluster
    /// train.
    #[must_use]
    pub fn bring_workers(mut self, workers: u32) -> Self {
        self.workers = workers;
        self
    }

    /// Sets the address on which brought workers accept links from other workers (default: loopback). In strategies
    /// without parameter servers, other hosts must be able to reach this address. With `0.0.0.0`, workers listen on all
    /// interfaces, and advertise the address of the one that leads to the coordinator.
    #[must_use]
    pub fn listen(mut self, interface: IpAddr) -> Self {
        self.listen = interface;
        self
    }

    /// Calls the cluster with these certificates and this token, which must be those of a worker. The command line
    /// names them with `--tls-ca`, `--tls-cert`, `--tls-key` and `--token-file`.
    #[must_use]
    pub fn security(mut self, files: SecurityFiles) -> Self {
        self.security = files;
        self
    }

    /// Sets the longest wait for a coordinator that does not answer, and for the first server and worker (default: 30
    /// seconds).
    #[must_use]
    pub fn patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// Cancels the job on Ctrl-C: the job ends in good order, and `fit` returns the measurements. A second Ctrl-C does
    /// not wait for the model. By default, the cluster's job takes no notice of Ctrl-C, which acts on the process as
    /// usual.
    #[must_use]
    pub fn cancel_on_ctrl_c(mut self) -> Self {
        self.obeys_ctrl_c = true;
        self
    }

    fn coordinator(&self) -> Result<Coordinator, CommandError> {
        let security = Security::load(&self.security)?;
        Ok(Coordinator::at(&self.coordinator, self.patience, security)?)
    }
}

/// A job to train on a running cluster.
pub(super) struct Submission<'a> {
    pub(super) cluster: &'a RunningCluster,
    pub(super) job: &'a Job,
    pub(super) registry: &'a Registry,
    pub(super) devices: &'a str,
    pub(super) restore: Option<&'a str>,
    /// The folder for the records, the job and the model.
    pub(super) dir: &'a Path,
    pub(super) shows_progress: bool,
}

/// Trains a job on a running cluster. If it fails, or the observer panics, the job is cancelled.
pub(super) fn train(
    submission: &Submission<'_>,
    observer: &mut dyn Observer,
) -> Result<Summary, CommandError> {
    block_on(submission.train(observer))
}

impl Submission<'_> {
    async fn train(&self, observer: &mut dyn Observer) -> Result<Summary, CommandError> {
        let cluster = self.cluster;
        let coordinator = cluster.coordinator()?;
        let submitted = self.submit(&coordinator).await?;
        let names = format!("trainer-{:08x}", rand::random::<u32>());
        let mut cancel = CancelUnlessEnded {
            cluster,
            id: Some(submitted.id),
        };
        self.write_job(&submitted)?;
        let workers = TempDir::new().map_err(CommandError::file("a folder for workers"))?;
        let mut run = Run {
            submission: self,
            coordinator: &coordinator,
            id: submitted.id,
            records: Records::new(self.dir)?,
            joining: Joining {
                coordinator: &cluster.coordinator,
                security: &cluster.security,
                workers: cluster.workers,
                listen: cluster.listen,
                devices: self.devices,
                folder: workers.path(),
                names: &names,
            },
            brought: None,
            progress: Progress::new(!self.shows_progress),
            since: None,
            stopping: false,
        };
        let (ended, summary) = tokio::select! {
            ended = run.follow(observer) => ended?,
            // The job is cancelled as its guard is dropped, unless the second wait ends it.
            _ = tokio::signal::ctrl_c(), if cluster.obeys_ctrl_c => {
                coordinator.cancel_job(submitted.id, false).await?;
                run.stopping = true;
                tokio::select! {
                    ended = run.follow(observer) => ended?,
                    // The second one does not wait for the model.
                    _ = tokio::signal::ctrl_c() => {
                        coordinator.cancel_job(submitted.id, true).await?;
                        run.follow(observer).await?
                    }
                }
            }
        };
        cancel.id = None;
        let stopping = run.stopping;
        drop(run);
        for place in places_of_model(workers.path(), Path::new(&submitted.run_dir)) {
            if has_model(&place, &ended.model_sha256) {
                fetch_model(&place, self.dir)?;
            }
        }
        match ended.state() {
            JobState::Failed => Err(CommandError::JobFailed(harmless(&ended.error).into_owned())),
            JobState::Cancelled if !stopping || summary.is_none() => {
                Err(CommandError::JobCancelled { id: ended.id })
            }
            _ => summary.ok_or(CommandError::NoAnswer),
        }
    }
}

impl Submission<'_> {
    /// Adds the job to the queue of the cluster.
    async fn submit(&self, coordinator: &Coordinator) -> Result<SubmitJobReply, CommandError> {
        let mut job = self.job.clone();
        job.run_dir = None;
        if self.cluster.workers > 0 {
            job.cluster.workers.get_or_insert(self.cluster.workers);
        }
        let request = SubmitJobRequest {
            job_toml: job.to_toml(),
            submission: rand::random::<u64>().max(1),
            restore: self.restore.unwrap_or_default().to_owned(),
        };
        let submitted = coordinator.submit_job(request).await;
        let submitted = submitted.map_err(|error| self.cluster.not_submitted(error))?;
        tracing::info!(
            id = submitted.id,
            folder = submitted.run_dir,
            "a job is submitted"
        );
        Ok(submitted)
    }

    /// Writes the job as it runs to the run directory. The job names the location to which the cluster writes
    /// checkpoints.
    fn write_job(&self, submitted: &SubmitJobReply) -> Result<(), CommandError> {
        let mut job = self.job.clone();
        job.run_dir = Some(self.dir.to_owned());
        let location = &mut job.checkpoint.location;
        location.get_or_insert(submitted.run_dir.clone());
        let file = self.dir.join(run_dir::JOB);
        std::fs::write(&file, job.to_toml()).map_err(CommandError::file(&file))
    }
}

/// A submitted job that is followed.
struct Run<'a> {
    submission: &'a Submission<'a>,
    coordinator: &'a Coordinator,
    id: u64,
    records: Records,
    joining: Joining<'a>,
    brought: Option<BroughtWorkers>,
    progress: Progress,
    /// The time at which the job was first seen running; `None` before.
    since: Option<Instant>,
    /// True once the job was told to end early.
    stopping: bool,
}

impl Run<'_> {
    /// Follows the job to its end. Returns its last state, and its summary if there is one.
    async fn follow(
        &mut self,
        observer: &mut dyn Observer,
    ) -> Result<(QueuedJob, Option<Summary>), CommandError> {
        loop {
            let jobs = self.coordinator.list_jobs(Some(self.id)).await?;
            let job = jobs.into_iter().next().ok_or(CommandError::NoAnswer)?;
            let has_ended = !matches!(job.state(), JobState::Queued | JobState::Running);
            let summary = self.records.fetch(self.coordinator, self.id).await?;
            if observer.look()? && !has_ended && !self.stopping {
                self.coordinator.cancel_job(self.id, false).await?;
                self.stopping = true;
            }
            if has_ended {
                self.progress.close();
                return Ok((job, summary));
            }
            if job.state() == JobState::Running {
                self.runs(&job).await?;
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Starts the program's workers for a running job, shows the progress, and fails if the cluster cannot train the
    /// job.
    async fn runs(&mut self, job: &QueuedJob) -> Result<(), CommandError> {
        let since = *self.since.get_or_insert_with(Instant::now);
        if self.brought.is_none() {
            let workers = BroughtWorkers::start(&self.joining, self.submission.registry)?;
            self.brought = Some(workers);
        }
        let Ok(status) = status::fetch(self.coordinator).await else {
            return Ok(());
        };
        self.progress.show(&status);
        if let Some(errors) = self.brought.as_mut().and_then(BroughtWorkers::all_failed) {
            return Err(CommandError::BroughtWorkersFailed { errors });
        }
        if job.steps > 0 {
            return Ok(());
        }
        let waits = since.elapsed() >= self.submission.cluster.patience;
        let has_servers = self.submission.job.strategy.name.has_servers();
        let lacks = |role| !live(&status, role);
        if waits && has_servers && lacks(Role::Ps) {
            return Err(CommandError::ClusterLacks {
                coordinator: self.joining.coordinator.to_owned(),
                what: "no parameter server",
                advice: "start `flambeau ps-server` with this coordinator",
            });
        }
        if self.joining.workers > 0 || !lacks(Role::Worker) {
            return Ok(());
        }
        match troubles(&status) {
            Some(troubles) => Err(CommandError::NoWorkerCan {
                job: job.name.clone(),
                troubles,
            }),
            None if waits => Err(CommandError::ClusterLacks {
                coordinator: self.joining.coordinator.to_owned(),
                what: "no worker",
                advice: "start `flambeau worker` with this coordinator, or bring workers (RunningCluster::bring_workers)",
            }),
            None => Ok(()),
        }
    }
}

/// Returns whether a live member has this role.
fn live(status: &Status, role: Role) -> bool {
    let of_role = |task: &&shared_proto::wire::TaskStatus| {
        let member = task.task.as_ref().and_then(|member| member.task.as_ref());
        member.is_some_and(|member| member.role() == role.into())
    };
    status.tasks.iter().filter(of_role).any(|task| task.alive)
}

/// Returns the reasons that members report why they cannot work; `None` if no member reports any.
fn troubles(status: &Status) -> Option<String> {
    let tasks = status.tasks.iter().filter(|task| !task.trouble.is_empty());
    let troubles: Vec<_> = tasks.map(|task| harmless(&task.trouble)).collect();
    (!troubles.is_empty()).then(|| troubles.join("; "))
}

impl RunningCluster {
    /// Returns the error for a job that could not be submitted.
    fn not_submitted(&self, error: MembershipError) -> CommandError {
        match error {
            MembershipError::Unreachable { .. } => CommandError::NoRunningCluster {
                error: error.to_string(),
            },
            other => other.into(),
        }
    }
}

/// The records of a job on its coordinator, copied into a folder of this machine.
struct Records {
    file: std::fs::File,
    path: PathBuf,
    read: u64,
}

impl Records {
    fn new(dir: &Path) -> Result<Self, CommandError> {
        let path = dir.join(run_dir::METRICS);
        let mut options = OpenOptions::new();
        let file = options.write(true).create(true).truncate(true).open(&path);
        Ok(Self {
            file: file.map_err(CommandError::file(&path))?,
            path,
            read: 0,
        })
    }

    /// Fetches the records since the last call. Returns the job's summary; `None` before the job has one.
    async fn fetch(
        &mut self,
        coordinator: &Coordinator,
        id: u64,
    ) -> Result<Option<Summary>, CommandError> {
        loop {
            let more = coordinator.read_records(id, self.read).await?;
            if more.lines.is_empty() {
                let path = &self.path;
                let read = |text: &str| {
                    serde_json::from_str(text).map_err(|error| CommandError::Content {
                        path: path.with_file_name(run_dir::SUMMARY),
                        reason: error.to_string(),
                    })
                };
                return Some(&*more.summary)
                    .filter(|s| !s.is_empty())
                    .map(read)
                    .transpose();
            }
            self.read += more.lines.len() as u64;
            let written = self.file.write_all(&more.lines);
            written.map_err(CommandError::file(&self.path))?;
        }
    }
}

/// Returns the folders in which the model may be. `folder` is the job's folder on the coordinator. A worker of this
/// program writes below `workers`, to the path of `folder` relative to the coordinator's own folder. This relative path
/// may be any end of `folder`, so all ends are returned. `folder` itself has the model if this machine shares it with
/// the cluster's workers.
fn places_of_model(workers: &Path, folder: &Path) -> Vec<PathBuf> {
    let mut below = PathBuf::new();
    let mut places = Vec::new();
    for part in folder.components().rev() {
        let Component::Normal(part) = part else {
            break;
        };
        below = Path::new(part).join(below);
        places.push(workers.join(&below));
    }
    places.push(folder.to_owned());
    places
}

/// Returns whether a folder has the model with this digest. Another cluster's run may be at the same path of this machine.
fn has_model(folder: &Path, digest: &str) -> bool {
    let read = std::fs::read(folder.join(run_dir::MODEL));
    read.is_ok_and(|bytes| checkpoint::sha256(&bytes) == digest)
}

/// Copies the model from the folder in which a worker has written it. Does nothing if `to` already has a model.
fn fetch_model(from: &Path, to: &Path) -> Result<(), CommandError> {
    if to.join(run_dir::MODEL).exists() {
        return Ok(());
    }
    // The weights come last: with them the model is whole.
    for file in [
        run_dir::TRANSFORMS,
        run_dir::BEST,
        run_dir::BEST_RECORD,
        run_dir::MODEL,
    ] {
        match std::fs::copy(from.join(file), to.join(file)) {
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(CommandError::file(from.join(file))(error)),
        }
    }
    Ok(())
}

/// Cancels a job when it is dropped, because its program does not follow it any longer.
struct CancelUnlessEnded<'a> {
    cluster: &'a RunningCluster,
    /// The job; `None` once it has ended.
    id: Option<u64>,
}

impl Drop for CancelUnlessEnded<'_> {
    fn drop(&mut self) {
        let Some(id) = self.id else {
            return;
        };
        // This thread's runtime may be the one that is unwinding.
        let cancelled = std::thread::scope(|scope| {
            let cancel = || {
                block_on(async {
                    let coordinator = self.cluster.coordinator()?;
                    Ok(coordinator.cancel_job(id, true).await?)
                })
            };
            scope.spawn(cancel).join()
        });
        if let Ok(Err(error)) = cancelled {
            tracing::warn!(id, "the job cannot be cancelled: {error}");
        }
    }
}
