//! The store of checkpoints: writes, finds and reads them.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutMode, PutPayload};

use crate::error::{CheckpointError, Secrets};
use crate::folder::{self, Mode};
use crate::format::{folder_name, number_of};
use crate::manifest::{FileEntry, Manifest, is_file_name};
use crate::part::{SavedBlock, check_blocks, decode};

mod owner;
mod tidy;

pub use owner::{BEAT, Claim, DEAD_AFTER};
pub use tidy::Listed;

const MANIFEST: &str = "manifest.json";
/// The size of the parts in which larger files are uploaded, so that no request takes too long.
const REQUEST: usize = 16 << 20;

/// A location that holds checkpoints.
#[derive(Clone)]
pub struct Store {
    objects: Arc<dyn ObjectStore>,
    /// The path of the location within the objects.
    root: Path,
    /// The path of the location in the file system, if it is a folder.
    folder: Option<PathBuf>,
    location: String,
    secrets: Arc<Secrets>,
    /// The id of the run that writes through this store.
    run: String,
    /// True if hashing and file access run on the runtime's blocking threads.
    threads: bool,
}

impl fmt::Debug for Store {
    /// Leaves out the object store: its `Debug` output contains keys.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Store").field(&self.location).finish()
    }
}

impl Store {
    /// Returns a store over any objects, named `location` in messages. It uses no threads.
    pub fn over(objects: Arc<dyn ObjectStore>, location: &str) -> Self {
        Self {
            objects,
            root: Path::default(),
            folder: None,
            location: location.to_owned(),
            secrets: Arc::default(),
            run: String::new(),
            threads: false,
        }
    }

    /// Returns a store in an existing folder.
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

    /// Returns a store over a bucket's objects below `root`.
    pub(crate) fn in_bucket(
        objects: Arc<dyn ObjectStore>,
        root: Path,
        location: String,
        secrets: Secrets,
    ) -> Self {
        Self {
            root,
            secrets: Arc::new(secrets),
            threads: true,
            ..Self::over(objects, &location)
        }
    }

    /// Returns the location, an absolute path or a URL without credentials.
    pub fn location(&self) -> &str {
        &self.location
    }

    /// Returns the location of one checkpoint, which [`load`](crate::load) accepts.
    pub fn checkpoint_location(&self, number: u64) -> String {
        self.place(&folder_name(number))
    }

    /// Returns the store for one run. The names of its parts contain the run's id, so that no run can
    /// overwrite the parts of another.
    #[must_use]
    pub fn of_run(self, run: &str) -> Self {
        Self {
            run: run.to_owned(),
            ..self
        }
    }

    /// Returns the id that [`of_run`](Self::of_run) was given.
    pub fn run(&self) -> &str {
        &self.run
    }

    /// Returns the store below one of this store's folders.
    pub(crate) fn below(&self, name: &str) -> Self {
        Self {
            root: self.root.clone().join(name),
            folder: self.folder.as_ref().map(|folder| folder.join(name)),
            location: self.place(name),
            ..self.clone()
        }
    }

    /// Returns the names of the folders in the store.
    pub(crate) async fn folders(&self) -> Result<Vec<String>, CheckpointError> {
        let root = (!self.root.as_ref().is_empty()).then_some(&self.root);
        let found = self.objects.list_with_delimiter(root).await;
        let found = found.map_err(|error| self.secrets.explain(&self.location, &error))?;
        let names = found.common_prefixes.iter().filter_map(Path::filename);
        Ok(names.map(str::to_owned).collect())
    }

    /// Writes a file of a checkpoint that has no manifest yet. The file appears whole or not at all, and
    /// replaces an existing one of that name. Once this returns, it survives a crash.
    ///
    /// # Errors
    /// If the store cannot be written to, or the name leads elsewhere.
    pub async fn write_file(
        &self,
        checkpoint: u64,
        name: &str,
        content: Bytes,
    ) -> Result<(), CheckpointError> {
        if !is_file_name(name) || name == MANIFEST {
            return Err(CheckpointError::Location {
                location: name.to_owned(),
                reason: "it is no name of a file of a checkpoint".to_owned(),
            });
        }
        self.write(&folder_name(checkpoint), name, content).await
    }

