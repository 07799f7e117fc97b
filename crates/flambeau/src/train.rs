//! `flambeau train`: runs a whole cluster on this machine, from its start to its end.
//!
//! - `follow`: starts the cluster, follows its job, restarts processes that are killed
//! - `resume`: `flambeau resume`
//! - `signals`: the signals that end a job early
//! - `outcome`: the outcome of a run, and how it is shown

mod follow;
mod outcome;
pub(crate) mod resume;
mod signals;

use daemon::{noteln, outln};
use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use coordinator::read_job;
use model::registry::Registry;
use ps_server::RowSettings;
use replica::DeviceReplicas;
use replica::device::{Choices, DeviceError, MemoryLimit};
use shared_proto::job::{Job, run_dir};

use self::follow::watch;
pub(crate) use self::follow::{Observer, Watch};
use self::outcome::{Outcome, json, next, next_dir, shown, stale, table};
use crate::cluster::{Plan, Roles, Transport};
use crate::command::{JobArguments, block_on};
use crate::error::CommandError;
use crate::report;

/// The number of parameter servers of a job that gives none.
const DEFAULT_PS: u32 = 2;

#[derive(Clone, Debug, Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    pub(crate) job: JobArguments,
    /// Begin with a checkpoint: a run directory (its newest one), a checkpoint's folder, or the URL of
    /// either. Without a job file, a run directory brings its job along.
    #[arg(long, value_name = "RUN_DIR|CHECKPOINT|URL")]
    pub(crate) restore: Option<String>,
    #[command(flatten)]
    pub(crate) options: Options,
}

/// How the cluster of a job runs, and how its outcome is shown.
#[derive(Clone, Debug, Args)]
pub(crate) struct Options {
    /// Print one JSON object on stdout at the end, and nothing else.
    #[arg(long)]
    pub(crate) json: bool,
    /// The devices on which each worker computes, separated by commas: auto, cpu or cuda:N. Several share out the samples of
    /// each step, or hold the stages of a model (model-parallel); cpu may be named several times.
    #[arg(
        long,
        visible_alias = "devices",
        env = "FLAMBEAU_DEVICE",
        default_value = "auto"
    )]
    pub(crate) device: String,
    /// The most memory of each GPU that the tensors of each worker may take: 8GiB or 512MiB. With the suffix /reserved, it is taken at the
    /// start. A device may have a limit of its own, as in cuda:0@8GiB.
    #[arg(long, env = "FLAMBEAU_DEVICE_MEMORY_LIMIT", value_name = "SIZE")]
    pub(crate) device_memory_limit: Option<MemoryLimit>,
    /// No progress bars.
    #[arg(long)]
    pub(crate) quiet: bool,
    /// Encrypt the connections between the processes, with certificates made for this run.
    #[arg(long)]
    pub(crate) secure: bool,
    /// Let each server answer reads of rows, as `flambeau table` makes them.
    #[arg(long)]
    pub(crate) lookups: bool,
    /// Serve a live page of the training for browsers. Default address: a free port of 127.0.0.1; its URL is shown.
    #[arg(
        long,
        value_name = "HOST:PORT",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "127.0.0.1:0"
    )]
    pub(crate) http: Option<SocketAddr>,
    /// The memory of each server for rows of tables.
    #[command(flatten)]
    pub(crate) row_settings: RowSettings,
}

impl Options {
    /// Returns the devices of each worker, with their limits of memory.
    fn devices(&self) -> Result<Choices, DeviceError> {
        let devices: Choices = self.device.parse()?;
        Ok(devices.limited(self.device_memory_limit))
    }

    /// Returns the flags of the options that a continuation of this run needs too.
    fn flags(&self) -> Vec<OsString> {
        let mut options = self.row_settings.flags();
        if self.device != "auto" {
            options.extend(["--device".into(), (&self.device).into()]);
        }
        if let Some(limit) = self.device_memory_limit {
            options.push(format!("--device-memory-limit={limit}").into());
        }
        if self.lookups {
            options.push("--lookups".into());
        }
        if self.secure {
            options.push("--secure".into());
        }
        if let Some(http) = self.http {
            options.push(format!("--http={http}").into());
        }
        options
    }
}

pub(crate) fn run(arguments: Arguments, registry: &Registry) -> Result<(), CommandError> {
    let restored = arguments.restore.as_ref().map(PathBuf::from);
    match restored.filter(|run| run.join(run_dir::JOB).is_file()) {
        Some(run) if arguments.job.file.is_none() => resume::go_on(&run, arguments, registry),
        _ => {
            let job = given_job(&arguments.job)?;
            begin(job, arguments, registry)
        }
    }
}

/// Returns the job of the arguments. If the job file is in an earlier run's directory, or in the run directory that the
/// job names, the job gets a [directory beside it](resume::job_beside).
fn given_job(arguments: &JobArguments) -> Result<Job, CommandError> {
    let file = arguments.file.as_deref();
    let Some(folder) = file.and_then(resume::folder_of) else {
        return Ok(read_job(file, arguments.flags.clone())?);
    };
    if file.is_some_and(|file| resume::is_job_of_run(file, folder)) {
        return resume::job_beside(folder, &arguments.flags);
    }
    let mut job = read_job(file, arguments.flags.clone())?;
    if job
        .run_dir
        .as_deref()
        .is_some_and(|dir| are_same(dir, folder))
    {
        // The run would overwrite the file.
        job.run_dir = Some(next_dir(folder));
    }
    Ok(job)
}

