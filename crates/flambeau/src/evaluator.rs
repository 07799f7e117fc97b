//! `flambeau evaluator`: a process that evaluates the checkpoints of a run as they come, beside the training.

use daemon::{noteln, outln};
use std::collections::BTreeMap;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use ::checkpoint::{CheckpointError, Manifest, Store, load, resolve};
use candle_core::Device;
use clap::Args;
use indicatif::ProgressBar;
use model::Metrics;
use model::registry::Registry;
use model::tables::SavedTables;
use replica::ReplicaError;
use replica::device;
use serde::{Deserialize, Serialize};
use shared_proto::job::{Job, run_dir};
use shared_proto::number::Number;
use tempfile::TempDir;
use worker::alone::evaluator::Evaluator;

use crate::checkpoint::{Output, Values, write};
use crate::command::{block_on, saved_tables};
use crate::error::CommandError;

/// The name of the file in a run directory that has the results.
pub(crate) const RECORD: &str = "evaluator.jsonl";

#[derive(Clone, Debug, Args)]
pub(crate) struct Arguments {
    /// A run directory, a folder of checkpoints, or the URL of one. It need not exist yet.
    #[arg(value_name = "RUN_DIR|FOLDER|URL")]
    location: String,
    /// The folder or file of the data; overrides the job's.
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
    /// The device to compute on: auto, cpu or cuda:N.
    #[arg(long, default_value = "auto")]
    device: device::Choice,
    /// The pause in seconds before it looks for a newer checkpoint.
    #[arg(long, default_value_t = 2.0, value_name = "SECONDS", value_parser = seconds)]
    every: f64,
    /// The file to which results are appended, one JSON object a line. Default: evaluator.jsonl in a run directory.
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
    /// End after the newest checkpoint, instead of waiting for the end of the run.
    #[arg(long)]
    once: bool,
    /// One JSON object a line on stdout.
    #[arg(long)]
    json: bool,
}

fn seconds(text: &str) -> Result<f64, String> {
    let seconds = text.parse().ok();
    let seconds = seconds.filter(|seconds| (0.1..=86_400.0).contains(seconds));
    seconds.ok_or_else(|| format!("{text:?} is no time in seconds from 0.1 to 86400"))
}

/// The result of evaluating a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Line {
    /// The run that wrote the checkpoint.
    #[serde(default)]
    run: String,
    checkpoint: u64,
    /// The number of steps that the checkpoint contains.
    steps: u64,
    metrics: BTreeMap<String, Number>,
}

impl Line {
    pub(crate) fn new(of: &Manifest, metrics: Metrics) -> Self {
        let metrics = metrics.into_iter();
        Self {
            run: of.run.clone(),
            checkpoint: of.number,
            steps: of.steps,
            metrics: metrics.map(|(name, value)| (name, Number(value))).collect(),
        }
    }

    /// Returns whether the line is of this run.
    fn is_of(&self, run: &str) -> bool {
        self.run == run
    }

    fn to_json(&self) -> String {
        serde_json::to_string(self)
            .unwrap_or_else(|error| unreachable!("a result is plain data: {error}"))
    }

    /// Appends the line to a file.
    pub(crate) fn append_to(&self, path: &Path) -> Result<(), CommandError> {
        let append = || {
            let mut options = std::fs::OpenOptions::new();
            let mut file = options.create(true).append(true).read(true).open(path)?;
            // A process that was killed may have left a line without an end.
            let mut last = [b'\n'];
            if file.seek(SeekFrom::End(-1)).is_ok() {
                file.read_exact(&mut last)?;
            }
            let begin = if last == *b"\n" { "" } else { "\n" };
            file.write_all(format!("{begin}{}\n", self.to_json()).as_bytes())
        };
        append().map_err(CommandError::file(path))
    }
}

/// The parts of a checkpoint that an evaluation needs.
pub(crate) struct Fetched {
    pub(crate) job: Job,
    weights: PathBuf,
    tables: SavedTables,
    /// The folder of the weights.
    _dir: TempDir,
}

impl Fetched {
    /// Reads a checkpoint: the moving averages of its weights, if its job keeps them, and the rows of its tables.
    ///
    /// # Errors
    /// If the checkpoint cannot be read; it may have been deleted because a newer one has replaced it.
    pub(crate) async fn read(store: &Store, manifest: &Manifest) -> Result<Self, CommandError> {
        let place = store.checkpoint_location(manifest.number);
        let job = Job::parse(&manifest.job_toml).map_err(|error| CommandError::Content {
            path: place.clone().into(),
            reason: error.to_string(),
        })?;
        let values = match job.ema_decay {
            Some(_) => Values::averages(store, manifest)?,
            None => Values::Weights,
        };
        let dir = tempfile::tempdir().map_err(CommandError::file("a temporary folder"))?;
        let weights = dir.path().join(run_dir::MODEL);
        let file = Output::create(&weights, true)?;
        write(store, manifest, &values, file, &ProgressBar::hidden()).await?;
        let tables = match manifest.has_tables() {
            true => saved_tables(&place).await?,
            false => SavedTables::new(),
        };
        Ok(Self {
            job,
            weights,
            tables,
            _dir: dir,
        })
    }

    /// Evaluates the checkpoint with `evaluator`, which has the model of the checkpoint's job.
    ///
    /// # Errors
    /// If the data or the model cannot be used.
    pub(crate) fn evaluate(&self, evaluator: &mut Evaluator) -> Result<Metrics, ReplicaError> {
        evaluator.evaluate(&self.weights, &self.tables)
    }
}

