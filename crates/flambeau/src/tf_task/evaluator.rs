//! The evaluator: evaluates new checkpoints of a job on the held-out samples. It only reads checkpoints, so it never
//! delays the training, and the job goes on if the evaluator is killed.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use candle_core::Device;
use daemon::membership::{Coordinator, MembershipError};
use daemon::process::Process;
use model::registry::Registry;
use replica::device::Choices;
use shared_proto::job::{Job, run_dir};
use shared_proto::view::JobPhase;
use shared_proto::wire::JobReply;

use crate::error::CommandError;
use crate::evaluator::{Fetched, Line, RECORD};

/// The interval at which the evaluator looks for a newer checkpoint.
const LOOK: Duration = Duration::from_secs(1);

/// The evaluator of a cluster.
pub(super) struct Evaluator {
    pub(super) coordinator: String,
    /// The longest time for which the coordinator may not answer.
    pub(super) patience: Duration,
    /// The folder or file of the data on this machine; overrides the job's.
    pub(super) data_dir: Option<PathBuf>,
    pub(super) device: Choices,
    pub(super) registry: Registry,
}

impl Evaluator {
    /// Evaluates checkpoints until the job has ended and its last one is evaluated, or the process is told to end.
    ///
    /// # Errors
    /// If the coordinator cannot be reached at first, the job has no checkpoints, or the data or the model cannot be used.
    pub(super) async fn run(self, process: &Process) -> Result<(), CommandError> {
        let devices = self.device.open()?;
        let device = devices.into_iter().next().unwrap_or(Device::Cpu);
        let security = process.security.clone();
        let coordinator = Coordinator::at(&self.coordinator, self.patience, security)?;
        process.announce(None);
        process.readiness.set(true);
        let follow = self.follow(coordinator, device);
        let followed = process.shutdown.run_until_cancelled(follow).await;
        followed.unwrap_or(Ok(()))
    }

    async fn follow(&self, first: Coordinator, device: Device) -> Result<(), CommandError> {
        // The chief may start much later.
        let mut reply = first.job().await?;
        let mut coordinator = first;
        let mut newest = None;
        let mut heard = Instant::now();
        loop {
            let ended = matches!(reply.phase(), JobPhase::Done | JobPhase::Failed);
            // Looked for after the phase, so that the last checkpoint of a job is found.
            let folder = self.evaluate_newest(&reply, &device, &mut newest).await?;
            if ended {
                tracing::info!("the job has ended");
                return Ok(());
            }
            tokio::time::sleep(LOOK).await;
            coordinator = coordinator.with_patience(LOOK);
            match coordinator.job().await {
                Ok(newer) => {
                    if newer.run != reply.run {
                        newest = None;
                    }
                    (reply, heard) = (newer, Instant::now());
                }
                Err(MembershipError::NoJob(_)) => heard = Instant::now(),
                // The coordinator has ended with its job, or is away.
                Err(MembershipError::Unreachable { .. }) => {
                    let ended = folder.join(run_dir::SUMMARY).exists();
                    if ended || heard.elapsed() > self.patience {
                        reply.phase = JobPhase::Done.into();
                    }
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Evaluates the newest checkpoint, unless it is no newer than `newest`, the last that was evaluated. Returns the
    /// run directory.
    async fn evaluate_newest(
        &self,
        reply: &JobReply,
        device: &Device,
        newest: &mut Option<u64>,
    ) -> Result<PathBuf, CommandError> {
        let mut job = Job::from_toml(&reply.job_toml).map_err(MembershipError::from)?;
        if !job.checkpoint.enabled {
            return Err(CommandError::NothingToEvaluate);
        }
        if let Some(dir) = &self.data_dir {
            job.data.dir = Some(dir.clone());
        }
        let folder = job.run_dir.clone().unwrap_or_default();
        let beside = || folder.join(run_dir::CHECKPOINTS).display().to_string();
        let location = job.checkpoint.location.clone().unwrap_or_else(beside);
        let (store, manifest) = match ::checkpoint::load(&location).await {
            Ok(loaded) => loaded,
            // There is none yet, or it was deleted because a newer one is there.
            Err(error) => {
                tracing::debug!("no checkpoint to evaluate at present: {error}");
                return Ok(folder);
            }
        };
        if newest.is_some_and(|newest| manifest.number <= newest) {
            return Ok(folder);
        }
        let fetched = match Fetched::read(&store, &manifest).await {
            Ok(fetched) => fetched,
            Err(error) => {
                let number = manifest.number;
                tracing::warn!(
                    number,
                    "a checkpoint cannot be read, waiting for the next one: {error}"
                );
                return Ok(folder);
            }
        };
        let (registry, device) = (self.registry.clone(), device.clone());
        let evaluating = tokio::task::spawn_blocking(move || {
            let mut evaluator =
                worker::alone::evaluator::Evaluator::open(&job, &registry, &device)?;
            fetched.evaluate(&mut evaluator)
        });
        let metrics = match evaluating.await {
            Ok(metrics) => metrics?,
            Err(panicked) => {
                let reason = panicked.to_string();
                let name = "the evaluation".to_owned();
                return Err(CommandError::Start { name, reason });
            }
        };
        *newest = Some(manifest.number);
        tracing::info!(
            checkpoint = manifest.number,
            steps = manifest.steps,
            ?metrics,
            "evaluated"
        );
        // The log has it, too, so a folder that cannot be written to is no error.
        let line = Line::new(&manifest, metrics);
        if let Err(error) = line.append_to(&folder.join(RECORD)) {
            tracing::warn!("the evaluation cannot be recorded: {error}");
        }
        Ok(folder)
    }
}