fn begin(job: Job, arguments: Arguments, registry: &Registry) -> Result<(), CommandError> {
    let Arguments {
        restore,
        options: arguments,
        ..
    } = arguments;
    let devices = arguments.devices()?;
    check(&job, registry, &devices)?;
    let devices = devices.to_string();
    let restore = restore.as_deref();
    let checkpoint = job.checkpoint.clone();
    let plan = Plan {
        roles: Roles::Processes,
        workers: 0,
        device: &devices,
        transport: Transport::Unix,
        restore,
        secure: arguments.secure,
        row_settings: &arguments.row_settings,
        lookups: arguments.lookups,
        http: arguments.http,
    };
    let outcome = train(job, plan, Watch::quiet(arguments.quiet))?;
    report::write(&outcome.run_dir)?;
    let summary = &outcome.summary;
    let stopped = summary.stopped.then(|| CommandError::Stopped {
        samples: summary.samples,
        kept: shown(&outcome.run_dir),
        next: next(&outcome, &checkpoint, &arguments.flags()),
    });
    if arguments.json {
        outln!("{}", json(&outcome));
    } else {
        outln!("{}", table(&outcome).trim_fmt());
    }
    let risen = Some(&summary.loss_warning).filter(|warning| !warning.is_empty());
    for warning in stale(summary).iter().chain(risen) {
        noteln!("flambeau: {warning}");
    }
    stopped.map_or(Ok(()), Err)
}

fn are_same(one: &Path, other: &Path) -> bool {
    let whole = |path: &Path| path.canonicalize().ok();
    whole(one).is_some_and(|one| whole(other) == Some(one))
}

/// Checks that a worker could work, before any process or folder is created: its device, its data and its
/// model.
///
/// # Errors
/// The error that the worker would end with.
fn check(job: &Job, registry: &Registry, devices: &Choices) -> Result<(), CommandError> {
    let devices = devices.open()?;
    let job = Arc::new(job.clone());
    let replica = DeviceReplicas::start(&job, registry, &devices);
    block_on(async { Ok(replica.await?) })?;
    Ok(())
}

/// Trains a job on a cluster of its own, with the number of workers that the job gives.
pub(crate) fn train(
    mut job: Job,
    mut plan: Plan<'_>,
    watched: Watch<'_>,
) -> Result<Outcome, CommandError> {
    if job.strategy.name.has_servers() {
        job.cluster.ps.get_or_insert(DEFAULT_PS);
    }
    let workers = job.strategy.usual_workers();
    job.cluster.workers.get_or_insert(workers);
    let dir = match &job.run_dir {
        Some(dir) => {
            std::fs::create_dir_all(dir).map_err(CommandError::file(dir))?;
            dir.clone()
        }
        None => new_run_dir(&job)?,
    };
    let whole = dir.canonicalize().map_err(CommandError::file(&dir))?;
    let checkpoints = dir.join(run_dir::CHECKPOINTS);
    if plan.restore.is_some_and(|from| is_of_run(from, &whole)) {
        return Err(CommandError::SameRun { run_dir: dir });
    }
    let earlier = std::fs::read_dir(&checkpoints).is_ok_and(|mut dir| dir.next().is_some());
    if earlier && plan.restore.is_none() {
        return Err(CommandError::Content {
            path: checkpoints,
            reason: "they are an earlier run's; give another run directory, in which the training may go on from them (--restore, Trainer::restore)".to_owned(),
        });
    }
    let in_the_way = match coordinator::is_at_work(&dir) {
        Ok(false) => None,
        Ok(true) => Some("another coordinator is at work there; end it".to_owned()),
        Err(error) => Some(format!(
            "the state of an earlier run cannot be read: {error}; delete the files {}*",
            run_dir::STATE
        )),
    };
    if let Some(what) = in_the_way {
        return Err(CommandError::Content {
            path: dir,
            reason: format!("{what}, or give another --run-dir"),
        });
    }
    // These files belong to an earlier run.
    let others = [run_dir::SUMMARY, run_dir::METRICS].map(|name| dir.join(name));
    for other in others.into_iter().chain(coordinator::state_files(&dir)) {
        let _ = std::fs::remove_file(other);
    }
    let dir = whole;
    job.run_dir = Some(dir.clone());
    plan.workers = job.cluster.workers.unwrap_or(1);
    let summary = block_on(watch(&job, &dir, plan, watched))?;
    Ok(Outcome {
        summary,
        run_dir: dir,
    })
}

/// Returns whether `place` is the run directory `run`, or in its folder of checkpoints. `place` need not exist.
fn is_of_run(place: &str, run: &Path) -> bool {
    let path = Path::new(place).canonicalize();
    let Ok(path) = path.or_else(|_| std::path::absolute(place)) else {
        return false;
    };
    path == run || path.starts_with(run.join(run_dir::CHECKPOINTS))
}

/// Creates a run directory that is named after the data and the model, with the first free number: `runs/digits-mlp-1`.
fn new_run_dir(job: &Job) -> Result<PathBuf, CommandError> {
    let runs = Path::new("runs");
    std::fs::create_dir_all(runs).map_err(CommandError::file(runs))?;
    let data = &job.data.kind;
    let mut number = 1u32;
    loop {
        let dir = runs.join(format!("{data}-{}-{number}", job.model.name));
        match std::fs::create_dir(&dir) {
            Ok(()) => return Ok(dir),
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => number += 1,
            Err(error) => return Err(CommandError::File { path: dir, error }),
        }
    }
}
