//! The evaluator: evaluates each checkpoint of a job on the held-out samples as it comes. It only reads checkpoints, so it
//! never holds training up, and a job does not notice if it is killed.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use candle_core::{Device, Error};
use daemon::membership::{Coordinator, MembershipError};
use daemon::process::Process;
use shared_proto::job::{Job, run_dir};
use shared_proto::number::Number;
use shared_proto::view::JobPhase;
use shared_proto::wire::JobReply;
use worker::device::Choices;
use worker::local::{Trained, evaluate_trained};
use worker::registry::Registry;
use worker::tables::restored;

use crate::checkpoint::export_weights;
use crate::command::{block_on, rows};
use crate::error::CommandError;

/// The interval at which it looks for a newer checkpoint.
const LOOK: Duration = Duration::from_secs(1);

/// The file of the evaluations in the run directory, one JSON object a line.
const FILE: &str = "evaluator.jsonl";

/// The evaluator of a cluster.
pub(super) struct Evaluator {
    pub(super) coordinator: String,
    /// The time for which the coordinator may not answer.
    pub(super) patience: Duration,
    /// The place of the data's files here; overrides the job's.
    pub(super) data_dir: Option<PathBuf>,
    pub(super) device: Choices,
    pub(super) registry: Registry,
}

/// An evaluated checkpoint.
struct Evaluated {
    number: u64,
    steps: u64,
    metrics: Vec<(String, f64)>,
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

    /// Evaluates the newest checkpoint, unless it is the one that was evaluated last. Returns the run directory.
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
        let place = store.checkpoint_location(manifest.number);
        let dir = tempfile::tempdir().map_err(CommandError::file("a temporary folder"))?;
        let weights = dir.path().join(run_dir::MODEL);
        if let Err(error) = export_weights(&store, &manifest, &weights).await {
            tracing::warn!("{place} cannot be read, waiting for the next checkpoint: {error}");
            return Ok(folder);
        }
        let (registry, device) = (self.registry.clone(), device.clone());
        let evaluating = tokio::task::spawn_blocking(move || {
            let trained = Trained {
                job: &job,
                weights: &weights,
                rows: Box::new(|specs| {
                    let saved = block_on(rows(&place)).map_err(Error::wrap)?;
                    restored(specs, &saved)
                }),
                fitted: None,
            };
            evaluate_trained(&trained, &registry, &device)
        });
        let metrics = match evaluating.await {
            Ok(metrics) => metrics?.into_iter().collect(),
            Err(panicked) => {
                let reason = panicked.to_string();
                let name = "the evaluation".to_owned();
                return Err(CommandError::Start { name, reason });
            }
        };
        *newest = Some(manifest.number);
        let evaluated = Evaluated {
            number: manifest.number,
            steps: manifest.steps,
            metrics,
        };
        tracing::info!(checkpoint = evaluated.number, steps = evaluated.steps, metrics = ?evaluated.metrics, "evaluated");
        evaluated.append_to(&folder.join(FILE));
        Ok(folder)
    }
}

impl Evaluated {
    /// Appends it to the file of the run directory. The log has it, too, so a directory that cannot be written to is no error.
    fn append_to(&self, path: &std::path::Path) {
        use std::io::Write;
        let metrics = self
            .metrics
            .iter()
            .map(|(name, value)| (name, Number(*value)));
        let line = serde_json::json!({
            "checkpoint": self.number,
            "steps": self.steps,
            "metrics": metrics.collect::<BTreeMap<_, _>>(),
        });
        let file = std::fs::File::options()
            .create(true)
            .append(true)
            .open(path);
        if let Err(error) = file.and_then(|mut file| writeln!(file, "{line}")) {
            tracing::warn!(
                "the evaluation cannot be written to {}: {error}",
                path.display()
            );
        }
    }
}
