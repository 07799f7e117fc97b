//! Does what the cluster wants of the store of checkpoints.

use std::sync::Arc;
use std::time::Duration;

use checkpoint::{Manifest, Store};

use crate::cluster::{Errand, Kept, Progress};
use crate::shared::Shared;

/// How long to wait before a store that did not answer is asked again.
const TRY_AGAIN: Duration = Duration::from_secs(1);

/// Runs errands until it is dropped.
pub(crate) async fn run_errands(shared: Arc<Shared>, store: Store, keep: usize) {
    loop {
        match shared.take_errand() {
            None => shared.changed().await,
            Some(Errand::Write(manifest)) => write(&shared, &store, *manifest, keep).await,
            Some(Errand::FindBefore(damaged)) => {
                let found = find_before(&store, &damaged).await;
                shared
                    .ask(|cluster, now| cluster.older_found(now, &damaged, found))
                    .await;
            }
        }
    }
}

/// Writes the probe by which servers know the store again, where somebody has deleted it.
pub(crate) async fn renew_probe(store: Store, probe: String) {
    let mut warned = false;
    loop {
        let renewed = match store.read_probe().await {
            Ok(Some(found)) => {
                if found != probe {
                    tracing::warn!(
                        "another run has taken the store of checkpoints; give each its own"
                    );
                }
                return;
            }
            Ok(None) => store.write_probe(&probe).await,
            Err(error) => Err(error),
        };
        match renewed {
            Ok(()) => {
                tracing::warn!("the probe of the store of checkpoints was gone; wrote it again");
                return;
            }
            Err(error) => {
                if !std::mem::replace(&mut warned, true) {
                    tracing::warn!("cannot see to the probe of the store of checkpoints: {error}");
                }
                tokio::time::sleep(TRY_AGAIN).await;
            }
        }
    }
}

async fn write(shared: &Arc<Shared>, store: &Store, manifest: Manifest, keep: usize) {
    let number = manifest.number;
    let written = store.write_manifest(manifest).await;
    let written = written.map(|_| ()).map_err(|error| error.to_string());
    let counts = shared
        .ask(|cluster, now| cluster.manifest_written(now, number, written))
        .await;
    // One that was given up meanwhile must not push out those that are gone back to.
    if counts && let Err(error) = store.prune(keep).await {
        tracing::warn!("old checkpoints could not be deleted: {error}");
    }
}

async fn find_before(store: &Store, damaged: &Kept) -> Result<Kept, String> {
    loop {
        match store.before(damaged.number).await {
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

/// A checkpoint as one to go back to.
pub(crate) fn kept(store: &Store, manifest: &Manifest) -> Result<Kept, String> {
    Ok(Kept {
        location: store.location().to_owned(),
        number: manifest.number,
        progress: progress(manifest)?,
    })
}

/// Where the training stands in a checkpoint.
pub(crate) fn progress(manifest: &Manifest) -> Result<Progress, String> {
    serde_json::from_value(manifest.progress.clone()).map_err(|error| {
        format!(
            "the progress in checkpoint {} cannot be read: {error}",
            manifest.number
        )
    })
}
