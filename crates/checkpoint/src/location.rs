//! The locations that a user may give for checkpoints, and their stores.

use shared_proto::task::boxed;
use storage::{Location, Variables, environment};

use crate::error::CheckpointError;
use crate::files::Files;
use crate::format::{folder_name, number_of};
use crate::manifest::Manifest;
use crate::store::Store;

/// The folder of a run directory that has its checkpoints.
const CHECKPOINTS: &str = "checkpoints";
impl Store {
    /// Opens a folder, which is created if it is missing, or a URL: `file:///folder` or
    /// `s3://bucket/folder`. The settings of S3 come from the usual environment variables:
    /// `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_REGION`, `AWS_ENDPOINT`, `AWS_ALLOW_HTTP`.
    /// Sends no request to S3.
    ///
    /// # Errors
    /// [`CheckpointError::Location`], or if the folder cannot be created.
    pub fn open(location: &str) -> Result<Self, CheckpointError> {
        Self::open_with(location, &environment())
    }

    /// Opens a location as [`open`](Self::open) does, with the given environment variables instead of
    /// the process's.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_with(location: &str, variables: &Variables) -> Result<Self, CheckpointError> {
        Files::open_with(location, variables).map(Self::from)
    }
}

/// Returns the store at a location, which is a run directory with a folder `checkpoints`, a folder of checkpoints, or a
/// single checkpoint. Also returns the number if it is a single checkpoint. Creates no folder.
///
/// # Errors
/// [`CheckpointError::NotFound`], which names the missing checkpoint and its location, or if the store cannot be read.
#[boxed]
pub async fn resolve(location: &str) -> Result<(Store, Option<u64>), CheckpointError> {
    resolve_with(location, &environment()).await
}

/// Returns the checkpoint at a location, or the newest good one if the location is not a single checkpoint.
///
/// # Errors
/// As [`resolve`], or [`CheckpointError::Damaged`], which names an older checkpoint that may serve instead.
#[boxed]
pub async fn load(location: &str) -> Result<(Store, Manifest), CheckpointError> {
    let (store, number) = resolve(location).await?;
    let manifest = load_from(&store, number).await?;
    Ok((store, manifest))
}

/// Resolves a location as [`resolve`] does, with the given environment variables.
pub(crate) async fn resolve_with(
    location: &str,
    variables: &Variables,
) -> Result<(Store, Option<u64>), CheckpointError> {
    let place = Location::parse(location)?;
    if let Some((parent, number)) = single(&place) {
        return Ok((existing(&parent, variables)?, Some(number)));
    }
    let store = existing(&place, variables)?;
    let folders = store.folders().await?;
    if folders.iter().any(|name| name == CHECKPOINTS) {
        return Ok((store.below(CHECKPOINTS), None));
    }
    if folders.iter().any(|name| number_of(name).is_some()) {
        return Ok((store, None));
    }
    Err(CheckpointError::NotFound(format!(
        "no checkpoints at {}: neither a folder {CHECKPOINTS:?} (of a run) nor folders like {:?} are in it",
        store.location(),
        folder_name(12)
    )))
}

/// Reads the manifest of the checkpoint with this number, or without a number that of the newest good checkpoint.
/// Checks that the checkpoint's files exist and have the right sizes.
pub(crate) async fn load_from(
    store: &Store,
    number: Option<u64>,
) -> Result<Manifest, CheckpointError> {
    let Some(number) = number else {
        return store.newest().await?.ok_or_else(|| {
            CheckpointError::NotFound(format!(
                "no whole checkpoint in {}: none of its folders has a good manifest.json",
                store.location()
            ))
        });
    };
    match store.manifest(number).await {
        Err(CheckpointError::NotFound(_)) => {
            let listed = store.list().await?;
            let there: Vec<String> = listed
                .iter()
                .filter(|l| l.complete)
                .map(|l| folder_name(l.number))
                .collect();
            let there = match there.as_slice() {
                [] => "no whole one is there".to_owned(),
                names => format!("there are {}", names.join(", ")),
            };
            let unfinished = if listed.iter().any(|l| l.number == number) {
                "is unfinished (it has no manifest.json)"
            } else {
                "is not there"
            };
            Err(CheckpointError::NotFound(format!(
                "{} {unfinished}; {there}",
                store.checkpoint_location(number)
            )))
        }
        Err(error) => Err(store.advise(number, error).await),
        Ok(manifest) => match store.check_present(&manifest).await {
            Ok(()) => Ok(manifest),
            Err(error) => Err(store.advise(number, error).await),
        },
    }
}

/// Returns the parent and the number, if the place is that of a single checkpoint.
fn single(place: &Location) -> Option<(Location, u64)> {
    match place {
        Location::Folder(folder) => {
            let number = number_of(folder.file_name()?.to_str()?)?;
            Some((Location::Folder(folder.parent()?.to_owned()), number))
        }
        Location::Bucket { name, path } => {
            let (parent, last) = path.rsplit_once('/').unwrap_or(("", path));
            let parent = Location::Bucket {
                name: name.clone(),
                path: parent.to_owned(),
            };
            Some((parent, number_of(last)?))
        }
    }
}

/// Returns the store at a place. A folder must exist.
fn existing(place: &Location, variables: &Variables) -> Result<Store, CheckpointError> {
    match place {
        Location::Folder(folder) if !folder.is_dir() => Err(CheckpointError::NotFound(format!(
            "no checkpoints at {}: there is no such folder",
            folder.display()
        ))),
        _ => store(place, variables),
    }
}

fn store(place: &Location, variables: &Variables) -> Result<Store, CheckpointError> {
    Files::at(place, variables).map(Store::from)
}
