//! How a coordinator comes to its job: a fresh one, one that begins with a checkpoint, or the one that
//! an earlier process in the run directory was at.

use std::path::Path;

use checkpoint::Store;
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
}

/// A job that is begun, or gone on with.
pub(crate) struct Begun {
    pub(crate) cluster: Cluster,
    pub(crate) keeping: Option<Keeping>,
    /// An earlier process was at it.
    pub(crate) again: bool,
}

/// How the operator wants a coordinator to begin.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Wish<'a> {
    /// The checkpoint to begin with, where the run directory has no run yet.
    pub(crate) restore: Option<&'a str>,
    /// Go on with a job that has failed.
    pub(crate) take_up: bool,
}

/// Begins a job, or goes on with the one that is kept in `state`.
///
/// # Errors
/// If the run directory is another run's, or checkpoints cannot be read or written.
pub(crate) async fn begin(
    job: Job,
    dir: &Path,
    state: &State,
    wish: Wish<'_>,
) -> Result<Begun, CoordinatorError> {
    let keeping = match job.checkpoint.enabled {
        false => None,
        true => Some(open(&job, dir)?),
    };
    let saved = state.read().map_err(|error| CoordinatorError::State {
        path: dir.join(run_dir::STATE),
        error,
    })?;
    let again = saved.is_some();
    let mut cluster = match saved {
        Some(saved) => go_on(job, dir, saved)?,
        None => {
            let cluster = start(job, dir, keeping.as_ref(), wish.restore).await?;
            cluster.with_receipt_key(ReceiptKey(rand::random()))
        }
    };
    if let Some(keeping) = &keeping {
        let location = keeping.store.location().to_owned();
        let (probe, next) = match cluster.known_probe() {
            // All is known, so the store need not answer now.
            Some(probe) => (probe, 0),
            None => {
                let listed = keeping.store.list().await?;
                let probe = format!("{:032x}", rand::random::<u128>());
                keeping.store.write_probe(&probe).await?;
                (probe, listed.last().map_or(0, |last| last.number + 1))
            }
        };
        cluster = cluster.with_checkpoints(Place { location, probe }, next);
    }
    // Before anybody can hear of this coordinator: where it starts again it goes on with this.
    let now = tokio::time::Instant::now().into_std();
    if wish.take_up || cluster.failed_without_workers() {
        cluster.take_up_failed(now);
    } else if cluster.ended() {
        tracing::info!("the job has ended already: {}", cluster.how_it_ended());
    }
    state
        .write(&cluster.save_all(now))
        .map_err(|error| CoordinatorError::State {
            path: dir.join(run_dir::STATE),
            error,
        })?;
    Ok(Begun {
        cluster,
        keeping,
        again,
    })
}

fn open(job: &Job, dir: &Path) -> Result<Keeping, CoordinatorError> {
    let beside = || dir.join(run_dir::CHECKPOINTS).display().to_string();
    let location = job.checkpoint.location.clone().unwrap_or_else(beside);
    Ok(Keeping {
        store: Store::open(&location)?,
        keep: job.checkpoint.keep as usize,
    })
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

async fn start(
    job: Job,
    dir: &Path,
    keeping: Option<&Keeping>,
    restore: Option<&str>,
) -> Result<Cluster, CoordinatorError> {
    let Some(location) = restore else {
        if let Some(keeping) = keeping
            && keeping
                .store
                .list()
                .await?
                .iter()
                .any(|listed| listed.complete)
        {
            return Err(CoordinatorError::OtherRun {
                dir: dir.to_owned(),
                what: format!(
                    "has checkpoints of an earlier run in {}; go on from them with --restore, or give another --run-dir",
                    keeping.store.location()
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
