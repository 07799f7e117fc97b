//! The locations that a user may give for checkpoints, and their stores.

use std::path::{Path as FilePath, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use object_store::RetryConfig;
use object_store::aws::{AmazonS3Builder, S3ConditionalPut};
use object_store::local::LocalFileSystem;
use object_store::path::Path;

use crate::error::{CheckpointError, Secrets, without_user};
use crate::files::Files;
use crate::format::{folder_name, number_of};
use crate::manifest::Manifest;
use crate::store::Store;

/// The folder of a run directory that has its checkpoints.
const CHECKPOINTS: &str = "checkpoints";
/// The number of retries of a request, and the time in which they must succeed. Callers have deadlines of their own.
const RETRIES: usize = 6;
const RETRY_TIMEOUT: Duration = Duration::from_secs(60);

/// Environment variables, as name and value.
type Variables = [(String, String)];

/// A parsed location.
enum Backend {
    Folder(PathBuf),
    Bucket { name: String, path: String },
}

impl Store {
    /// Opens a folder, which is created if it is missing, or a URL: `file:///folder` or
    /// `s3://bucket/folder`. The settings of S3 come from the usual environment variables:
    /// `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_REGION`, `AWS_ENDPOINT`, `AWS_ALLOW_HTTP`.
    /// Sends no request to S3.
    ///
    /// # Errors
    /// [`CheckpointError::Location`], or the folder cannot be made.
    pub fn open(location: &str) -> Result<Self, CheckpointError> {
        Self::open_with(location, &environment())
    }

    /// Opens a location as [`open`](Self::open) does, with the given environment variables instead of
    /// the process's.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_with(location: &str, variables: &Variables) -> Result<Self, CheckpointError> {
        let place = Backend::parse(location)?;
        if let Backend::Folder(folder) = &place {
            std::fs::create_dir_all(folder)
                .map_err(|error| CheckpointError::io(&folder.display().to_string(), &error))?;
        }
        place.store(variables)
    }
}

/// Returns the store at a location: a run directory with a folder `checkpoints`, a folder of
/// checkpoints, or a single checkpoint. For a single one it also returns the number. Creates no folder.
///
/// # Errors
/// [`CheckpointError::NotFound`] names the missing checkpoint and its location; or the store cannot be read.
pub async fn resolve(location: &str) -> Result<(Store, Option<u64>), CheckpointError> {
    resolve_with(location, &environment()).await
}

/// Returns the checkpoint at a location, or the newest good one if the location names no single one.
///
/// # Errors
/// As [`resolve`]. [`CheckpointError::Damaged`] of a single one names an older one that may serve.
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
    let place = Backend::parse(location)?;
    if let Some((parent, number)) = place.single() {
        return Ok((parent.existing(variables)?, Some(number)));
    }
    let store = place.existing(variables)?;
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

/// Reads the manifest of a number, or of the newest good checkpoint, from a store.
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

impl Backend {
    fn parse(location: &str) -> Result<Self, CheckpointError> {
        let refused = |reason: &str| CheckpointError::Location {
            location: without_user(location),
            reason: reason.to_owned(),
        };
        if location.is_empty() {
            return Err(refused("it is empty"));
        }
        let Some((scheme, rest)) = location.split_once("://") else {
            let folder = std::path::absolute(location).map_err(|e| refused(&e.to_string()))?;
            return Ok(Self::Folder(folder));
        };
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        if authority.contains('@') {
            return Err(refused(
                "a URL must not have a user or password in it; keys are taken from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
            ));
        }
        if let Some((plain, _)) = location.split_once(['?', '#']) {
            // The query of a URL may contain a signature.
            return Err(CheckpointError::Location {
                location: without_user(plain),
                reason: "a URL must not have a query or fragment".to_owned(),
            });
        }
        match scheme.to_ascii_lowercase().as_str() {
            "file" if !authority.is_empty() || path.is_empty() => Err(refused(
                "a file's URL has three slashes, as in file:///data/checkpoints",
            )),
            "file" if path.contains('%') => Err(refused(
                "escapes in a file's URL are not read; give the plain path",
            )),
            "file" => Ok(Self::Folder(FilePath::new("/").join(path))),
            "s3" | "s3a" if authority.is_empty() => {
                Err(refused("the bucket is missing, as in s3://bucket/folder"))
            }
            "s3" | "s3a" => Ok(Self::Bucket {
                name: authority.to_owned(),
                path: path.trim_matches('/').to_owned(),
            }),
            _ => Err(refused(
                "give a folder, file:///folder or s3://bucket/folder",
            )),
        }
    }

