//! The beginning of a coordinator: with a fresh job, with a checkpoint, or with the state that an earlier
//! process has left in the run directory.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use checkpoint::{CheckpointError, Claim, DEAD_AFTER, Manifest, Store};
use cluster::{CheckpointPlace, Cluster, Durable, SavedProgress, Turn};
use shared_proto::ids::RunNumber;
use shared_proto::job::{Job, LabelTransform, Mode, run_dir};
use shared_proto::receipt::ReceiptKey;

use super::best;
use super::error::CoordinatorError;
use crate::keeping::log::StateError;
use crate::keeping::state::State;

/// The longest time that a restarted coordinator waits for the store of its checkpoints.
const STORE_ANSWERS: Duration = Duration::from_secs(5);

/// The store of checkpoints, and the coordinator's part in it.
pub(crate) struct Keeping {
    pub(crate) store: Store,
    /// The number of checkpoints to keep.
    pub(crate) keep: usize,
    /// The run's claim to the store. Its `term` is 0 until the claim is made.
    pub(crate) claim: Claim,
}

/// A job that was begun or resumed.
pub(crate) struct Begun {
    pub(crate) cluster: Cluster,
    pub(crate) keeping: Option<Keeping>,
    /// True if an earlier process has worked on the job.
    pub(crate) again: bool,
}

/// The options with which a job begins.
#[derive(Debug)]
pub(crate) struct Wish<'a> {
    /// The store of checkpoints; `None` if the job writes none.
    pub(crate) checkpoints: Option<Store>,
    /// The checkpoint to begin with, if the run directory has no run yet.
    pub(crate) restore: Option<Restore<'a>>,
    /// Which failed jobs are resumed.
    pub(crate) resume: Resume,
    /// The id of the run, if the run directory has none yet.
    pub(crate) run: String,
    /// The key of the servers' receipts, if the run directory has no run yet.
    pub(crate) receipt_key: ReceiptKey,
    /// The job's place among those of the coordinator.
    pub(crate) turn: Turn,
    /// The host and address of this coordinator. Only shown.
    pub(crate) here: String,
}

/// Which failed jobs are resumed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Resume {
    /// None.
    Nothing,
    /// Those that failed because members were missing or could not work.
    Unable,
    /// All.
    Failed,
}

/// A checkpoint to begin with.
#[derive(Debug)]
pub(crate) enum Restore<'a> {
    /// The one in a run directory or a checkpoint's folder, or at the URL of either.
    At(&'a str),
    /// The newest one in a store.
    NewestOf(Store),
}

impl Restore<'_> {
    async fn load(self) -> Result<(Store, Manifest), CheckpointError> {
        match self {
            Self::At(location) => checkpoint::load(location).await,
            Self::NewestOf(store) => match store.newest().await? {
                Some(manifest) => Ok((store, manifest)),
                None => {
                    let location = store.location();
                    let reason = format!("{location} has no checkpoint that is whole");
                    Err(CheckpointError::NotFound(reason))
                }
            },
        }
    }
}

/// Returns the host and address of this coordinator, for people.
pub(crate) fn here(address: SocketAddr) -> String {
    let host = hostname::get();
    let host = host.map_or_else(|_| "?".into(), |host| host.to_string_lossy().into_owned());
    format!("{host} ({address})")
}

/// Opens the store of a job's checkpoints, if the job writes any.
///
/// # Errors
/// If the location cannot be used.
pub(crate) fn open_store(job: &Job, dir: &Path) -> Result<Option<Store>, CheckpointError> {
    if !job.checkpoint.enabled {
        return Ok(None);
    }
    let beside = || dir.join(run_dir::CHECKPOINTS).display().to_string();
    let location = job.checkpoint.location.clone().unwrap_or_else(beside);
    Store::open(&location).map(Some)
}

