//! How a coordinator comes to its job: a fresh one, one that begins with a checkpoint, or the one that
//! an earlier process in the run directory was at.

use std::path::Path;

use checkpoint::{Claim, DEAD_AFTER, Store};
use shared_proto::job::{Job, Mode, run_dir};
use shared_proto::receipt::ReceiptKey;

use crate::cluster::{Cluster, Place, Saved};
use crate::keeper::progress;
use crate::run::CoordinatorError;
use crate::state::State;

/// What a coordinator does with the store of checkpoints.
pub(crate) struct Keeping {
    pub(crate) store: Store,
    /// How many are kept.
    pub(crate) keep: usize,
    /// By which the run owns the store; without a number while it is still to be made.
    pub(crate) claim: Claim,
}

/// A job that is begun, or gone on with.
pub(crate) struct Begun {
    pub(crate) cluster: Cluster,
    pub(crate) keeping: Option<Keeping>,
    /// An earlier process was at it.
    pub(crate) again: bool,
}

/// How the operator wants a coordinator to begin.
#[derive(Clone, Debug, Default)]
pub(crate) struct Wish<'a> {
    /// The checkpoint to begin with, where the run directory has no run yet.
    pub(crate) restore: Option<&'a str>,
    /// Go on with a job that has failed.
    pub(crate) take_up: bool,
    /// Where this coordinator is, for people.
    pub(crate) here: String,
}

/// Begins a job, or goes on with the one that is kept in `state`.
///
/// # Errors
/// If the run directory is another run's, another run is at work where the checkpoints are to lie, or
/// checkpoints cannot be read or written.
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
    let known = saved.as_ref().and_then(Saved::run);
    let run = known.unwrap_or_else(|| format!("{:016x}", rand::random::<u64>()));
    let mut keeping = match job.checkpoint.enabled {
        false => None,
        true => Some(open(&job, dir, &run, wish.here)?),
    };
    let mut cluster = match saved {
        // All is known, so the store need not answer now.
        Some(saved) => {
            let cluster = go_on(job, dir, saved)?;
            match &keeping {
                Some(keeping) => cluster.with_checkpoints(keeping.place(), 0),
                None => cluster,
            }
        }
        None => {
            let cluster = start(job, dir, keeping.as_mut(), wish.restore).await?;
            cluster.with_receipt_key(ReceiptKey(rand::random()))
        }
    };
    tracing::info!(run, "this run's id");
    // Before anybody can hear of this coordinator: where it starts again it goes on with this.
    let now = tokio::time::Instant::now().into_std();
    if wish.take_up || cluster.failed_without_workers() {
        cluster.take_up_failed(now);
    } else if cluster.ended() {
        tracing::info!("the job has ended already: {}", cluster.how_it_ended());
    }
    state.write(&cluster.save_all(now)).map_err(unreadable)?;
    Ok(Begun {
        cluster,
        keeping,
        again,
    })
}

impl Keeping {
    fn place(&self) -> Place {
        Place {
            location: self.store.location().to_owned(),
            probe: self.claim.run.clone(),
        }
    }
}

fn open(job: &Job, dir: &Path, run: &str, here: String) -> Result<Keeping, CoordinatorError> {
    let beside = || dir.join(run_dir::CHECKPOINTS).display().to_string();
    let location = job.checkpoint.location.clone().unwrap_or_else(beside);
    Ok(Keeping {
        store: Store::open(&location)?.of_run(run),
        keep: job.checkpoint.keep as usize,
        claim: claim(job, run, here),
    })
}

/// A claim that has no number yet.
pub(crate) fn claim(job: &Job, run: &str, here: String) -> Claim {
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

/// A run of its own, which owns its store of checkpoints from now on.
async fn start(
    job: Job,
    dir: &Path,
    keeping: Option<&mut Keeping>,
    restore: Option<&str>,
) -> Result<Cluster, CoordinatorError> {
    let Some(keeping) = keeping else {
        return start_cluster(job, dir, None, restore).await;
    };
    let store = keeping.store.clone();
    // First of all: nothing is to be changed, or read, where another run is at work.
    let before = store.watch_owner(&keeping.claim.run, DEAD_AFTER).await?;
    let cluster = start_cluster(job, dir, Some(&store), restore).await?;
    keeping.claim = store.claim(keeping.claim.clone(), before.as_ref()).await?;
    let listed = store.list().await?;
    let next = listed.last().map_or(0, |last| last.number + 1);
    Ok(cluster.with_checkpoints(keeping.place(), next))
}

fn go_on(job: Job, dir: &Path, saved: Saved) -> Result<Cluster, CoordinatorError> {
    let other = |what: String| CoordinatorError::OtherRun {
        dir: dir.to_owned(),
        what,
    };
    // As it reads, not as text: a newer release may write settings that this one did not have.
    if Job::from_toml(&saved.job_toml).ok().as_ref() != Some(&job) {
        return Err(other(
            "is that of a job with other settings; give another --run-dir, or the settings that it has in its job.toml".to_owned(),
        ));
    }
    let now = tokio::time::Instant::now().into_std();
    Ok(Cluster::resume(job, saved, now))
}

async fn start_cluster(
    job: Job,
    dir: &Path,
    ours: Option<&Store>,
    restore: Option<&str>,
) -> Result<Cluster, CoordinatorError> {
    let Some(location) = restore else {
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
    let (store, manifest) = checkpoint::load(location).await?;
    let refused = |what: String| CoordinatorError::Restore {
        location: store.checkpoint_location(manifest.number),
        what,
    };
    let theirs = Job::parse(&manifest.job_toml).map_err(|error| refused(error.to_string()))?;
    if let Some(what) = difference(&job, &theirs) {
        return Err(refused(what));
    }
    let progress = progress(&manifest).map_err(refused)?;
    if let Err(error) = store.check_present(&manifest).await {
        return Err(store.advise(manifest.number, error).await.into());
    }
    tracing::info!(
        location,
        number = manifest.number,
        steps = manifest.steps,
        "beginning with a checkpoint"
    );
    let mut cluster = Cluster::new(job);
    cluster.start_from(store.location().to_owned(), &manifest, progress);
    Ok(cluster)
}

/// What differs between the job and the one that a checkpoint was written by, where it must not.
fn difference(ours: &Job, theirs: &Job) -> Option<String> {
    let sync = |job: &Job| job.strategy.mode == Mode::Sync;
    let fields = [
        ("name", ours.name.clone(), theirs.name.clone()),
        ("seed", ours.seed.to_string(), theirs.seed.to_string()),
        (
            "data.kind",
            ours.data.kind.name().to_owned(),
            theirs.data.kind.name().to_owned(),
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
        (
            "batch_size",
            ours.batch_size.to_string(),
            theirs.batch_size.to_string(),
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
