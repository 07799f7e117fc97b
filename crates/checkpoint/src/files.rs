//! The files of a location, which is a folder or a part of a bucket in an object store.

use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{ListResult, ObjectStore, ObjectStoreExt, PutMode, PutPayload};
use shared_proto::task::boxed;
use storage::{Bucket, Location, Secrets, Variables, environment};

use crate::error::CheckpointError;
use crate::folder::{self, Mode};

/// The size in bytes of the parts in which larger files are uploaded, so that no request takes too long.
const REQUEST: usize = 16 << 20;

/// Reads, writes, lists and removes the files of a location. The folder `""` is the location itself. A file appears
/// whole or not at all.
#[derive(Clone)]
pub struct Files {
    objects: Arc<dyn ObjectStore>,
    /// The path of the location within the objects.
    root: Path,
    /// The path of the location in the file system, if it is a folder.
    folder: Option<PathBuf>,
    location: String,
    secrets: Arc<Secrets>,
    /// True if hashing and file access run on the runtime's blocking threads.
    threads: bool,
}

impl Files {
    /// Opens a folder, which is created if it is missing, or a URL, as [`Store::open`](crate::Store::open) does.
    ///
    /// # Errors
    /// [`CheckpointError::Location`], or if the folder cannot be created.
    pub fn open(location: &str) -> Result<Self, CheckpointError> {
        Self::open_with(location, &environment())
    }

    /// Opens a location as [`open`](Self::open) does, with the given environment variables instead of the process's.
    pub(crate) fn open_with(
        location: &str,
        variables: &Variables,
    ) -> Result<Self, CheckpointError> {
        let place = Location::parse(location)?;
        if let Location::Folder(folder) = &place {
            std::fs::create_dir_all(folder)
                .map_err(|error| CheckpointError::io(&folder.display().to_string(), &error))?;
        }
        Self::at(&place, variables)
    }

    /// Returns the files at a place. A folder must exist.
    pub(crate) fn at(place: &Location, variables: &Variables) -> Result<Self, CheckpointError> {
        match place {
            Location::Folder(folder) => {
                let location = folder.display().to_string();
                let objects = LocalFileSystem::new_with_prefix(folder)
                    .map_err(|error| Secrets::default().explain(&location, &error))?;
                Ok(Self::in_folder(Arc::new(objects), folder.clone(), location))
            }
            Location::Bucket { name, path } => {
                Ok(Self::in_bucket(Bucket::open(name, path, variables)?))
            }
        }
    }

    /// Returns the files of any object store, named `location` in messages. Their work stays on the caller's thread.
    pub(crate) fn over(objects: Arc<dyn ObjectStore>, location: &str) -> Self {
        Self {
            objects,
            root: Path::default(),
            folder: None,
            location: location.to_owned(),
            secrets: Arc::default(),
            threads: false,
        }
    }

    /// Returns the files of an existing folder.
    pub(crate) fn in_folder(
        objects: Arc<dyn ObjectStore>,
        folder: PathBuf,
        location: String,
    ) -> Self {
        Self {
            folder: Some(folder),
            threads: true,
            ..Self::over(objects, &location)
        }
    }

    /// Returns the files of a part of a bucket.
    pub(crate) fn in_bucket(bucket: Bucket) -> Self {
        Self {
            root: bucket.root,
            secrets: Arc::new(bucket.secrets),
            threads: true,
            ..Self::over(bucket.objects, &bucket.location)
        }
    }

    /// Returns the location, an absolute path or a URL without credentials.
    pub fn location(&self) -> &str {
        &self.location
    }

    /// Returns the name of a file or folder for messages.
    pub fn place(&self, name: &str) -> String {
        if name.is_empty() {
            return self.location.clone();
        }
        let location = self.location.trim_end_matches('/');
        format!("{location}/{}", name.trim_start_matches('/'))
    }

    /// Returns the files below one of the folders.
    pub(crate) fn below(&self, folder: &str) -> Self {
        Self {
            root: self.root.clone().join(folder),
            folder: self.folder.as_ref().map(|path| path.join(folder)),
            location: self.place(folder),
            ..self.clone()
        }
    }

    /// Returns the names of the folders of the location.
    ///
    /// # Errors
    /// If the location cannot be listed.
    #[boxed]
    pub async fn folders(&self) -> Result<Vec<String>, CheckpointError> {
        let found = self.found("").await?;
        let names = found.common_prefixes.iter().filter_map(Path::filename);
        Ok(names.map(str::to_owned).collect())
    }

    /// Returns the names and the sizes in bytes of the files in a folder.
    pub(crate) async fn list(&self, folder: &str) -> Result<Vec<(String, u64)>, CheckpointError> {
        let file = |object: &object_store::ObjectMeta| {
            Some((object.location.filename()?.to_owned(), object.size))
        };
        Ok(self
            .found(folder)
            .await?
            .objects
            .iter()
            .filter_map(file)
            .collect())
    }