/// Begins a job, or resumes the one in `state`.
///
/// # Errors
/// If the run directory belongs to another run, if another run owns the location of the checkpoints, or
/// if checkpoints cannot be read or written.
pub(crate) async fn begin(
    job: Job,
    dir: &Path,
    state: &State,
    wish: Wish<'_>,
) -> Result<Begun, CoordinatorError> {
    let unreadable = |error| CoordinatorError::State {
        path: dir.join(run_dir::STATE),
        error,
    };
    let saved = state.read().map_err(unreadable)?;
    let again = saved.is_some();
    let known = saved.as_ref().and_then(|durable| durable.run.id());
    let run = known.unwrap_or(wish.run);
    let mut keeping = wish.checkpoints.map(|store| Keeping {
        store: store.of_run(&run),
        keep: job.checkpoint.keep as usize,
        claim: claim(&job, &run, wish.here),
    });
    let mut cluster = match saved {
        Some(saved) => {
            if let Some(keeping) = &keeping {
                let known = is_newest(&keeping.store, &run, saved.next_checkpoint());
                known.await.map_err(unreadable)?;
            }
            let cluster = go_on(job, dir, saved)?;
            match &keeping {
                Some(keeping) => cluster.with_checkpoints(keeping.place(), 0),
                None => cluster,
            }
        }
        None => {
            let cluster = start(
                job,
                dir,
                RunNumber::of(&run),
                keeping.as_mut(),
                wish.restore,
            )
            .await?;
            cluster.with_receipt_key(wish.receipt_key)
        }
    };
    cluster = cluster
        .with_run_number(RunNumber::of(&run))
        .in_turn(wish.turn);
    tracing::info!(run, "this run's id");
    // Persisted before the coordinator is reachable, so that a restart resumes from here.
    let now = tokio::time::Instant::now().into_std();
    let resumes = match wish.resume {
        Resume::Nothing => false,
        Resume::Unable => cluster.failed_without_members(),
        Resume::Failed => true,
    };
    if resumes {
        cluster.resume_failed(now);
    } else if cluster.ended() {
        tracing::info!("the job has ended already: {}", cluster.how_it_ended());
    }
    state.write(&cluster.snapshot(now)).map_err(unreadable)?;
    Ok(Begun {
        cluster,
        keeping,
        again,
    })
}

/// Checks that the state of a run is not older than the run's newest checkpoint. `next` is the number that the state
/// would give to the next checkpoint. If the store does not answer, the check passes, because the state has everything
/// that the coordinator needs.
///
/// # Errors
/// [`StateError::Older`].
async fn is_newest(store: &Store, run: &str, next: u64) -> Result<(), StateError> {
    let newest = match tokio::time::timeout(STORE_ANSWERS, store.newest()).await {
        Ok(Ok(newest)) => newest.filter(|newest| newest.run == run),
        Ok(Err(error)) => {
            tracing::warn!("the state cannot be compared with the run's checkpoints: {error}");
            None
        }
        Err(_) => {
            tracing::warn!(
                "the state cannot be compared with the run's checkpoints: their store does not answer"
            );
            None
        }
    };
    match newest {
        Some(newest) if newest.number >= next => Err(StateError::Older {
            newest: newest.number,
            location: store.location().to_owned(),
            next,
        }),
        _ => Ok(()),
    }
}

impl Keeping {
    fn place(&self) -> CheckpointPlace {
        CheckpointPlace {
            location: self.store.location().to_owned(),
            run_id: self.claim.run.clone(),
        }
    }
}

/// Returns a claim that is not made yet: its `term` is 0.
fn claim(job: &Job, run: &str, here: String) -> Claim {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    Claim {
        term: 0,
        run: run.to_owned(),
        process: format!("{:016x}", rand::random::<u64>()),
        job: job.name.clone(),
        since: since.map_or(0, |since| since.as_secs()),
        coordinator: here,
    }
}

/// Begins a new run, which owns its store of checkpoints from now on.
async fn start(
    job: Job,
    dir: &Path,
    run: RunNumber,
    keeping: Option<&mut Keeping>,
    restore: Option<Restore<'_>>,
) -> Result<Cluster, CoordinatorError> {
    let Some(keeping) = keeping else {
        return start_cluster(job, dir, run, None, restore).await;
    };
    let store = keeping.store.clone();
    // Comes first: where another run is at work, nothing may be read or changed.
    let before = store.watch_owner(&keeping.claim.run, DEAD_AFTER).await?;
    let cluster = start_cluster(job, dir, run, Some(&store), restore).await?;
    keeping.claim = store.claim(keeping.claim.clone(), before.as_ref()).await?;
    let listed = store.list().await?;
    let next = listed.last().map_or(0, |last| last.number + 1);
    Ok(cluster.with_checkpoints(keeping.place(), next))
}

/// Returns whether a persisted job equals `job`, apart from the run directory, which may have been moved. Parsed jobs
/// are compared, because another release may have written the same job as another text.
pub(crate) fn is_same(job: &Job, persisted: &str) -> bool {
    Job::from_toml(persisted).is_ok_and(|persisted| {
        let run_dir = job.run_dir.clone();
        *job == Job {
            run_dir,
            ..persisted
        }
    })
}

fn go_on(job: Job, dir: &Path, mut saved: Durable) -> Result<Cluster, CoordinatorError> {
    let other = |what: String| CoordinatorError::OtherRun {
        dir: dir.to_owned(),
        what,
    };
    if !is_same(&job, &saved.run.job_toml) {
        return Err(other(
            "is that of a job with other settings; give another --run-dir, or the settings that it has in its job.toml".to_owned(),
        ));
    }
    saved.run.job_toml = job.to_toml();
    let now = tokio::time::Instant::now().into_std();
    Ok(Cluster::resume(job, saved, now))
}