    /// Writes a manifest, which completes its checkpoint, reads it back, and returns it with its
    /// checksum. All its files must have been written. Never replaces an existing manifest.
    ///
    /// # Errors
    /// If the store cannot be written to; [`CheckpointError::Damaged`] if the checkpoint would not be
    /// whole; [`CheckpointError::Exists`] if another writer has made a checkpoint of that number.
    pub async fn write_manifest(&self, manifest: Manifest) -> Result<Manifest, CheckpointError> {
        let bytes = manifest.to_bytes()?;
        self.check_present(&manifest).await?;
        let folder = folder_name(manifest.number);
        let place = self.place(&format!("{folder}/{MANIFEST}"));
        let expected = Manifest::read(&bytes, &place)?;
        match self.create(&folder, MANIFEST, bytes.clone()).await {
            // A retried request may have found the file that its own first attempt created.
            Ok(()) | Err(CheckpointError::Exists(_)) => {}
            Err(error) => return Err(error),
        }
        if self.read(&folder, MANIFEST).await? == bytes {
            Ok(expected)
        } else {
            Err(CheckpointError::Exists(place))
        }
    }

    /// Reads a checkpoint's manifest.
    ///
    /// # Errors
    /// [`CheckpointError::NotFound`] if there is none; [`CheckpointError::Damaged`] or
    /// [`CheckpointError::Newer`]; or if the store cannot be read.
    pub async fn manifest(&self, number: u64) -> Result<Manifest, CheckpointError> {
        let folder = folder_name(number);
        let what = self.place(&format!("{folder}/{MANIFEST}"));
        let manifest = Manifest::read(&self.read(&folder, MANIFEST).await?, &what)?;
        if manifest.number == number {
            Ok(manifest)
        } else {
            let reason = format!(
                "it is of {}, and not of the folder that it is in",
                folder_name(manifest.number)
            );
            Err(CheckpointError::damaged(&what, reason))
        }
    }

    /// Finds the newest checkpoint that has a good manifest and files of the right sizes. Skips damaged
    /// ones with a warning.
    ///
    /// # Errors
    /// If the store cannot be read, or if the newest is of a newer format: an older one would lose the
    /// training of the newer program.
    pub async fn newest(&self) -> Result<Option<Manifest>, CheckpointError> {
        self.newest_of(|_| true, |_| true).await
    }

    /// Finds the newest good checkpoint below a number, as [`newest`](Self::newest) does.
    ///
    /// # Errors
    /// As [`newest`](Self::newest).
    pub async fn before(&self, number: u64) -> Result<Option<Manifest>, CheckpointError> {
        self.before_of(number, |_| true).await
    }

    /// Finds the newest good checkpoint below a number that is `wanted`.
    ///
    /// # Errors
    /// As [`newest`](Self::newest).
    pub async fn before_of(
        &self,
        number: u64,
        wanted: impl Fn(&Manifest) -> bool,
    ) -> Result<Option<Manifest>, CheckpointError> {
        self.newest_of(|other| other < number, wanted).await
    }

