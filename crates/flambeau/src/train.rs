//! `flambeau train`: runs a whole cluster on this machine, from its start to its end.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Args;
use comfy_table::{Table, presets};
use coordinator::{Summary, read_job};
use daemon::membership::Coordinator;
use serde::Serialize;
use shared_proto::ids::TaskId;
use shared_proto::job::{Checkpoint, Job, run_dir};
use shared_proto::view::JobPhase;
use tokio::signal::unix::{SignalKind, signal};
use worker::registry::Registry;
use worker::replica::ModelReplica;

use crate::app::{JobArguments, block_on};
use crate::cluster::{COORDINATOR, LocalCluster, Plan, Transport};
use crate::error::CommandError;
use crate::progress::Progress;
use crate::{metrics, plot, status};

/// The numbers of parameter servers and workers of a job that gives none.
const DEFAULT_PS: u32 = 2;
const DEFAULT_WORKERS: u32 = 2;

/// The interval at which the cluster's status is fetched.
const LOOK: Duration = Duration::from_millis(100);

/// The time in which the coordinator must end a job that cannot continue.
const GRACE: Duration = Duration::from_secs(3);

/// The number of times that a process is restarted while no step is finished.
const MOST_DEATHS: usize = 10;

/// The mean gradient staleness, in updates, beyond which gradients help little.
const TOO_STALE: f64 = 32.0;

#[derive(Clone, Debug, Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    pub(crate) job: JobArguments,
    /// Print one JSON object on stdout at the end, and nothing else.
    #[arg(long)]
    pub(crate) json: bool,
    /// The device on which workers compute: auto, cpu or cuda:N.
    #[arg(long, env = "FLAMBEAU_DEVICE", default_value = "auto")]
    pub(crate) device: String,
    /// No progress bars.
    #[arg(long)]
    pub(crate) quiet: bool,
    /// Begin with a checkpoint: a run directory (its newest one), a checkpoint's folder, or the URL of
    /// either.
    #[arg(long, value_name = "RUN_DIR|CHECKPOINT|URL")]
    pub(crate) restore: Option<String>,
    /// Encrypt the connections between the processes, with certificates made for this run.
    #[arg(long)]
    pub(crate) secure: bool,
}

/// The outcome of a run.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Outcome {
    #[serde(flatten)]
    pub(crate) summary: Summary,
    pub(crate) run_dir: PathBuf,
}

pub(crate) fn run(arguments: Arguments, registry: &Registry) -> Result<(), CommandError> {
    let job = read_job(arguments.job.file.as_deref(), arguments.job.flags)?;
    check(&job, registry, &arguments.device)?;
    let restore = arguments.restore.as_deref();
    let checkpoint = job.checkpoint.clone();
    let plan = Plan {
        workers: 0,
        device: &arguments.device,
        transport: Transport::Unix,
        restore,
        secure: arguments.secure,
    };
    let outcome = train(job, plan, arguments.quiet)?;
    plot::draw(&outcome.run_dir)?;
    let summary = &outcome.summary;
    let stopped = summary.stopped.then(|| CommandError::Stopped {
        samples: summary.samples,
        kept: shown(&outcome.run_dir),
        next: next(&outcome, &checkpoint, &arguments.device, arguments.secure),
    });
    if arguments.json {
        println!("{}", json(&outcome));
    } else {
        println!("{}", table(&outcome).trim_fmt());
    }
    if let Some(warning) = stale(&outcome.summary) {
        eprintln!("flambeau: {warning}");
    }
    stopped.map_or(Ok(()), Err)
}

/// Checks that a worker could work, before any process or folder is created: its device, its data and its
/// model.
///
/// # Errors
/// The error that the worker would end with.
fn check(job: &Job, registry: &Registry, device: &str) -> Result<(), CommandError> {
    let device = worker::device::open(device.parse()?)?;
    let replica = ModelReplica::start(Arc::new(job.clone()), registry.clone(), device);
    block_on(async { Ok(replica.await?) })?;
    Ok(())
}

