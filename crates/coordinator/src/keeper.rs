//! Does what the cluster wants of the store of checkpoints.

use std::sync::Arc;

use checkpoint::{Manifest, Store};

use crate::cluster::{Errand, Kept, Progress};
use crate::service::Shared;

/// Runs errands until it is dropped.
pub(crate) async fn run_errands(shared: Arc<Shared>, store: Store, keep: usize) {
    loop {
        match shared.take_errand() {
            None => shared.changed().await,
            Some(Errand::Write(manifest)) => write(&shared, &store, *manifest, keep).await,
            Some(Errand::FindBefore(damaged)) => {
                let found = find_before(&store, &damaged).await;
                shared
                    .ask(|cluster, now| cluster.found(now, &damaged, found))
                    .await;
            }
        }
    }
}

async fn write(shared: &Shared, store: &Store, manifest: Manifest, keep: usize) {
    let number = manifest.number;
    let written = store.write_manifest(manifest).await;
    let written = written.map(|_| ()).map_err(|error| error.to_string());
    let whole = written.is_ok();
    shared
        .ask(|cluster, now| cluster.saved(now, number, written))
        .await;
    if whole && let Err(error) = store.prune(keep).await {
        tracing::warn!("old checkpoints could not be deleted: {error}");
    }
}

async fn find_before(store: &Store, damaged: &Kept) -> Result<Kept, String> {
    match store.before(damaged.number).await {
        Ok(Some(manifest)) => kept(store, &manifest),
        Ok(None) => Err("there is none before it".to_owned()),
        Err(error) => Err(format!("those before it cannot be read: {error}")),
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
