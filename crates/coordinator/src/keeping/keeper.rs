//! Carries out the cluster's tasks in the store of checkpoints, and renews the run's claim to the store.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use checkpoint::{BEAT, CheckpointError, Claim, Manifest, Store};
use cluster::{DurableCheckpoint, Failure, SavedProgress, StoreTask, Sweep};

use super::shared::Shared;
use tokio_util::sync::CancellationToken;

/// The pause before a store that did not answer is asked again.
const TRY_AGAIN: Duration = Duration::from_secs(1);

/// Runs the cluster's tasks until the future is dropped.
pub(crate) async fn run_store_tasks(shared: Arc<Shared>, store: Store, keep: usize) {
    loop {
        match shared.take_store_task() {
            Some(StoreTask::Write(manifest, begun)) => {
                let manifest = Manifest {
                    began: unix_seconds(begun),
                    ..*manifest
                };
                write(&shared, &store, manifest, keep).await;
            }
            Some(StoreTask::FindBefore(damaged)) => {
                let found = find_before(&shared, &store, &damaged).await;
                shared
                    .ask(|cluster, now| cluster.older_found(now, &damaged, found))
                    .await;
            }
            None => match shared.take_sweep() {
                Some(what) => sweep(&store, what).await,
                None => shared.changed().await,
            },
        }
    }
}

/// Renews the run's claim at intervals by raising its counter, and checks whether another run or process has superseded
/// it. Makes a new claim if this process has none yet or the claim's file was deleted. Returns when the claim is lost,
/// or after `stop`, but never during a write: a dropped write continues, and may undo the caller's next write.
pub(crate) async fn keep_claim(
    shared: Arc<Shared>,
    store: Store,
    held: Arc<parking_lot::Mutex<Claim>>,
    stop: CancellationToken,
) {
    let mut warned = false;
    let mut beats = 1;
    loop {
        beats += 1;
        let mut pause = BEAT;
        let claim = held.lock().clone();
        match renew(&store, &claim, beats).await {
            Ok(Renewed::Still) => warned = false,
            Ok(Renewed::Again(claim)) => *held.lock() = claim,
            Ok(Renewed::Lost(other)) => {
                let by = store.taken(&other).to_string();
                return shared
                    .ask(|cluster, now| cluster.taken_over(now, &by))
                    .await;
            }
            Err(error) => {
                if !std::mem::replace(&mut warned, true) {
                    tracing::warn!("cannot show that this run owns its checkpoints: {error}");
                }
                pause = TRY_AGAIN;
            }
        }
        let slept = stop.run_until_cancelled(tokio::time::sleep(pause));
        if slept.await.is_none() {
            return;
        }
    }
}

enum Renewed {
    Still,
    /// The claim was made again, under another number.
    Again(Claim),
    Lost(Claim),
}

async fn renew(store: &Store, claim: &Claim, beat: u64) -> Result<Renewed, CheckpointError> {
    let owner = store.owner().await?;
    match owner {
        Some(owner) if owner == *claim => {
            store.beat(claim, beat).await?;
            Ok(Renewed::Still)
        }
        // Another coordinator process of this run has claimed the store since.
        Some(owner) if owner.run == claim.run && owner.term >= claim.term && claim.term > 0 => {
            Ok(Renewed::Lost(owner))
        }
        Some(owner) if owner.run != claim.run => Ok(Renewed::Lost(owner)),
        before => {
            if before.is_none() && claim.term > 0 {
                tracing::warn!("the claim to the store of checkpoints was gone; made it again");
            }
            let claimed = store.claim(claim.clone(), before.as_ref()).await;
            match claimed {
                Ok(claim) => Ok(Renewed::Again(claim)),
                // The next check shows which run has it.
                Err(CheckpointError::Taken { .. }) => Ok(Renewed::Still),
                Err(error) => Err(error),
            }
        }
    }
}

/// Converts an instant in the past to seconds since 1970.
fn unix_seconds(past: Instant) -> u64 {
    let ago = tokio::time::Instant::now().into_std().duration_since(past);
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    since.saturating_sub(ago).as_secs()
}

async fn write(shared: &Arc<Shared>, store: &Store, manifest: Manifest, keep: usize) {
    let number = manifest.number;
    let written = async {
        match store.owner().await? {
            Some(other) if other.run != manifest.run => Err(store.taken(&other)),
            _ => store.write_manifest(manifest).await,
        }
    };
    let written = written.await.map(drop).map_err(|e| Failure::from(&e));
    let counts = shared
        .ask(|cluster, now| cluster.manifest_written(now, number, written))
        .await;
    // A checkpoint that was given up meanwhile must not displace those that the job may go back to.
    if counts && let Err(error) = store.prune(keep).await {
        tracing::warn!("old checkpoints could not be deleted: {error}");
    }
}

/// Deletes the files of given-up checkpoints. After an error, the next call deletes them.
async fn sweep(store: &Store, what: Sweep) {
    match store.sweep(|number| what.is_given_up(number)).await {
        Ok(removed) if removed.is_empty() => {}
        Ok(removed) => tracing::info!(?removed, "deleted checkpoints that were not finished"),
        Err(error) => tracing::warn!("unfinished checkpoints could not be deleted: {error}"),
    }
}

async fn find_before(
    shared: &Shared,
    store: &Store,
    damaged: &DurableCheckpoint,
) -> Result<DurableCheckpoint, String> {
    let lineage = shared.look(|cluster, _| cluster.lineage());
    let ours = |manifest: &Manifest| lineage.has(store.location(), manifest);
    loop {
        match store.before_of(damaged.number, &ours).await {
            Ok(Some(manifest)) => return kept(store, &manifest),
            Ok(None) => return Err("there is none before it".to_owned()),
            Err(error) if error.is_of_store() => {
                tracing::warn!(
                    "looking for a checkpoint before {}: {error}",
                    damaged.number
                );
                tokio::time::sleep(TRY_AGAIN).await;
            }
            Err(error) => return Err(format!("those before it cannot be read: {error}")),
        }
    }
}

/// Converts a manifest to a checkpoint that the job can go back to.
pub(crate) fn kept(store: &Store, manifest: &Manifest) -> Result<DurableCheckpoint, String> {
    Ok(DurableCheckpoint {
        location: store.location().to_owned(),
        number: manifest.number,
        progress: SavedProgress::of_manifest(manifest)?,
        run: manifest.run.clone(),
    })
}

/// Checks that a job can begin with a checkpoint, as far as the checkpoint's manifest shows.
///
/// # Errors
/// The error names what cannot be read.
pub fn can_begin_with(manifest: &Manifest) -> Result<(), String> {
    SavedProgress::of_manifest(manifest).map(drop)
}
