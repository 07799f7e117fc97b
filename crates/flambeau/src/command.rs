//! Parts that several commands share: the arguments of a job, the files of a finished run, and the runtime of commands
//! that call other processes.

use std::path::{Path, PathBuf};

use candle_core::Error;
use clap::Args;
use daemon::job_flags::JobFlags;
use model::input::Fitted;
use model::tables::{SavedTables, restored};
use replica::ReplicaError;
use shared_proto::blocks::BlockId;
use shared_proto::job::{Job, run_dir};
use shared_proto::task;
use worker::alone::local::Trained;

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

/// The weights of a run that are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Weights {
    /// The final weights.
    Last,
    /// The weights of the best evaluation.
    Best,
}

impl Weights {
    /// Returns the best weights if `asked` is true, otherwise the final weights.
    pub(crate) fn best_if(asked: bool) -> Self {
        match asked {
            true => Self::Best,
            false => Self::Last,
        }
    }

    /// Returns the name of the weights' file in a run directory.
    pub(crate) fn file(self) -> &'static str {
        match self {
            Self::Last => run_dir::MODEL,
            Self::Best => run_dir::BEST,
        }
    }
}

/// The files of a run that has ended.
pub(crate) struct FinishedRun {
    /// The job as it ran, except for the folder of the data if another one is given.
    job: Job,
    which: Weights,
    /// The file of the weights.
    weights: PathBuf,
    /// The location of the checkpoints. The last checkpoint has the rows of tables that belong to the final weights.
    checkpoints: String,
    /// The parameters that were fitted to the training data; `None` if the run directory has no file of them.
    fitted: Option<Fitted>,
}

impl FinishedRun {
    /// Returns the job, the weights, the rows and the fitted parameters of the training.
    pub(crate) fn trained(&self) -> Trained<'_> {
        Trained {
            job: &self.job,
            weights: &self.weights,
            rows: Box::new(|specs| {
                if self.which == Weights::Best {
                    return Err(Error::wrap(CommandError::BestWithTables));
                }
                let saved = block_on(saved_tables(&self.checkpoints)).map_err(Error::wrap)?;
                restored(specs, &saved)
            }),
            fitted: self.fitted.as_ref(),
        }
    }

    /// Returns the file of the weights.
    pub(crate) fn weights(&self) -> &Path {
        &self.weights
    }

    /// Reads the files of a run. `data` replaces the folder of the data in the run's job.
    ///
    /// # Errors
    /// If the job or the fitted parameters cannot be read, or if the best weights are wanted and the run has kept none.
    pub(crate) fn read(
        dir: &Path,
        which: Weights,
        data: Option<&Path>,
    ) -> Result<Self, CommandError> {
        let weights = dir.join(which.file());
        if which == Weights::Best && !weights.is_file() {
            return Err(CommandError::NoBest {
                run_dir: dir.to_owned(),
            });
        }
        let path = dir.join(run_dir::JOB);
        let text = std::fs::read_to_string(&path).map_err(CommandError::file(&path))?;
        let mut job = Job::parse(&text).map_err(|error| CommandError::Content {
            path,
            reason: error.to_string(),
        })?;
        if let Some(data) = data {
            job.data.dir = Some(data.to_owned());
        }
        let transforms = dir.join(run_dir::TRANSFORMS);
        let checkpoints = job.checkpoint.location.clone();
        let checkpoints = checkpoints.unwrap_or_else(|| dir.display().to_string());
        let fitted = transforms.is_file().then(|| Fitted::load(&transforms));
        Ok(Self {
            job,
            which,
            weights,
            checkpoints,
            fitted: fitted.transpose().map_err(ReplicaError::from)?,
        })
    }
}

/// Returns the rows of tables in the newest checkpoint at a location.
pub(crate) async fn saved_tables(location: &str) -> Result<SavedTables, CommandError> {
    let (store, manifest) = checkpoint::load(location).await?;
    let mut tables = SavedTables::new();
    let first = manifest.variables.len() as u32;
    let add = |id: BlockId, rows| {
        let spec = &manifest.tables[(id.variable - first) as usize];
        let buckets = tables.entry(spec.name.clone()).or_default();
        buckets.entry(id.index).or_default().push(rows);
        Ok::<_, CommandError>(())
    };
    let of_tables = |id: BlockId| manifest.is_table(id.variable);
    store.read_rows(&manifest, of_tables, add, |_| {}).await?;
    Ok(tables)
}

/// Runs a command that calls other processes, on a runtime with one thread.
pub(crate) fn block_on<T>(
    future: impl Future<Output = Result<T, CommandError>>,
) -> Result<T, CommandError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(CommandError::file("the runtime"))?;
    task::block_on(&runtime, future)
}

/// Shows warnings about the data on stderr.
pub(crate) fn show_warnings() {
    // A program that calls this as a library may have a log of its own.
    let _ = daemon::process::log_to_stderr("warn", daemon::settings::LogFormat::Text);
}
