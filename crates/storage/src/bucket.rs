//! The objects of a bucket.

use std::ffi::OsString;
use std::fmt;
use std::sync::Arc;
#[cfg(feature = "s3")]
use std::time::Duration;

use object_store::ObjectStore;
use object_store::path::Path;

use crate::error::StorageError;
use crate::secrets::Secrets;

/// The number of retries of a request, and the time in which they must succeed. Callers have deadlines of their own.
#[cfg(feature = "s3")]
const RETRIES: usize = 6;
#[cfg(feature = "s3")]
const RETRY_TIMEOUT: Duration = Duration::from_secs(60);

/// Environment variables, as name and value.
pub type Variables = [(String, String)];

/// A part of a bucket.
#[derive(Clone)]
pub struct Bucket {
    /// The objects of the whole bucket.
    pub objects: Arc<dyn ObjectStore>,
    /// The path of the part.
    pub root: Path,
    /// The part's URL, without credentials.
    pub location: String,
    /// The keys for the bucket, which no message may show.
    pub secrets: Secrets,
}

impl Bucket {
    /// Opens a part of a bucket of S3. The settings come from the usual environment variables: `AWS_ACCESS_KEY_ID`,
    /// `AWS_SECRET_ACCESS_KEY`, `AWS_REGION`, `AWS_ENDPOINT`, `AWS_ALLOW_HTTP`. Sends no request.
    ///
    /// # Errors
    /// [`StorageError::Location`] if a setting or the path makes no sense.
    pub fn open(name: &str, path: &str, variables: &Variables) -> Result<Self, StorageError> {
        let pairs = || variables.iter().map(|(k, v)| (k.as_str(), v.as_str()));
        let secrets = Secrets::new(pairs());
        let location = format!("s3://{name}/{path}")
            .trim_end_matches('/')
            .to_owned();
        let refused = |reason: String| StorageError::Location {
            location: secrets.hide(&location),
            reason: secrets.hide(&reason),
        };
        let root = Path::parse(path).map_err(|error| refused(error.to_string()))?;
        let objects = objects(name, variables).map_err(refused)?;
        Ok(Self {
            objects,
            root,
            location,
            secrets,
        })
    }
}

/// Returns the objects of a bucket, or the reason why they cannot be reached.
#[cfg(feature = "s3")]
fn objects(name: &str, variables: &Variables) -> Result<Arc<dyn ObjectStore>, String> {
    use object_store::RetryConfig;
    use object_store::aws::{AmazonS3Builder, S3ConditionalPut};

    let builder = AmazonS3Builder::new().with_retry(RetryConfig {
        max_retries: RETRIES,
        retry_timeout: RETRY_TIMEOUT,
        ..RetryConfig::default()
    });
    let known = variables.iter().filter_map(|(key, value)| {
        let key = key.starts_with("AWS_").then(|| key.to_ascii_lowercase());
        Some((key?.parse().ok()?, value.as_str()))
    });
    let objects = known
        .fold(builder, |builder, (key, value)| {
            builder.with_config(key, value)
        })
        .with_bucket_name(name)
        // Claims of checkpoints rely on it: of two runs that create the same file, one fails.
        .with_conditional_put(S3ConditionalPut::ETagMatch)
        .build();
    objects
        .map(|objects| Arc::new(objects) as Arc<dyn ObjectStore>)
        .map_err(|error| error.to_string())
}

/// Refuses: this program cannot reach buckets.
#[cfg(not(feature = "s3"))]
fn objects(_: &str, _: &Variables) -> Result<Arc<dyn ObjectStore>, String> {
    Err(
        "this program was built without S3; build it with `--features s3`, or give a folder"
            .to_owned(),
    )
}

impl fmt::Debug for Bucket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Bucket").field(&self.location).finish()
    }
}

/// Returns the process's environment variables for S3 that are valid Unicode.
pub fn environment() -> Vec<(String, String)> {
    let text = |(name, value): (OsString, OsString)| {
        Some((name.into_string().ok()?, value.into_string().ok()?))
    };
    std::env::vars_os()
        .filter_map(text)
        .filter(|(name, _)| name.starts_with("AWS_"))
        .collect()
}