/// Returns a warning if gradients were too stale to help.
fn stale(summary: &Summary) -> Option<String> {
    let updates = summary.mean_gradient_staleness;
    if updates <= TOO_STALE {
        return None;
    }
    let useful = summary.times.get("share_compute");
    let useful = useful.map_or(String::new(), |share| {
        format!(
            " The workers computed for {:.0} % of their time.",
            100.0 * share
        )
    });
    Some(format!(
        "gradients were {updates:.0} updates old on average when they were applied; beyond some {TOO_STALE:.0} they help little. The staleness bound does not prevent this: it limits the steps of one worker, not the updates of all.{useful} Fewer workers, a larger --batch-size or --mode sync make better use of the same time."
    ))
}

/// Trains a job on a cluster of its own, with the number of workers that the job gives.
pub(crate) fn train(
    mut job: Job,
    mut plan: Plan<'_>,
    quiet: bool,
) -> Result<Outcome, CommandError> {
    job.cluster.ps.get_or_insert(DEFAULT_PS);
    job.cluster.workers.get_or_insert(DEFAULT_WORKERS);
    let dir = match &job.run_dir {
        Some(dir) => {
            std::fs::create_dir_all(dir).map_err(CommandError::file(dir))?;
            dir.clone()
        }
        None => new_run_dir(&job)?,
    };
    let checkpoints = dir.join(run_dir::CHECKPOINTS);
    let earlier = std::fs::read_dir(&checkpoints).is_ok_and(|mut dir| dir.next().is_some());
    if earlier && plan.restore.is_none() {
        return Err(CommandError::Content {
            path: checkpoints,
            reason: "they are an earlier run's; go on from them with --restore, or give another --run-dir".to_owned(),
        });
    }
    let in_the_way = match coordinator::is_at_work(&dir) {
        Ok(false) => None,
        Ok(true) => Some("another coordinator is at work there; end it".to_owned()),
        Err(error) => Some(format!(
            "{} cannot be opened: {error}; remove it",
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
    for other in [run_dir::SUMMARY, run_dir::STATE] {
        let _ = std::fs::remove_file(dir.join(other));
    }
    let dir = dir.canonicalize().map_err(CommandError::file(&dir))?;
    job.run_dir = Some(dir.clone());
    plan.workers = job.cluster.workers.unwrap_or(1);
    let summary = block_on(watch(&job, &dir, plan, quiet))?;
    Ok(Outcome {
        summary,
        run_dir: dir,
    })
}

/// Creates `runs/digits-mlp-1`, or the next folder with a free number.
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

/// Starts the cluster, shows its progress, and ends it.
async fn watch(
    job: &Job,
    dir: &Path,
    plan: Plan<'_>,
    quiet: bool,
) -> Result<Summary, CommandError> {
    let signals = |kind| signal(kind).map_err(CommandError::file("signals"));
    let mut interrupt = signals(SignalKind::interrupt())?;
    let mut terminate = signals(SignalKind::terminate())?;
    let mut cluster = tokio::select! {
        started = LocalCluster::start(job, dir, plan) => started?,
        _ = interrupt.recv() => return Err(CommandError::Interrupted),
        _ = terminate.recv() => return Err(CommandError::Interrupted),
    };
    let mut progress = Progress::new(quiet);
    let coordinator = Coordinator::at(&cluster.coordinator.to_string(), LOOK, cluster.security()?)?;
    let mut interrupted = false;
    let mut following = Following::default();
    let ended = loop {
        tokio::select! {
            ended = follow(&mut cluster, &coordinator, &mut progress, &mut following) => break ended,
            _ = interrupt.recv() => {
                if interrupted || !stop(&coordinator, &job.name, &progress).await {
                    break Err(CommandError::Interrupted);
                }
                interrupted = true;
            }
            _ = terminate.recv() => break Err(CommandError::Interrupted),
        }
    };
    progress.close();
    // The members left before the coordinator ended. A process that had not joined yet would wait for its
    // coordinator in vain, so it is told to end. On Ctrl-C the processes are killed, as the cluster is dropped.
    tokio::select! {
        () = cluster.stop() => {}
        _ = interrupt.recv() => return Err(CommandError::Interrupted),
    }
    ended?;
    let path = dir.join(run_dir::SUMMARY);
    let Ok(text) = std::fs::read_to_string(&path) else {
        return Err(cluster.died(COORDINATOR));
    };
    let summary: Summary = serde_json::from_str(&text).map_err(|error| CommandError::Content {
        path,
        reason: error.to_string(),
    })?;
    progress.finish(&metrics::read(dir)?);
    match (summary.error.is_empty(), cluster.culprit(&summary.error)) {
        (true, _) => Ok(summary),
        (false, Some(task)) => Err(cluster.died(task)),
        (false, None) => Err(CommandError::JobFailed(summary.error)),
    }
}

/// Follows the job until the coordinator has ended. Restarts processes that are killed.
async fn follow(
    cluster: &mut LocalCluster,
    coordinator: &Coordinator,
    progress: &mut Progress,
    following: &mut Following,
) -> Result<(), CommandError> {
    let Following {
        deaths,
        missing,
        training,
    } = following;
    loop {
        for (task, status) in cluster.ended() {
            // A process with an exit code has ended by itself. A signal has killed the others.
            let killed = status.code().is_none();
            if killed && deaths.may_restart(task) {
                progress.say(&format!("{task} was killed ({status}); started it again"));
                cluster.restart(task)?;
            } else if task == COORDINATOR {
                return Ok(());
            } else if worker::cannot_work(status.code()) {
                if !(*training && cluster.has_workers()) {
                    return Err(cluster.died(task));
                }
                progress.say(&cluster.died(task).to_string());
                progress.say(&format!("{task} cannot work; the others go on without it"));
            } else if !status.success() {
                missing.get_or_insert((task, Instant::now() + GRACE));
            }
        }
        match *missing {
            Some((task, until)) if Instant::now() >= until => return Err(cluster.died(task)),
            _ => {}
        }
        if let Ok(status) = status::fetch(coordinator).await {
            deaths.note(status.steps);
            *training |= status.phase() == JobPhase::Training;
            progress.show(&status);
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// Asks the coordinator to end the job early. Returns whether it does.
async fn stop(coordinator: &Coordinator, job: &str, progress: &Progress) -> bool {
    if let Err(error) = coordinator.stop(job.to_owned()).await {
        progress.say(&format!("the job cannot be stopped in good order: {error}"));
        return false;
    }
    progress.say(
        "stopping: workers finish the data that they hold, then the model and a checkpoint are written; Ctrl-C again ends at once",
    );
    true
}

/// The state of following a job.
#[derive(Default)]
struct Following {
    deaths: Deaths,
    /// A process that has failed, and the time until which the coordinator may end the job because of it.
    missing: Option<(TaskId, Instant)>,
    /// True if training has begun. Before that it waits for all workers of the job.
    training: bool,
}

/// Describes how to continue a stopped run.
fn next(outcome: &Outcome, checkpoint: &Checkpoint, device: &str, secure: bool) -> String {
    if !checkpoint.enabled {
        return "it cannot be continued: there are no checkpoints (checkpoint.enabled is false)"
            .to_owned();
    }
    let from = match &*outcome.summary.unsaved {
        "" => "this goes on from the last checkpoint".to_owned(),
        why => format!(
            "the last checkpoint could not be written ({why}); this goes on from the one before"
        ),
    };
    let place = checkpoint.location.as_deref().map(Path::new);
    let dir = &outcome.run_dir;
    let command = going_on(dir, place.unwrap_or(dir), device, secure);
    format!("{from}:\n  {command}")
}

/// Returns the command that continues a stopped run from its newest checkpoint.
fn going_on(dir: &Path, restore: &Path, device: &str, secure: bool) -> String {
    let quoted = |path: &Path| {
        let text = shown(path);
        let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+".contains(c);
        match text.chars().all(plain) {
            true => text,
            false => format!("'{}'", text.replace('\'', r"'\''")),
        }
    };
    let program = std::env::args_os().next().unwrap_or_default();
    let mut command = format!(
        "{} train {} --restore {} --run-dir {}",
        quoted(Path::new(&program)),
        quoted(&dir.join(run_dir::JOB)),
        quoted(restore),
        quoted(&next_dir(dir)),
    );
    if device != "auto" {
        command += &format!(" --device {device}");
    }
    if secure {
        command += " --secure";
    }
    command
}

/// Returns a folder beside a run's that does not exist yet.
fn next_dir(dir: &Path) -> PathBuf {
    let name = dir.file_name().unwrap_or_default().to_string_lossy();
    let folder = |number: u32| dir.with_file_name(format!("{name}-{number}"));
    let mut number = 2;
    while folder(number).exists() {
        number += 1;
    }
    folder(number)
}

/// The number of times that each process was killed since a step was finished.
#[derive(Default)]
struct Deaths {
    of: BTreeMap<TaskId, usize>,
    steps: u64,
}

impl Deaths {
    /// Counts a death. Returns whether the process is restarted; one that keeps dying is not.
    fn may_restart(&mut self, task: TaskId) -> bool {
        let deaths = self.of.entry(task).or_default();
        *deaths += 1;
        *deaths <= MOST_DEATHS
    }

    /// Notes the number of finished steps.
    fn note(&mut self, steps: u64) {
        if steps != self.steps {
            *self = Self {
                steps,
                ..Self::default()
            };
        }
    }
}

pub(crate) fn json(outcome: &Outcome) -> String {
    serde_json::to_string(outcome)
        .unwrap_or_else(|error| unreachable!("an outcome is plain data: {error}"))
}

fn table(outcome: &Outcome) -> Table {
    let summary = &outcome.summary;
    let mode = match (summary.mode.as_str(), summary.staleness) {
        ("bounded", Some(bound)) => format!("bounded, staleness at most {bound}"),
        (mode, _) => mode.to_owned(),
    };
    let percent =
        |share: Option<f64>| share.map_or("-".to_owned(), |s| format!("{:.2} %", 100.0 * s));
    let lost = match summary.lost_updates {
        0 => "none".to_owned(),
        lost => format!("{lost}; metrics.jsonl says which"),
    };
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    for (name, value) in [
        ("test accuracy", percent(summary.test_accuracy)),
        (
            "test loss",
            summary
                .test_loss
                .map_or("-".to_owned(), |l| format!("{l:.4}")),
        ),
        ("mode", mode),
        (
            "cluster",
            format!("{} ps, {} workers", summary.ps, summary.workers),
        ),
        (
            "steps",
            format!("{} in {} epochs", summary.steps, summary.epochs),
        ),
        (
            "time",
            format!(
                "{:.1} s, {:.0} samples/s",
                summary.seconds, summary.samples_per_second
            ),
        ),
        (
            "largest clock lead",
            format!("{} steps", summary.max_clock_lead),
        ),
        (
            "mean gradient staleness",
            format!("{:.2} updates", summary.mean_gradient_staleness),
        ),
        ("updates lost", lost),
        ("run directory", shown(&outcome.run_dir)),
    ] {
        table.add_row([name, &value]);
    }
    if !summary.unsaved.is_empty() {
        table.add_row([
            "last checkpoint",
            &format!("not written: {}", summary.unsaved),
        ]);
    }
    table
}

/// Shows a path relative to the working directory, if it lies inside.
fn shown(path: &Path) -> String {
    let here = std::env::current_dir().ok();
    let inside = here.and_then(|here| path.strip_prefix(here).ok().map(Path::to_owned));
    inside
        .unwrap_or_else(|| path.to_owned())
        .display()
        .to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn summary(staleness: f64) -> Summary {
        let summary = serde_json::json!({
            "mode": "bounded", "staleness": 4, "ps": 2, "workers": 300, "epochs": 1, "steps": 1, "samples": 1,
            "seconds": 1.0, "samples_per_second": 1.0, "test_accuracy": null, "test_loss": null,
            "max_clock_lead": 4, "mean_gradient_staleness": staleness, "share_compute": 0.08,
        });
        serde_json::from_value(summary).unwrap()
    }

    #[test]
    fn gradients_that_are_too_old_to_help_are_told_at_the_end() {
        let said = stale(&summary(245.0)).unwrap();
        assert!(
            said.contains("245 updates") && said.contains("8 %"),
            "{said}"
        );
        assert_eq!(stale(&summary(7.0)), None);
    }
}
