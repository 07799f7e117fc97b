//! The errors of commands.

use std::path::PathBuf;

use checkpoint::CheckpointError;
use coordinator::CoordinatorError;
use daemon::membership::MembershipError;
use model::input::InputError;
use network::security::SecurityError;
use ps_client::lookup::LookupError;
use replica::ReplicaError;
use replica::device::DeviceError;
use shared_proto::job::JobError;
use worker::alone::finder::RangeError;

/// The error of a command, or of a training that a program has begun.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CommandError {
    /// A setting of the job makes no sense.
    #[error(transparent)]
    Setting(#[from] JobError),
    /// A range of learning rates makes no sense.
    #[error(transparent)]
    Rates(#[from] RangeError),
    /// There is no trained model yet.
    #[error("nothing was trained yet; call fit first, or give the job the run_dir of a training")]
    Untrained,
    /// A run has kept no best weights.
    #[error(
        "{}: there is no best.safetensors; a training keeps the best weights if its job has [best], as with --set best.metric=loss or the callback Best. Where it has, the metric was NaN in each evaluation, and the workers' logs say so",
        run_dir.display()
    )]
    NoBest {
        /// The run directory.
        run_dir: PathBuf,
    },
    /// A file has no column with the name of the label.
    #[error("no column is called {label:?}; let --label name one of {columns}")]
    NoLabel {
        /// The name of the label.
        label: String,
        /// The names of the columns.
        columns: String,
    },
    /// The best weights were requested, but the model has tables, and only checkpoints have their rows.
    #[error(
        "the model has tables, and best.safetensors has no rows of them: only the last checkpoint has rows; use the last weights"
    )]
    BestWithTables,
    /// The run directory of a new training is that of the run that it continues.
    #[error(
        "{}: this is the run directory of the training to go on from, whose records a new training would overwrite; give the job another run_dir, or none",
        run_dir.display()
    )]
    SameRun {
        /// The run directory.
        run_dir: PathBuf,
    },
    /// The job cannot be read.
    #[error(transparent)]
    Job(#[from] CoordinatorError),
    /// A call to the coordinator has failed.
    #[error(transparent)]
    Membership(#[from] MembershipError),
    /// Certificates or the token cannot be used.
    #[error(transparent)]
    Security(#[from] SecurityError),
    /// Rows cannot be read from servers.
    #[error(transparent)]
    Lookup(#[from] LookupError),
    /// No cluster of this machine is found.
    #[error(
        "no cluster of this user runs on this machine: {} names none, and no coordinator answers at {usual}; give another one with --coordinator host:port",
        folder.display()
    )]
    NoCluster {
        /// The folder of running coordinators.
        folder: PathBuf,
        /// The address that was tried.
        usual: &'static str,
    },
    /// Several clusters run on this machine.
    #[error("several clusters run on this machine; give --coordinator with one of {0}")]
    SeveralClusters(String),
    /// No server of a job answers lookups.
    #[error(
        "no server of the job at {coordinator} answers reads of rows; start servers with --lookup-listen, or `flambeau train` with --lookups"
    )]
    NoLookups {
        /// The coordinator.
        coordinator: String,
    },
    /// A checkpoint cannot be used.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The rows were requested in the order of their updates, which their table does not count.
    #[error(
        "table {table:?} does not count the updates of its rows, since it evicts none; leave --by updates out"
    )]
    NoUpdates {
        /// The table.
        table: String,
    },
    /// The location to follow is a single checkpoint.
    #[error(
        "{location} is a single checkpoint, after which no other comes; with --follow, name the run, or leave --follow out"
    )]
    OneCheckpoint {
        /// The checkpoint.
        location: String,
    },
    /// The exports at a place are of another table.
    #[error("the exports in {output} are of table {table:?}; choose another folder")]
    OtherFeed {
        /// The place.
        output: String,
        /// The table of the exports.
        table: String,
    },
    /// Another process exports to the same place.
    #[error(
        "{place} is there already: another process exports to the same folder; let one of them do so"
    )]
    FeedTaken {
        /// The location of the manifest that the other process has written.
        place: String,
    },
    /// Some checkpoints are not as they were written.
    #[error("{} damaged:\n  {}", damages.len(), damages.join("\n  "))]
    Damaged {
        /// Descriptions of the damage.
        damages: Vec<String>,
    },
    /// The averages of a checkpoint that has none were requested.
    #[error(
        "{checkpoint}: its job keeps no moving averages (ema_decay) in checkpoints; leave --averages out for the weights"
    )]
    NoAverages {
        /// The checkpoint.
        checkpoint: String,
    },
    /// The checkpoint does not have the requested table.
    #[error(
        "{checkpoint}: it has no table {table:?}; {}",
        match tables.as_slice() {
            [] => "it has none".to_owned(),
            tables => format!("it has {}", tables.join(", ")),
        }
    )]
    NoTable {
        /// The checkpoint.
        checkpoint: String,
        /// The table.
        table: String,
        /// The names of the checkpoint's tables.
        tables: Vec<String>,
    },
    /// The name of the output file ends in neither `.parquet` nor `.safetensors`.
    #[error("{path:?}: the rows of a table go into a file that ends in .parquet or .safetensors")]
    UnknownFormat {
        /// The file.
        path: PathBuf,
    },
    /// The model or its data cannot be used.
    #[error(transparent)]
    Replica(#[from] ReplicaError),
    /// The device cannot be used.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A file cannot be read or written.
    #[error("{path:?}: {error}")]
    File {
        /// The file.
        path: PathBuf,
        /// The system's error.
        error: std::io::Error,
    },
    /// The content of a file is invalid.
    #[error("{path:?} is not valid: {reason}")]
    Content {
        /// The file.
        path: PathBuf,
        /// The reason why it is not valid.
        reason: String,
    },
    /// A process of the cluster could not be started.
    #[error("cannot start {name}: {reason}")]
    Start {
        /// The process.
        name: String,
        /// The reason.
        reason: String,
    },
    /// A process of the cluster died.
    #[error("{name} {status}; its last lines ({log}):\n{tail}", log = log.display())]
    Died {
        /// The process.
        name: String,
        /// The end of the process: an exit code or a signal.
        status: String,
        /// The log of the process.
        log: PathBuf,
        /// The last lines of the log.
        tail: String,
    },
    /// No running cluster can be reached.
    #[error(
        "{error}; start a cluster with `flambeau coordinator --no-job`, or train in this process without Trainer::on_cluster"
    )]
    NoRunningCluster {
        /// The error of the call.
        error: String,
    },
    /// A running cluster lacks members.
    #[error(
        "the cluster of the coordinator at {coordinator} has {what}, so the job was cancelled; {advice}"
    )]
    ClusterLacks {
        /// The coordinator.
        coordinator: String,
        /// The members that the cluster lacks.
        what: &'static str,
        /// What to do.
        advice: &'static str,
    },
    /// No worker of a running cluster can train a job.
    #[error(
        "no worker of the cluster can train {job:?}, so the job was cancelled ({troubles}); for a model or data of your own, bring workers (RunningCluster::bring_workers), or run the cluster's workers by a program that knows them (App)"
    )]
    NoWorkerCan {
        /// The job.
        job: String,
        /// The reasons that the workers report.
        troubles: String,
    },
    /// All workers that a program has brought to a cluster have ended with errors.
    #[error("the workers of this program have ended, so the job was cancelled; {errors}")]
    BroughtWorkersFailed {
        /// The end of the log of each worker.
        errors: String,
    },
    /// The job failed.
    #[error("the job failed: {0}")]
    JobFailed(String),
    /// A job of a long-lived cluster was cancelled.
    #[error("job {id} was cancelled")]
    JobCancelled {
        /// The job.
        id: u64,
    },
    /// An evaluator has nothing to read.
    #[error(
        "the job writes no checkpoints (checkpoint.enabled is false), so there is nothing to evaluate; leave the evaluator out, or enable checkpoints"
    )]
    NothingToEvaluate,
    /// The coordinator's answer lacks what was asked for.
    #[error("the coordinator's answer has no job; is it of the same release?")]
    NoAnswer,
    /// The user has interrupted the command.
    #[error("interrupted")]
    Interrupted,
    /// The user has stopped the job, and its workers have finished their data.
    #[error(
        "stopped after {samples} samples; the model so far and the curves are in {kept}; {next}"
    )]
    Stopped {
        /// The number of samples trained on.
        samples: u64,
        /// The run directory.
        kept: String,
        /// The command that continues the run, or the reason why it cannot be continued.
        next: String,
    },
    /// A picture cannot be drawn.
    #[error("cannot draw {path:?}: {reason}")]
    Plot {
        /// The file.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
}

impl From<InputError> for CommandError {
    fn from(error: InputError) -> Self {
        Self::Replica(error.into())
    }
}

impl CommandError {
    /// Returns a function that turns a system error into the error of a file.
    pub(crate) fn file(path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |error| Self::File { path, error }
    }
}