    async fn found(&self, folder: &str) -> Result<ListResult, CheckpointError> {
        let path = self.path(folder);
        let prefix = (!path.as_ref().is_empty()).then_some(&path);
        let found = self.objects.list_with_delimiter(prefix).await;
        found.map_err(|error| self.explain(&self.place(folder), &error))
    }

    /// Reads a file.
    ///
    /// # Errors
    /// [`CheckpointError::NotFound`], or the file cannot be read.
    #[boxed]
    pub async fn read(&self, folder: &str, name: &str) -> Result<Bytes, CheckpointError> {
        let explain = |error: object_store::Error| {
            let place = self.place(&format!("{folder}/{name}"));
            self.explain(&place, &error)
        };
        let found = self.objects.get(&self.path(folder).join(name)).await;
        found.map_err(explain)?.bytes().await.map_err(explain)
    }

    /// Writes a file. Replaces an existing one.
    ///
    /// # Errors
    /// If the file cannot be written.
    #[boxed]
    pub async fn write(
        &self,
        folder: &str,
        name: &str,
        content: Bytes,
    ) -> Result<(), CheckpointError> {
        self.write_as(folder, name, content, Mode::Replace).await
    }

    /// Creates a file that must not exist. Of two writers at most one succeeds.
    ///
    /// # Errors
    /// [`CheckpointError::Exists`], or if the file cannot be written.
    #[boxed]
    pub async fn create(
        &self,
        folder: &str,
        name: &str,
        content: Bytes,
    ) -> Result<(), CheckpointError> {
        self.write_as(folder, name, content, Mode::Create).await
    }

    async fn write_as(
        &self,
        folder: &str,
        name: &str,
        content: Bytes,
        mode: Mode,
    ) -> Result<(), CheckpointError> {
        let place = self.place(&format!("{folder}/{name}"));
        if let Some(root) = &self.folder {
            let (folder, name) = (root.join(folder), name.to_owned());
            let write = move || match folder::write(&folder, &name, &content, mode) {
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
                    Err(CheckpointError::Exists(place))
                }
                written => written.map_err(|error| CheckpointError::io(&place, &error)),
            };
            return self.work(write).await;
        }
        let path = self.path(folder).join(name);
        match mode {
            Mode::Replace => self.put(&path, content).await,
            Mode::Create => {
                let put = self
                    .objects
                    .put_opts(&path, content.into(), PutMode::Create.into());
                put.await.map(drop)
            }
        }
        .map_err(|error| self.explain(&place, &error))
    }

    async fn put(&self, path: &Path, mut content: Bytes) -> object_store::Result<()> {
        if content.len() <= REQUEST {
            self.objects.put(path, content.into()).await?;
            return Ok(());
        }
        let mut upload = self.objects.put_multipart(path).await?;
        while !content.is_empty() {
            let part = content.split_to(content.len().min(REQUEST));
            if let Err(error) = upload.put_part(PutPayload::from(part)).await {
                // An upload that is not aborted stays in the bucket: it is invisible, but costs money.
                let _ = upload.abort().await;
                return Err(error);
            }
        }
        upload.complete().await?;
        Ok(())
    }

    /// Removes files of a folder in order.
    pub(crate) async fn remove(
        &self,
        folder: &str,
        names: &[String],
    ) -> Result<(), CheckpointError> {
        if let Some(root) = &self.folder {
            let (path, names) = (root.join(folder), names.to_vec());
            let place = self.place(folder);
            let removed =
                move || folder::remove(&path, &names).map_err(|e| CheckpointError::io(&place, &e));
            return self.work(removed).await;
        }
        for name in names {
            match self
                .objects
                .delete(&self.path(folder).join(name.as_str()))
                .await
            {
                Ok(()) | Err(object_store::Error::NotFound { .. }) => {}
                Err(error) => {
                    let place = self.place(&format!("{folder}/{name}"));
                    return Err(self.explain(&place, &error));
                }
            }
        }
        Ok(())
    }

    /// Runs work that would block other tasks: on the runtime's blocking threads if `threads` is true, otherwise at
    /// once.
    pub(crate) async fn work<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, CheckpointError> + Send + 'static,
    ) -> Result<T, CheckpointError> {
        if !self.threads {
            return work();
        }
        tokio::task::spawn_blocking(work)
            .await
            .unwrap_or_else(|error| {
                Err(CheckpointError::Storage {
                    place: self.location.clone(),
                    reason: error.to_string(),
                })
            })
    }

    fn explain(&self, place: &str, error: &object_store::Error) -> CheckpointError {
        self.secrets.explain(place, error).into()
    }

    fn path(&self, folder: &str) -> Path {
        let names = folder.split('/').filter(|name| !name.is_empty());
        names.fold(self.root.clone(), |path, name| path.join(name))
    }
}