async fn start_cluster(
    job: Job,
    dir: &Path,
    run: RunNumber,
    ours: Option<&Store>,
    restore: Option<Restore<'_>>,
) -> Result<Cluster, CoordinatorError> {
    let Some(restore) = restore else {
        if let Some(ours) = ours
            && ours.list().await?.iter().any(|listed| listed.complete)
        {
            return Err(CoordinatorError::OtherRun {
                dir: dir.to_owned(),
                what: format!(
                    "has checkpoints of an earlier run in {}; go on from them with --restore, or give another --run-dir",
                    ours.location()
                ),
            });
        }
        return Ok(Cluster::new(job));
    };
    let keeps_best = matches!(restore, Restore::At(_)) && job.best.is_some();
    let (store, manifest) = restore.load().await?;
    let refused = |what: String| CoordinatorError::Restore {
        location: store.checkpoint_location(manifest.number),
        what,
    };
    let theirs = Job::parse(&manifest.job_toml).map_err(|error| refused(error.to_string()))?;
    if let Some(what) = difference(&job, &theirs) {
        return Err(refused(what));
    }
    let progress = SavedProgress::of_manifest(&manifest).map_err(refused)?;
    if let Err(error) = store.check_present(&manifest).await {
        return Err(store.advise(manifest.number, error).await.into());
    }
    tracing::info!(
        location = store.location(),
        number = manifest.number,
        steps = manifest.steps,
        "beginning with a checkpoint"
    );
    if keeps_best {
        let carried = best::carry(store.location(), dir, run, progress.evaluated()).await;
        if let Err(error) = carried {
            tracing::warn!("the best weights of the run before are not taken along: {error}");
        }
    }
    let mut cluster = Cluster::new(job);
    cluster.start_from(store.location().to_owned(), &manifest, progress);
    Ok(cluster)
}

/// Returns the first setting that must agree between the job and a checkpoint's job but does not.
fn difference(ours: &Job, theirs: &Job) -> Option<String> {
    let other_strategy = ours.strategy.name != theirs.strategy.name;
    // Some strategies have only this mode.
    let sync = |job: &Job| other_strategy || job.strategy.mode == Mode::Sync;
    // Its value may change, but there is an average for each weight or for none.
    let average = |job: &Job| {
        let kept = job.ema_decay.map(|_| "set");
        kept.unwrap_or("absent").to_owned()
    };
    let label_transform = |job: &Job| match job.data.label_transform {
        LabelTransform::None => "none".to_owned(),
        LabelTransform::Standardise => "standardise".to_owned(),
    };
    let fields = [
        ("name", ours.name.clone(), theirs.name.clone()),
        ("seed", ours.seed.to_string(), theirs.seed.to_string()),
        (
            "data.kind",
            ours.data.kind.clone(),
            theirs.data.kind.clone(),
        ),
        (
            "data.label_transform",
            label_transform(ours),
            label_transform(theirs),
        ),
        (
            "model.name",
            ours.model.name.clone(),
            theirs.model.name.clone(),
        ),
        (
            "optimizer.name",
            ours.optimizer.name().to_owned(),
            theirs.optimizer.name().to_owned(),
        ),
        ("ema_decay", average(ours), average(theirs)),
        (
            "batch_size * accumulate",
            ours.samples_per_step().to_string(),
            theirs.samples_per_step().to_string(),
        ),
        (
            "strategy.mode = \"sync\"",
            sync(ours).to_string(),
            sync(theirs).to_string(),
        ),
    ];
    fields
        .into_iter()
        .find(|(_, ours, theirs)| ours != theirs)
        .map(|(field, ours, theirs)| {
            format!("it is of another job: {field} is {theirs} there, and {ours} here")
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_for_other_labels_are_refused() {
        let standardised = Job::from_toml("[data]\nlabel_transform = \"standardise\"").unwrap();
        let refused = difference(&standardised, &Job::default()).unwrap();
        let what = "data.label_transform is none there, and standardise here";
        assert!(refused.contains(what), "{refused}");
        assert_eq!(difference(&standardised, &standardised), None);
    }

    #[test]
    fn averages_are_kept_from_the_beginning_or_not_at_all() {
        let job = |ema_decay| Job {
            ema_decay,
            ..Job::default()
        };
        assert_eq!(difference(&job(Some(0.9)), &job(Some(0.99))), None);
        for (ours, theirs) in [(Some(0.9), None), (None, Some(0.9))] {
            let refused = difference(&job(ours), &job(theirs)).unwrap();
            assert!(refused.contains("ema_decay"), "{refused}");
        }
    }
}