    async fn newest_of(
        &self,
        numbered: impl Fn(u64) -> bool,
        wanted: impl Fn(&Manifest) -> bool,
    ) -> Result<Option<Manifest>, CheckpointError> {
        let folders = self.folders().await?;
        let numbers = folders.iter().filter_map(|name| number_of(name));
        let mut numbers: Vec<u64> = numbers.filter(|number| numbered(*number)).collect();
        numbers.sort_unstable();
        for number in numbers.into_iter().rev() {
            match self.whole(number).await {
                Ok(manifest) if wanted(&manifest) => return Ok(Some(manifest)),
                Ok(_) => {}
                Err(CheckpointError::Damaged { file, reason, .. }) => {
                    tracing::warn!(file, reason, "a damaged checkpoint is passed over");
                }
                Err(CheckpointError::NotFound(_)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }

    /// Reads a checkpoint's manifest and checks that all its files exist with the right sizes.
    async fn whole(&self, number: u64) -> Result<Manifest, CheckpointError> {
        let manifest = self.manifest(number).await?;
        self.check_present(&manifest).await?;
        Ok(manifest)
    }

    /// Checks that a checkpoint's files exist and have the right sizes, without reading them.
    ///
    /// # Errors
    /// [`CheckpointError::Damaged`], or if the store cannot be read.
    pub async fn check_present(&self, manifest: &Manifest) -> Result<(), CheckpointError> {
        let files = self.files(manifest.number).await?;
        for entry in &manifest.files {
            let found = files.iter().find(|(name, _)| *name == entry.name);
            let reason = match found {
                None => "it is missing".to_owned(),
                Some((_, bytes)) if *bytes < entry.bytes => {
                    format!("truncated: {bytes} of {} bytes", entry.bytes)
                }
                Some((_, bytes)) if *bytes > entry.bytes => {
                    format!("altered: {bytes} bytes instead of {}", entry.bytes)
                }
                Some(_) => continue,
            };
            let file = self.file_place(manifest.number, &entry.name);
            return Err(CheckpointError::damaged(&file, reason));
        }
        Ok(())
    }

    /// Reads a checkpoint's file and checks that it is unaltered and has the blocks that the manifest
    /// names.
    ///
    /// # Errors
    /// [`CheckpointError::Damaged`], or if the store cannot be read.
    pub async fn read_file(
        &self,
        manifest: &Manifest,
        file: &FileEntry,
    ) -> Result<Vec<SavedBlock>, CheckpointError> {
        let place = self.file_place(manifest.number, &file.name);
        let content = match self.read(&folder_name(manifest.number), &file.name).await {
            Err(CheckpointError::NotFound(_)) => {
                return Err(CheckpointError::damaged(&place, "it is missing"));
            }
            content => content?,
        };
        let (manifest, file) = (manifest.clone(), file.clone());
        self.work(move || {
            let damaged = |reason| CheckpointError::damaged(&place, reason);
            file.check(&content).map_err(damaged)?;
            let blocks = decode(&content, &place)?;
            check_blocks(&blocks, &manifest, &file).map_err(damaged)?;
            Ok(blocks)
        })
        .await
    }

    /// Reads and checks all files of a checkpoint.
    ///
    /// # Errors
    /// As [`read_file`](Self::read_file), of the first file that is damaged.
    pub async fn verify(&self, manifest: &Manifest) -> Result<(), CheckpointError> {
        for file in &manifest.files {
            self.read_file(manifest, file).await?;
        }
        Ok(())
    }

    /// Adds an older checkpoint that may serve instead to an error about a checkpoint's content.
    pub async fn advise(&self, number: u64, error: CheckpointError) -> CheckpointError {
        match error {
            CheckpointError::Damaged { file, reason, .. } => {
                // If none can be found, the damage is reported all the same.
                let instead = self.before(number).await.ok().flatten();
                CheckpointError::Damaged {
                    file,
                    reason,
                    instead: instead.map(|m| (m.number, self.checkpoint_location(m.number))),
                }
            }
            error => error,
        }
    }

    /// Returns the names and sizes of the files in a checkpoint's folder.
    async fn files(&self, number: u64) -> Result<Vec<(String, u64)>, CheckpointError> {
        let name = folder_name(number);
        let found = self
            .objects
            .list_with_delimiter(Some(&self.root.clone().join(name.as_str())))
            .await
            .map_err(|error| self.secrets.explain(&self.place(&name), &error))?;
        let file = |object: &object_store::ObjectMeta| {
            Some((object.location.filename()?.to_owned(), object.size))
        };
        Ok(found.objects.iter().filter_map(file).collect())
    }

    /// Writes a file. Replaces an existing one.
    pub(crate) async fn write(
        &self,
        folder: &str,
        name: &str,
        content: Bytes,
    ) -> Result<(), CheckpointError> {
        self.write_as(folder, name, content, Mode::Replace).await
    }

    /// Creates a file that must not exist. Of two writers at most one succeeds.
    async fn create(
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
        let path = self.path(folder, name);
        match mode {
            Mode::Replace => self.put(&path, content).await,
            Mode::Create => {
                let put = self
                    .objects
                    .put_opts(&path, content.into(), PutMode::Create.into());
                put.await.map(drop)
            }
        }
        .map_err(|error| self.secrets.explain(&place, &error))
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

    pub(crate) async fn read(&self, folder: &str, name: &str) -> Result<Bytes, CheckpointError> {
        let explain = |error: object_store::Error| {
            let place = self.place(&format!("{folder}/{name}"));
            self.secrets.explain(&place, &error)
        };
        let found = self.objects.get(&self.path(folder, name)).await;
        found.map_err(explain)?.bytes().await.map_err(explain)
    }

    fn path(&self, folder: &str, name: &str) -> Path {
        let names = folder.split('/').filter(|part| !part.is_empty());
        names
            .chain([name])
            .fold(self.root.clone(), |path, part| path.join(part))
    }

    /// Returns the name of a file or folder in the store for messages.
    fn place(&self, name: &str) -> String {
        let location = self.location.trim_end_matches('/');
        format!("{location}/{}", name.trim_start_matches('/'))
    }

    fn file_place(&self, number: u64, name: &str) -> String {
        self.place(&format!("{}/{name}", folder_name(number)))
    }

    /// Runs work that would block other tasks.
    async fn work<T: Send + 'static>(
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
}