    /// Returns the parent and the number, if the place is that of a single checkpoint.
    fn single(&self) -> Option<(Self, u64)> {
        match self {
            Self::Folder(folder) => {
                let number = number_of(folder.file_name()?.to_str()?)?;
                Some((Self::Folder(folder.parent()?.to_owned()), number))
            }
            Self::Bucket { name, path } => {
                let (parent, last) = path.rsplit_once('/').unwrap_or(("", path));
                let parent = Self::Bucket {
                    name: name.clone(),
                    path: parent.to_owned(),
                };
                Some((parent, number_of(last)?))
            }
        }
    }

    /// Returns the store. A folder must exist.
    fn existing(&self, variables: &Variables) -> Result<Store, CheckpointError> {
        match self {
            Self::Folder(folder) if !folder.is_dir() => Err(CheckpointError::NotFound(format!(
                "no checkpoints at {}: there is no such folder",
                folder.display()
            ))),
            _ => self.store(variables),
        }
    }

    fn store(&self, variables: &Variables) -> Result<Store, CheckpointError> {
        match self {
            Self::Folder(folder) => {
                let location = folder.display().to_string();
                let objects = LocalFileSystem::new_with_prefix(folder)
                    .map_err(|error| Secrets::default().explain(&location, &error))?;
                Ok(Files::in_folder(Arc::new(objects), folder.clone(), location).into())
            }
            Self::Bucket { name, path } => bucket(name, path, variables),
        }
    }
}

fn bucket(name: &str, path: &str, variables: &Variables) -> Result<Store, CheckpointError> {
    let pairs = || variables.iter().map(|(k, v)| (k.as_str(), v.as_str()));
    let secrets = Secrets::of(pairs());
    let location = format!("s3://{name}/{path}")
        .trim_end_matches('/')
        .to_owned();
    let refused = |reason: String| CheckpointError::Location {
        location: secrets.hide(&location),
        reason: secrets.hide(&reason),
    };
    let root = Path::parse(path).map_err(|error| refused(error.to_string()))?;
    let builder = AmazonS3Builder::new().with_retry(RetryConfig {
        max_retries: RETRIES,
        retry_timeout: RETRY_TIMEOUT,
        ..RetryConfig::default()
    });
    let known = pairs().filter_map(|(key, value)| {
        let key = key
            .strip_prefix("AWS_")
            .is_some()
            .then(|| key.to_ascii_lowercase())?;
        Some((key.parse().ok()?, value))
    });
    let objects = known
        .fold(builder, |builder, (key, value)| {
            builder.with_config(key, value)
        })
        .with_bucket_name(name)
        // Claims rely on it: of two runs that create the same file, one fails.
        .with_conditional_put(S3ConditionalPut::ETagMatch)
        .build()
        .map_err(|error| refused(error.to_string()))?;
    Ok(Files::in_bucket(Arc::new(objects), root, location, secrets).into())
}

/// Returns the process's environment variables that are valid Unicode.
fn environment() -> Vec<(String, String)> {
    let text = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
        Some((name.into_string().ok()?, value.into_string().ok()?))
    };
    std::env::vars_os()
        .filter_map(text)
        .filter(|(name, _)| name.starts_with("AWS_"))
        .collect()
}
