//! Files in object stores. Data sources read them like files in the file system.

use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, LazyLock};

use object_store::path::Path as ObjectPath;
use object_store::{ListResult, ObjectStore, ObjectStoreExt};
use parking_lot::Mutex;
use storage::{Bucket, Location, Secrets, StorageError, environment};
use tokio::runtime::{Builder, Runtime};

/// The buckets that have been opened, by their names.
static BUCKETS: LazyLock<Mutex<HashMap<String, Bucket>>> = LazyLock::new(Mutex::default);

/// The Tokio runtime of all requests. The threads that read data are outside of any runtime.
static RUNTIME: LazyLock<io::Result<Runtime>> = LazyLock::new(|| {
    let mut runtime = Builder::new_multi_thread();
    runtime.worker_threads(1).thread_name("object-store");
    runtime.enable_all().build()
});

/// A file or folder in an object store.
#[derive(Clone)]
pub(crate) struct Remote {
    objects: Arc<dyn ObjectStore>,
    path: ObjectPath,
    secrets: Secrets,
    /// The URL.
    shown: String,
}

impl fmt::Debug for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Remote").field(&self.shown).finish()
    }
}

impl Remote {
    /// Returns the file or folder that a URL names; `None` if the path is no URL.
    ///
    /// # Errors
    /// If the URL does not name a place in an object store, or if the settings of the object store are invalid.
    pub(crate) fn new(path: &Path) -> io::Result<Option<Self>> {
        let Some(url) = path.to_str().filter(|text| text.contains("://")) else {
            return Ok(None);
        };
        let (name, path) = match Location::parse(url).map_err(refused)? {
            Location::Bucket { name, path } => (name, path),
            Location::Folder(_) => {
                let what = "give a plain path, or a URL as in s3://bucket/folder";
                return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
            }
        };
        let mut buckets = BUCKETS.lock();
        let bucket = match buckets.get(&name) {
            Some(bucket) => bucket.clone(),
            None => {
                let bucket = Bucket::open(&name, "", &environment()).map_err(refused)?;
                buckets.insert(name, bucket.clone());
                bucket
            }
        };
        let path = ObjectPath::parse(&path)
            .map_err(|error| refused(bucket.secrets.explain(url, &error.into())))?;
        Ok(Some(Self {
            objects: bucket.objects,
            path,
            secrets: bucket.secrets,
            shown: url.to_owned(),
        }))
    }

    /// Returns the number of bytes of a file; `None` if there is no such file.
    pub(crate) fn size(&self) -> io::Result<Option<u64>> {
        if self.path.as_ref().is_empty() {
            return Ok(None);
        }
        let (objects, path) = (self.objects.clone(), self.path.clone());
        match self.wait(async move { objects.head(&path).await }) {
            Ok(found) => Ok(Some(found.size)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Returns the folders and the files in a folder. Both lists are empty if the folder does not exist.
    pub(crate) fn list(&self) -> io::Result<(Vec<PathBuf>, Vec<PathBuf>)> {
        let (objects, path) = (self.objects.clone(), self.path.clone());
        let found: ListResult = self.wait(async move {
            let prefix = (!path.as_ref().is_empty()).then_some(&path);
            objects.list_with_delimiter(prefix).await
        })?;
        let inside = |path: &ObjectPath| Some(Path::new(&self.shown).join(path.filename()?));
        // Some programs mark a folder by an object of its name.
        let files = found.objects.iter().map(|object| &object.location);
        let files = files.filter(|location| **location != self.path);
        Ok((
            found.common_prefixes.iter().filter_map(inside).collect(),
            files.filter_map(inside).collect(),
        ))
    }

    /// Reads a part of a file.
    pub(crate) fn read(&self, range: Range<u64>) -> io::Result<Vec<u8>> {
        if range.is_empty() {
            return Ok(Vec::new());
        }
        let (objects, path) = (self.objects.clone(), self.path.clone());
        let wanted = range.end - range.start;
        let bytes = self.wait(async move { objects.get_range(&path, range).await })?;
        match bytes.len() as u64 == wanted {
            true => Ok(bytes.into()),
            false => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    /// Reads a whole file.
    pub(crate) fn read_all(&self) -> io::Result<Vec<u8>> {
        let (objects, path) = (self.objects.clone(), self.path.clone());
        let bytes = self.wait(async move { objects.get(&path).await?.bytes().await })?;
        Ok(bytes.into())
    }

    /// Runs a request and waits for its answer.
    fn wait<T: Send + 'static>(
        &self,
        request: impl Future<Output = object_store::Result<T>> + Send + 'static,
    ) -> io::Result<T> {
        let runtime = match &*RUNTIME {
            Ok(runtime) => runtime,
            Err(error) => return Err(io::Error::new(error.kind(), error.to_string())),
        };
        let (answer, answered) = sync_channel(1);
        runtime.spawn(async move {
            let _ = answer.send(request.await);
        });
        let answered = answered.recv().map_err(io::Error::other)?;
        answered.map_err(|error| refused(self.secrets.explain(&self.shown, &error)))
    }
}

/// Converts an error of the storage crate. The text leaves out the location, which the error around it names.
fn refused(error: StorageError) -> io::Error {
    let kind = match &error {
        StorageError::NotFound(_) => io::ErrorKind::NotFound,
        StorageError::Denied { .. } => io::ErrorKind::PermissionDenied,
        StorageError::Location { .. } => io::ErrorKind::InvalidInput,
        _ => io::ErrorKind::Other,
    };
    let text = match error {
        StorageError::Failed { reason, .. }
        | StorageError::Denied { reason, .. }
        | StorageError::Location { reason, .. } => reason,
        other => other.to_string(),
    };
    io::Error::new(kind, text)
}