/// Evaluates the newest checkpoint, and then the newest after each evaluation, until the run has ended.
///
/// # Errors
/// If a checkpoint, the data or the model cannot be used.
pub(crate) fn run(arguments: &Arguments, registry: &Registry) -> Result<(), CommandError> {
    // The training comes first where both share a machine.
    daemon::lower_priority();
    let device = device::open(arguments.device)?;
    let mut beside = Beside::new(arguments, registry, device);
    block_on(beside.follow())
}

/// An evaluator beside a run.
struct Beside<'a> {
    arguments: &'a Arguments,
    registry: &'a Registry,
    device: Device,
    /// The number of the newest checkpoint of `run` that was evaluated; `None` if none was.
    done: Option<u64>,
    /// The run that wrote the newest checkpoint; empty until a checkpoint is found.
    run: String,
    /// The evaluator with the model of the run; `None` until a checkpoint is read.
    evaluator: Option<Evaluator>,
}

impl<'a> Beside<'a> {
    fn new(arguments: &'a Arguments, registry: &'a Registry, device: Device) -> Self {
        Self {
            arguments,
            registry,
            device,
            done: None,
            run: String::new(),
            evaluator: None,
        }
    }

    /// Returns the file for the results. By default it is in the run directory; `None` if the location is not a run
    /// directory.
    fn record(&self) -> Option<PathBuf> {
        let run = Path::new(&self.arguments.location);
        let usual = || run.join(run_dir::JOB).is_file().then(|| run.join(RECORD));
        self.arguments.record.clone().or_else(usual)
    }

    async fn follow(&mut self) -> Result<(), CommandError> {
        let mut announced = false;
        loop {
            // First, so that no checkpoint comes after the newest one.
            let has_ended = self.has_ended().await;
            let evaluated = self.next().await;
            match evaluated {
                Ok(_) if self.arguments.once => return Ok(()),
                Ok(true) => continue,
                Ok(false) if has_ended => return Ok(()),
                Ok(false) => {}
                // There is none yet.
                Err(CommandError::Checkpoint(CheckpointError::NotFound(why))) => {
                    if self.arguments.once || self.has_failed() {
                        return Err(CheckpointError::NotFound(why).into());
                    }
                }
                Err(CommandError::Checkpoint(error))
                    if error.is_retryable() && !self.arguments.once =>
                {
                    noteln!("{error}; trying again every {} s", self.arguments.every);
                }
                Err(error) => return Err(error),
            }
            if !std::mem::replace(&mut announced, true) {
                noteln!("waiting for checkpoints at {}", self.arguments.location);
            }
            tokio::time::sleep(Duration::from_secs_f64(self.arguments.every)).await;
        }
    }

    /// Returns whether the run has ended, which its summary shows. It is called only while there is no checkpoint: a run that
    /// has ended will not write one.
    fn has_failed(&self) -> bool {
        let run = Path::new(&self.arguments.location);
        run.join(run_dir::SUMMARY).exists()
    }

    /// Returns whether the run has given up its location, so that no checkpoint follows.
    async fn has_ended(&self) -> bool {
        let store = resolve(&self.arguments.location).await;
        match store {
            Ok((store, _)) => store.is_released().await.unwrap_or(false),
            Err(_) => false,
        }
    }

    /// Evaluates the newest checkpoint. Returns whether there was a new one.
    async fn next(&mut self) -> Result<bool, CommandError> {
        loop {
            let (store, manifest) = load(&self.arguments.location).await?;
            if self.run != manifest.run {
                // Another run may have taken over the location.
                self.run.clone_from(&manifest.run);
                self.evaluator = None;
                let record = self.record();
                self.done = record.map_or(Ok(None), |record| last_of(&record, &manifest.run))?;
            }
            if self.done.is_some_and(|done| done >= manifest.number) {
                return Ok(false);
            }
            let line = match self.evaluate(&store, &manifest).await {
                // It was deleted while it was read, so there is a newer one.
                Err(CommandError::Checkpoint(_)) if store.is_deleted(manifest.number).await => {
                    continue;
                }
                line => line?,
            };
            self.tell(&line)?;
            self.done = Some(manifest.number);
            return Ok(true);
        }
    }

    async fn evaluate(&mut self, store: &Store, manifest: &Manifest) -> Result<Line, CommandError> {
        let fetched = Fetched::read(store, manifest).await?;
        let evaluator = match &mut self.evaluator {
            Some(evaluator) => evaluator,
            none => {
                let mut job = fetched.job.clone();
                if let Some(dir) = &self.arguments.data_dir {
                    job.data.dir = Some(dir.clone());
                }
                none.insert(Evaluator::open(&job, self.registry, &self.device)?)
            }
        };
        Ok(Line::new(manifest, fetched.evaluate(evaluator)?))
    }

    /// Records and prints a result.
    fn tell(&self, line: &Line) -> Result<(), CommandError> {
        if let Some(path) = self.record() {
            line.append_to(&path)?;
        }
        if self.arguments.json {
            outln!("{}", line.to_json());
        } else {
            let metrics = line.metrics.iter();
            let metrics: String = metrics
                .map(|(name, value)| format!("  {name} {:.4}", value.0))
                .collect();
            outln!(
                "checkpoint {:>4}, step {:>7}:{metrics}",
                line.checkpoint,
                line.steps
            );
        }
        Ok(())
    }
}

/// Returns the number of the newest checkpoint of a run for which `record` has a result; `None` if it has none. Lines
/// that were cut short when the process was killed are skipped.
fn last_of(record: &Path, run: &str) -> Result<Option<u64>, CommandError> {
    match std::fs::read_to_string(record) {
        Ok(text) => {
            let lines = text
                .lines()
                .filter_map(|line| serde_json::from_str::<Line>(line).ok());
            let of_run = lines.filter(|line| line.is_of(run));
            Ok(of_run.map(|line| line.checkpoint).max())
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(CommandError::file(record)(error)),
    }
}
