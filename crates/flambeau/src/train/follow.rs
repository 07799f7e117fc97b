//! A job on a local cluster, from its first process to its summary.

use daemon::noteln;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use coordinator::Summary;
use daemon::membership::Coordinator;
use shared_proto::ids::TaskId;
use shared_proto::job::{Job, run_dir};
use shared_proto::view::JobPhase;

use super::signals::{Signal, Signals};
use crate::cluster::{COORDINATOR, LocalCluster, Plan};
use crate::error::CommandError;
use crate::progress::Progress;
use crate::{metrics, status};

/// The interval at which the cluster's status is fetched.
const LOOK: Duration = Duration::from_millis(100);

/// The time in which the coordinator must end a job that cannot continue.
const GRACE: Duration = Duration::from_secs(3);

/// The most times that a process is restarted while no step is finished.
const MOST_DEATHS: usize = 10;

/// Sees a job while it runs.
pub(crate) trait Observer: Send {
    /// Looks at the run; called several times a second. Returns whether the job should end early.
    fn look(&mut self) -> Result<bool, CommandError>;
}

/// How a job is followed.
pub(crate) struct Watch<'a> {
    /// True to show nothing.
    pub(crate) quiet: bool,
    /// True if SIGINT and SIGTERM end the job. Otherwise they act on the process as usual.
    pub(crate) obeys_signals: bool,
    /// An observer of the run.
    pub(crate) observer: Option<&'a mut dyn Observer>,
}

impl Watch<'_> {
    /// Returns the way in which a command follows a job: it obeys signals, and has no observer.
    pub(crate) fn quiet(quiet: bool) -> Self {
        Self {
            quiet,
            obeys_signals: true,
            observer: None,
        }
    }
}

/// Starts the cluster, shows the job's progress, and ends the cluster. Returns the job's summary.
pub(super) async fn watch(
    job: &Job,
    dir: &Path,
    plan: Plan<'_>,
    watched: Watch<'_>,
) -> Result<Summary, CommandError> {
    let Watch {
        quiet,
        obeys_signals,
        mut observer,
    } = watched;
    let mut signals = Signals::new(obeys_signals)?;
    let mut cluster = tokio::select! {
        started = LocalCluster::start(job, dir, plan) => started?,
        _ = signals.next() => return Err(CommandError::Interrupted),
    };
    if let Some(page) = cluster.page() {
        noteln!("live page: {page}");
    }
    let mut progress = Progress::new(quiet);
    let coordinator = Coordinator::at(&cluster.coordinator.to_string(), LOOK, cluster.security()?)?;
    let mut interrupted = false;
    let mut following = Following::default();
    let ended = loop {
        tokio::select! {
            followed = follow(&mut cluster, &coordinator, &mut progress, &mut following, &mut observer) => match followed {
                Ok(Followed::ToBeStopped) => {
                    // The observer asks again, unless the job has ended by itself.
                    if let Err(error) = coordinator.stop(job.name.clone()).await {
                        tracing::debug!("the job cannot be stopped at present: {error}");
                    }
                }
                Ok(Followed::Ended) => break Ok(()),
                Err(error) => break Err(error),
            },
            signal = signals.next() => {
                let again = interrupted || signal == Signal::Terminate;
                if again || !stop(&coordinator, &job.name, &progress).await {
                    break Err(CommandError::Interrupted);
                }
                interrupted = true;
            }
        }
    };
    progress.close();
    // The members left before the coordinator ended. A process that had not joined yet would wait for its
    // coordinator in vain, so it is told to end. On Ctrl-C the processes are killed, as the cluster is dropped.
    tokio::select! {
        () = cluster.stop() => {}
        _ = signals.next() => return Err(CommandError::Interrupted),
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

/// The reason why a job is not followed any longer.
enum Followed {
    /// The coordinator has ended.
    Ended,
    /// The observer wants the job to end early.
    ToBeStopped,
}

/// Follows the job until the coordinator has ended, or the observer wants the job to end. Restarts processes that are
/// killed.
async fn follow(
    cluster: &mut LocalCluster,
    coordinator: &Coordinator,
    progress: &mut Progress,
    following: &mut Following,
    observer: &mut Option<&mut dyn Observer>,
) -> Result<Followed, CommandError> {
    let Following {
        deaths,
        missing,
        training,
    } = following;
    loop {
        for (task, exit) in cluster.ended() {
            // A process with an exit code has ended by itself. A signal has killed the others.
            let killed = exit.code.is_none();
            if killed && deaths.may_restart(task) {
                progress.say(&format!("{task} was killed ({exit}); started it again"));
                cluster.restart(task)?;
            } else if task == COORDINATOR {
                return Ok(Followed::Ended);
            } else if worker::cannot_work(exit.code) {
                if !(*training && cluster.has_workers()) {
                    return Err(cluster.died(task));
                }
                progress.say(&cluster.died(task).to_string());
                progress.say(&format!("{task} cannot work; the others go on without it"));
            } else if !exit.success() {
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
        if let Some(observer) = observer
            && observer.look()?
        {
            return Ok(Followed::ToBeStopped);
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// Asks the coordinator to end the job early. Returns whether the coordinator accepts.
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
    /// A process that has failed, and the time until which the coordinator may end the job because of it; `None` if none
    /// failed.
    missing: Option<(TaskId, Instant)>,
    /// True once training has begun. Before that, the job waits for all of its workers.
    training: bool,
}

/// The number of times that each process was killed since the last step was finished.
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
