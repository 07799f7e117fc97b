//! The locations that a user may give.

use std::path::{Path, PathBuf};

use crate::error::StorageError;
use crate::secrets::without_user;

/// A folder, or a part of a bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Location {
    /// An absolute path.
    Folder(PathBuf),
    /// A bucket of an object store.
    Bucket {
        /// The bucket's name.
        name: String,
        /// The path in the bucket, without slashes at its ends.
        path: String,
    },
}

impl Location {
    /// Reads a path, or a URL: `file:///folder` or `s3://bucket/folder`.
    ///
    /// # Errors
    /// [`StorageError::Location`].
    pub fn parse(location: &str) -> Result<Self, StorageError> {
        let refused = |reason: &str| StorageError::Location {
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
            return Err(StorageError::Location {
                location: without_user(plain),
                reason: "a URL must not have a query or fragment".to_owned(),
            });
        }
        match scheme.to_ascii_lowercase().as_str() {
            "file" if !authority.is_empty() || path.is_empty() => Err(refused(
                "a file's URL has three slashes, as in file:///data/folder",
            )),
            "file" if path.contains('%') => Err(refused(
                "escapes in a file's URL are not read; give the plain path",
            )),
            "file" => Ok(Self::Folder(Path::new("/").join(path))),
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
}
